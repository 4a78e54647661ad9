"""Optax optimizers with moments in host memory: memory plans and a machine test."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from paged_optax.cli import doctor, plan


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. --help says what there is.\n")


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command, or prints the help without one.

    Args:
      args: The command line; None: this process's.

    Returns:
      The exit status: 0, or 1 if a command failed or a test did.
    """
    parser = _Parser(prog="python -m paged_optax", description=__doc__)
    parser.set_defaults(run=lambda options: parser.print_help() or 0)
    choices = parser.add_subparsers(title="commands", metavar="command")
    for command in (plan, doctor):
        name, summary = command.__name__.rpartition(".")[2], command.__doc__
        subparser = choices.add_parser(name, help=summary, description=summary)
        subparser.set_defaults(run=command.run)
        if command is plan:
            plan.add_arguments(subparser)
    options = parser.parse_args(args)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"paged_optax: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
