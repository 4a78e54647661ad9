"""Records of a file: lines of JSON, rows of a table, or a folder of `datasets`."""

import csv
import io
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .folder import FolderError


def records(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields each record and its place, for messages."""
    try:
        yield from _records(path)
    except FolderError:
        raise
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        why = f"{path}, line {line} is no UTF-8 ({error.reason})"
        raise FolderError(f"{why}: convert the file to it.") from None
    except (csv.Error, OSError, ValueError, RuntimeError) as error:
        raise FolderError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None


def _records(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    places = lambda kind: (f"{path}, {kind} {n}" for n in itertools.count(1))
    numbered = lambda kind, found: zip(places(kind), found, strict=False)
    if not path.exists():
        raise FolderError(f"{path} does not exist: give a file, or a folder of rows.")
    if path.suffix == ".parquet" or path.is_dir():
        yield from numbered("row", map(_present, _table(path)))
        return
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(sys.maxsize)
        how = {"delimiter": "\t" if path.suffix == ".tsv" else ",", "strict": True}
        yield from numbered("row", csv.DictReader(io.StringIO(text), **how))
    elif path.suffix not in (".json", ".jsonl"):
        yield str(path), {"text": text}
    elif text.lstrip().startswith("["):
        yield from numbered("object", parsed(str(path), text))
    else:
        for where, line in numbered("line", text.split("\n")):
            if line.strip():  # strings may have other line ends
                yield where, parsed(where, line)


def parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FolderError(f"{where} is no JSON: {error}.") from None


def _table(path: pathlib.Path) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise FolderError(f"{path}: pip install datasets, or give .jsonl.") from None
    name = str(path)
    if not path.is_dir():
        how = {"split": "train", "streaming": True}
        return datasets.load_dataset("parquet", data_files=name, **how)
    try:
        table = datasets.load_from_disk(name)
    except FileNotFoundError:
        why = f"{path} is no folder that datasets saved"
        raise FolderError(f"{why}: give one, or a .parquet file.") from None
    if isinstance(table, dict):
        raise FolderError(
            f"{path} has the splits {', '.join(table)}: give one's folder, such as"
            f" {path / next(iter(table))}."
        )
    return table


def _present(x: Any) -> Any:
    """Removes fields that are None, as `datasets` fills absent ones."""
    if isinstance(x, dict):
        return {name: _present(y) for name, y in x.items() if y is not None}
    return [*map(_present, x)] if isinstance(x, list) else x
