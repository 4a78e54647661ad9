"""Python that spoils the process it runs in, in one of its own."""

import os
import subprocess
import sys
from pathlib import Path


def alone(code: str) -> str:
    """Runs code, with warnings as errors, in which these helpers can be imported.

    Returns:
      What it printed.
    """
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout
