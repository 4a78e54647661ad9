"""Cases that need other XLA flags, in a process of their own: XLA reads them once.

A test asks for one case at a time, so that test workers share the work.
"""

import collections
import faulthandler
import gc
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
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
    caught: type[Exception] | tuple[()] = Exception,
) -> None:
    """Answers each line of the standard input with a line of JSON.

    Args:
      outcome: Computes the answer.
      forget: Drops what is compiled, which stays in memory.
      every: After so many lines.
      caught: Errors to answer with, so that one case does not hide the others.
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
            except caught as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [x for x in frames if "paged_optax" in x.filename] or frames
                file = own[-1].filename.rpartition("paged_optax/")[2]
                reply = f"{type(error).__name__}: {error} [{file}:{own[-1].lineno}]"
            print(json.dumps(reply), file=replies, flush=True)
            if number % every == 0:
                forget()


def outcomes(
    groups: Iterable[list[str]], workers: int, minutes: float, script: str, flags: str
) -> Iterator[tuple[str, Any]]:
    """What each case comes to, in processes of their own, as the minutes allow.

    The cases of a group follow one another in one process. That a process ended is what
    its case came to; the next case gets another one.
    """
    end = time.monotonic() + 60 * minutes
    waiting, done = collections.deque(groups), queue.SimpleQueue[Any]()

    def work() -> None:
        left: list[str] = []
        while left or (waiting and time.monotonic() < end):
            try:
                with process(script, flags) as ask:
                    while left or time.monotonic() < end:
                        left = left or waiting.popleft()
                        done.put((left[0], ask(left[0])))
                        left = left[1:]
            except IndexError:
                break  # another worker took the last group
            except RuntimeError as error:
                done.put((left[0], f"the process ended: {error}"))
                left = left[1:]
        done.put(None)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(workers):
        while (one := done.get()) is not None:
            yield one
