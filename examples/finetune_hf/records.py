"""Records of a file: lines of JSON, rows of a table, or a folder of `datasets`."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from .folder import FolderError


def records(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields each record's place, for messages, and the record.

    `.jsonl` and `.json` have lines of objects, or one list of them; `.csv` and
    `.parquet` a table; a folder is one that `datasets` saved. Another file is a text.
    """
    if path.suffix == ".parquet" or path.is_dir():
        yield from _rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read as text: {error}.") from None
    if path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        rows = csv.DictReader(io.StringIO(text), strict=True)
        try:
            yield from ((f"{path}, row {n}", x) for n, x in enumerate(rows, 1))
        except csv.Error as error:
            raise FolderError(f"{path} is no table: {error}.") from None
    elif path.suffix not in (".json", ".jsonl"):
        yield str(path), {"text": text}
    elif text.lstrip().startswith("["):
        objects = parsed(str(path), text)
        yield from ((f"{path}, object {n}", x) for n, x in enumerate(objects, 1))
    else:
        for n, line in enumerate(text.split("\n"), 1):  # strings may have other ends
            if line.strip():
                yield f"{path}, line {n}", parsed(f"{path}, line {n}", line)


def parsed(where: str, text: str) -> Any:
    """Reads JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise FolderError(f"{where} is no JSON: {error}.") from None


def _rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Reads a table through `datasets`, which fills absent fields with None."""
    try:
        import datasets
    except ImportError:
        raise FolderError(
            f"{path} is read by the datasets library: pip install datasets, or give a"
            " .jsonl or .csv file."
        ) from None
    name = str(path)
    how = {"data_files": name, "split": "train", "streaming": True}
    try:
        table = datasets.load_from_disk(name) if path.is_dir() else None
        table = datasets.load_dataset("parquet", **how) if table is None else table
        if isinstance(table, dict):
            raise FolderError(
                f"{path} has the splits {', '.join(table)}: give one's folder, such as"
                f" {path / next(iter(table))}."
            )
        yield from ((f"{path}, row {n}", _present(x)) for n, x in enumerate(table, 1))
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, FolderError):
            raise
        raise FolderError(f"{path} cannot be read: {error}") from None


def _present(x: Any) -> Any:
    """Leaves fields out that a row does not have."""
    if isinstance(x, dict):
        return {name: _present(y) for name, y in x.items() if y is not None}
    return [*map(_present, x)] if isinstance(x, list) else x
