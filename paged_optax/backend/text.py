"""Key paths, byte counts and tables as text."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.core import ShapedArray

from paged_optax.backend.types import ArrayOrShape, KeyPath, Path

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

#: Returns a key path in Python syntax: `['block'][0]`.
keystr = jax.tree_util.keystr


def path_name(path: Path) -> str:
    """Returns the keys of a path, joined: `block/0`."""
    if isinstance(path, str):
        return path
    return jax.tree_util.keystr(path, simple=True, separator="/")


def key_names(path: KeyPath) -> tuple[str, ...]:
    """Returns the names of a path's keys, whatever the containers.

    Joined to a string they are ambiguous: `{"a/b": ..., "a": {"b": ...}}` has `"a/b"`
    twice.
    """
    return tuple(path_name((key,)) for key in path)


def dtype_and_shape(x: ArrayOrShape | ShapedArray) -> str:
    """Returns the dtype and shape for messages: `float32[2, 3]`."""
    return f"{x.dtype}{list(x.shape)}"


def matching_names(pattern: str, names: Iterable[str]) -> set[str]:
    """Returns the names that a pattern matches.

    A name matches itself only: with `w0` and `w[0]`, the pattern `w[0]` selects the
    latter.
    """
    names = set(names)
    if pattern in names:
        return {pattern}
    return {name for name in names if fnmatch.fnmatchcase(name, pattern)}


def parse_bytes(name: str, size: object, minimum: int = 0, extra: str = "") -> int:
    """Returns a number of bytes from an int or a string such as `"16MiB"`.

    `extra` has other values of the argument, for messages.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match and _UNITS.get(match[2] or "B")
        if match is None or unit is None:
            raise ValueError(
                f"{name}={size!r} is not a size: write {extra}bytes as an int, or a"
                f" number with one of {', '.join(_UNITS)}, such as '16MiB'."
            )
        size = float(match[1]) * unit
    elif isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        hint = ""
        if isinstance(size, jax.Array):
            hint = (
                " optax.inject_hyperparams makes an array of every number: there, pass"
                f" the string, or static_args={name!r}."
            )
        raise ValueError(
            f"{name}={size!r} is not a size: pass an int of bytes, or a string such as"
            f" '16MiB'.{hint}"
        )
    if size < minimum:
        fault = "negative" if size < 0 else f"less than {minimum}"
        raise ValueError(f"{name}={size} is {fault}: pass bytes, such as '16MiB'.")
    if size >= 2**63:
        raise ValueError(f"{name} is more than 2^63 bytes.")
    return int(size)


def readable_bytes(size: int | float) -> str:
    """Returns a number of bytes as text: `33.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(labels: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns aligned columns under a ruled heading; the last is right-aligned."""
    cells = [[*map(str, row)] for row in (labels, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join((*map(str.ljust, row[:-1], widths), row[-1].rjust(widths[-1])))
        for row in cells
    )
