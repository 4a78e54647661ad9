"""Cases that need other XLA flags, in a process of their own: XLA reads them once.

A test asks for one case at a time, so that test workers share the work.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: By name a class or a module, its function, and what makes another one of that.
Breakages = dict[str, tuple[Any, str, Callable[..., Any]]]


@contextmanager
def process(script: str, flags: str) -> Iterator[Callable[[str], Any]]:
    """Starts a script that calls `answer`; gives what asks it for a case."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(
        [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    )
    # Optax's wrappers around pages are cases too.
    strict = ["-W", "error", "-W", "ignore:optax.MultiSteps transfers:UserWarning"]
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *strict, script],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as running,
    ):

        def ask(case: str) -> Any:
            assert running.stdin is not None and running.stdout is not None
            print(case, file=running.stdin, flush=True)
            reply = running.stdout.readline()
            if not reply:
                code = running.wait()
                errors.seek(0)  # its own place in the file is this one
                raise RuntimeError(f"{script} ended by {code}:\n{errors.read()}")
            return json.loads(reply)

        yield ask


def answer(outcome: Callable[[str], Any]) -> None:
    """Answers each line of the standard input with a line of JSON."""
    faulthandler.enable()
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what else is printed is no answer
        for line in sys.stdin:
            print(
                json.dumps(outcome(line.removesuffix("\n"))), file=replies, flush=True
            )


def break_by_name(breakages: Breakages) -> None:
    """Breaks what the variable `BROKEN` names, in this process."""
    owner, method, broken = breakages[os.environ["BROKEN"]]
    setattr(owner, method, broken(getattr(owner, method)))
