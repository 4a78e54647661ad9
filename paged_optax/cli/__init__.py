"""Optax optimizers with moments in host memory: memory plans and a machine test."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from paged_optax.cli import doctor, plan

_PROGRAM = "python -m paged_optax"


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. --help says what there is.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, or prints the help without one.

    Args:
      arguments: The command line; None: this process's.

    Returns:
      The exit status: 0, or 1 if a command failed or a test did.
    """
    commands = {"plan": plan, "doctor": doctor}
    examples = [f"  {_PROGRAM} {command.EXAMPLE}" for command in commands.values()]
    parser = _Parser(
        prog=_PROGRAM,
        description=__doc__,
        epilog="\n".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda options: parser.print_help() or 0)
    choices = parser.add_subparsers(title="commands", metavar="command")
    for name, command in commands.items():
        summary = (command.__doc__ or "").splitlines()[0]
        subparser = choices.add_parser(
            name,
            usage=f"{_PROGRAM} {name} [options]",
            help=summary,
            description=summary,
            epilog=f"example: {_PROGRAM} {command.EXAMPLE}",
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, TypeError, ValueError) as error:
        print(f"paged_optax: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
