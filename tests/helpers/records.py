"""Runs that are too long for each day, on record."""

import json
import pathlib


def record(path: pathlib.Path, entry: dict[str, object]) -> None:
    """Adds what a run came to, a line a run."""
    runs = json.loads(path.read_text()) if path.exists() else []
    lines = ",\n".join(map(json.dumps, [*runs, entry]))
    path.write_text(f"[\n{lines}\n]\n")
