"""The folder of an unfinished run: checkpoints, losses, and the run's arguments."""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orbax.checkpoint as ocp

from .folder import Folder, FolderError, make_folder
from .text import Row

PyTree = Any
#: Arguments that may differ when a run continues: the others decide its numbers.
FREE = ("resume", "save_every", "stop_after", "way", "device_memory", "output")
FREE += ("log_every", "report_to", "eval_text", "merge", "base_name")
#: Paths that may differ if their content is the same.
HASHED = {
    "text": "what is read of --text or --eval-text, or the tokenizer, has changed",
    "checkpoint": "the weights or the configuration of --checkpoint have changed",
}


@dataclasses.dataclass
class Store:
    """An unfinished run's folder, and the arguments that decide the run's numbers."""

    path: pathlib.Path
    decides: dict[str, str]
    lock: int | None = None

    @classmethod
    def of(
        cls, args: argparse.Namespace, folder: Folder, rows: Sequence[Row]
    ) -> "Store":
        """Compares a run with the one in its folder, if it resumes that."""
        path = working(args.output)
        decides = {n: str(x) for n, x in vars(args).items() if n not in FREE}
        tokens = (x.tobytes() for row in rows for x in row.values())
        decides["text"] = hashlib.sha256(b"".join(tokens)).hexdigest()
        decides["checkpoint"] = folder.fingerprint()
        known = path / "run.json"
        if args.resume:
            if not known.exists():
                raise FolderError(f"{path} has no run to continue: leave --resume.")
            before = json.loads(known.read_text())
            for name, value in decides.items():
                if (was := before.get(name, value)) != value:
                    option = f"--{name.replace('_', '-')}"
                    how = f"{option} was {was} as the run began, and is {value}"
                    how = HASHED.get(name, how)
                    raise FolderError(f"{how}: give the same, or another --output.")
        elif known.exists():
            raise FolderError(f"{path} has an unfinished run: --resume or remove it.")
        return cls(path, decides)

    @functools.cached_property
    def manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        return ocp.CheckpointManager(self.path / "steps", options=options)

    def take(self, *, anew: bool) -> None:
        """Locks the folder until `close`, and empties it if `anew`."""
        make_folder(self.path)
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            self.lock = None
            raise FolderError(f"another command is at work in {self.path}.") from None
        for file in self.path.iterdir() if anew else ():
            shutil.rmtree(file) if file.is_dir() else file.unlink()

    def close(self) -> None:
        """Unlocks the folder, or removes it if nothing began."""
        if self.lock is not None:
            if not (self.path / "run.json").exists():
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)

    def begin(self) -> None:
        partial = self.path / "run.json.writing"
        partial.write_text(json.dumps(self.decides, indent=2))
        partial.rename(self.path / "run.json")

    def save(self, number: int, carry: Sequence[PyTree]) -> None:
        try:
            with _quiet():
                self.manager.save(number, args=ocp.args.StandardSave(list(carry)))
                self.manager.wait_until_finished()
        except (OSError, ValueError) as error:  # of a full disk orbax raises the second
            for partial in (self.path / "steps").glob("*tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
            first = str(error).strip().splitlines()[0][:200]
            raise FolderError(
                f"step {number} could not be saved: {first}. Make space in {self.path},"
                " and give --resume."
            ) from None

    def restore(self, target: Sequence[PyTree]) -> list[PyTree]:
        """Reads the last checkpoint to where a tree of shapes places it."""
        return self.manager.restore(None, args=ocp.args.StandardRestore(list(target)))

    @contextlib.contextmanager
    def losses(self, start: int) -> Iterator[Callable[..., None]]:
        """Yields a function that appends to the losses of the first `start` steps."""
        path = self.path / "losses.csv"
        lines = path.read_text().splitlines()[: start + 1] if start else []
        path.write_text("\n".join([*(lines or ["step,loss,held out"]), ""]))
        with path.open("a", buffering=1) as file:
            yield lambda *values: print(*values, sep=",", file=file)


def working(output: pathlib.Path) -> pathlib.Path:
    return output.with_name(f"{output.name}.run").absolute()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disables tracebacks of a failing write in a thread, for good if it fails."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    sys.unraisablehook = hook
