"""The command line: what fits on a device, and what this machine's backend offers."""

import argparse
import sys
from collections.abc import Sequence

from paged_optax.cli import doctor, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: As on the command line; None: this process's own.

    Returns:
      The exit status: 0, or 1 where a command failed or found something wrong.
    """
    parser = argparse.ArgumentParser(prog="paged_optax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (plan, doctor):
        summary = (command.__doc__ or "").splitlines()[0]
        name = command.__name__.rpartition(".")[2]
        own = commands.add_parser(name, help=summary, description=command.__doc__)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except ValueError as error:
        print(f"paged_optax: {error}", file=sys.stderr)
        return 1
