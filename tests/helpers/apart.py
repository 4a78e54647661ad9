"""Cases that need other XLA flags, in a process of their own: XLA reads them once.

A test asks for one case at a time, so that test workers share the work.
"""

import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def environment(flags: str = "") -> dict[str, str]:
    """Variables of a process on the CPU, in which these helpers can be imported."""
    tests = Path(__file__).parents[1]
    path = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    named = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return os.environ | named | {"PYTHONPATH": os.pathsep.join(path)}


def alone(code: str) -> str:
    """What Python code prints that spoils its process; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def process(script: str, flags: str) -> Iterator[Callable[[str], Any]]:
    """Starts a script that calls `answer`; gives what asks it for a case."""
    # Optax's wrappers around pages are cases too.
    strict = ["-W", "error", "-W", "ignore:optax.MultiSteps transfers:UserWarning"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *strict, script],
            env=environment(flags),
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


def answer(
    outcome: Callable[[str], Any],
    forget: Callable[[], Any] = lambda: None,
    every: int = 100,
) -> None:
    """Answers each line of the standard input with a line of JSON.

    One that raises is answered with the error, and must not hide the others.

    Args:
      outcome: Computes the answer.
      forget: Drops what is compiled, which stays in memory.
      every: After so many lines.
    """
    faulthandler.enable()
    # Of what JAX traces little is garbage.
    gc.freeze()
    gc.set_threshold(200_000)
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what else is printed is no answer
        for number, line in zip(itertools.count(1), sys.stdin):
            try:
                reply = outcome(line.removesuffix("\n"))
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [x for x in frames if "paged_optax" in x.filename] or frames
                file, at = (
                    own[-1].filename.rpartition("paged_optax/")[2],
                    own[-1].lineno,
                )
                reply = f"{type(error).__name__}: {error} [{file}:{at}]"
            print(json.dumps(reply), file=replies, flush=True)
            if number % every == 0:
                forget()
