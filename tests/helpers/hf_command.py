"""`examples/finetune_hf` as a process, or within this one."""

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

from helpers.hf_folders import TEXT, Made

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "finetune_hf"
COMMAND = ["--length", "64", "--batch", "2", "--min-size", "1KiB"]
COMMAND += ["--learning-rate", "1e-3", "--steps", "8", "--held-out", "0.1"]


def command(
    folder: pathlib.Path, text: pathlib.Path, output: pathlib.Path, *more: str
) -> list[str]:
    """The command line, of small sizes."""
    paths = ["--checkpoint", folder, "--text", text, "--output", output]
    return [sys.executable, str(PROGRAM), *COMMAND, *map(str, paths), *more]


def run(*given: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        command(*given), env=env, capture_output=True, text=True, timeout=500, **how
    )


def main(
    example: Any,
    folder: pathlib.Path,
    text: pathlib.Path | None,
    output: pathlib.Path,
    *more: str,
) -> None:
    """Runs it in this process, which answers signals again afterwards."""
    given = command(folder, text or output, output, *more)[2:]
    if text is None:
        at = given.index("--text")
        given = given[:at] + given[at + 2 :]
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert example.command.main(given) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def trained(
    folders: Made, path: pathlib.Path
) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """A folder, a text, and the folder that the command makes of them in one go."""
    folder, text = folders("qwen3", dtype="bfloat16"), path / "text.txt"
    text.write_text(TEXT)
    done = run(folder, text, path / "tuned")
    assert not done.returncode, done.stderr
    return folder, text, path / "tuned"


def weights_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of weights."""
    return {x.name: x.read_bytes() for x in sorted(folder.glob("*.safetensors"))}
