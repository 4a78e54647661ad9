"""JSON that strangers wrote: bounded, checked field by field, never run."""

import collections
import json
import math
import pathlib
from typing import BinaryIO

#: Bytes of one JSON text. The index of 100,000 tensors has two thirds of it. A text of
#: other letters than ASCII may have a quarter: Python keeps four bytes of each.
MOST_BYTES = 16 << 20
#: Tensors of one model.
MOST_TENSORS = 100_000
#: Values of one tensor: no machine holds as many.
_MOST_VALUES = 1 << 50
# Python takes up to 72 bytes for what each of these signs begins: 40 MB in all.
_BEGINNINGS = b",", b"[", b"{"
_MOST_ITEMS = 1 << 19


def opened(path: pathlib.Path) -> BinaryIO:
    """Opens a file to read; a device or a pipe might have no end.

    Raises:
      ValueError: If it is no file, or cannot be opened.
    """
    try:
        if path.is_file():
            return path.open("rb")
        why = "it is no file"
    except OSError as error:
        why = error.strerror
    raise ValueError(f"{str(path)!r} cannot be read: {why}.")


class Fields:
    """The fields of a JSON object in a file.

    Every error names the file and the field.

    Args:
      path: The file.
      text: Its JSON, or the part of it that is JSON.

    Raises:
      ValueError: If it is no JSON object.
    """

    def __init__(self, path: pathlib.Path, text: bytes) -> None:
        self.path = path
        wide = not text.isascii() or b"\\u" in text
        if len(text) * (4 if wide else 1) > MOST_BYTES:
            raise self._too_large(f"{MOST_BYTES // (4 if wide else 1)} bytes")
        if sum(map(text.count, _BEGINNINGS)) > _MOST_ITEMS:
            raise self._too_large(f"{_MOST_ITEMS} items")
        try:
            entries = json.loads(text, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no JSON: {error}.") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{str(path)!r} holds JSON that is no object with fields.")
        self.entries: dict[str, object] = entries

    @classmethod
    def of_file(cls, path: pathlib.Path) -> "Fields":
        """Reads a whole file, if it is not too large."""
        with opened(path) as file:
            return cls(path, file.read(MOST_BYTES + 1))

    def _too_large(self, bound: str) -> ValueError:
        return ValueError(
            f"{str(self.path)!r} holds JSON of more than {bound}, which no model has."
        )

    def wrong(self, field: str, value: object, wanted: str) -> ValueError:
        """The error of a field that is not as it must be."""
        return ValueError(f"{self.shown(field, value)}, not {wanted}.")

    def shown(self, field: str, value: object) -> str:
        """A field and its value as a message names them."""
        name, value = _short(field, 200), _short(value, 60)
        return f"{str(self.path)!r}: field {name} is {value}"

    def mapping(self, field: str, value: object) -> dict[str, object]:
        """A field that is an object itself."""
        if not isinstance(value, dict):
            raise self.wrong(field, value, "an object")
        return value

    def number(self, field: str, otherwise: int | None = None) -> int:
        """A field that is a size: from 1 to 2^31."""
        value = self.entries.get(field)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or not 0 < value <= 1 << 31:
            raise self.wrong(field, value, "a whole number from 1 to 2147483648")
        return value

    def shape(self, field: str, value: object) -> tuple[int, ...]:
        """A field that is the shape of a tensor."""
        sizes = value if isinstance(value, list) and len(value) <= 32 else [-1]
        whole = all(type(size) is int and size >= 0 for size in sizes)
        if not whole or math.prod(sizes) > _MOST_VALUES:
            raise self.wrong(field, value, "the shape of a tensor")
        return tuple(sizes)

    def ends(self, field: str, value: object) -> tuple[int, int]:
        """A field that is where something begins in a file, and where it ends."""
        ends = value if isinstance(value, list) and len(value) == 2 else [0, -1]
        first, last = (x if type(x) is int else -1 for x in ends)
        if not 0 <= first <= last:
            raise self.wrong(field, value, "where it begins and where it ends")
        return first, last


def _short(value: object, most: int) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        ((twice, _),) = counts.most_common(1)
        raise ValueError(f"field {twice!r} is there twice")
    return fields
