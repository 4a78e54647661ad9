"""Numbers of bytes, as people write and read them."""

import re

import jax

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_bytes(name: str, size: object) -> int:
    """Reads a number of bytes.

    Args:
      name: The argument's name, for messages.
      size: A number of bytes, or a string such as `"16MiB"`.

    Returns:
      The number of bytes.

    Raises:
      ValueError: If the size is negative or cannot be read.

    Example:
      >>> parse_bytes("page_size", "16MiB")
      16777216
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = match and _UNITS.get(match[2] or "B")
        if match is None or unit is None:
            raise ValueError(
                f"{name}={size!r} is not a size: write bytes as an int, or a number"
                f" with one of {', '.join(_UNITS)}, such as '16MiB'."
            )
        if (found := float(match[1]) * unit) >= 2**63:
            raise ValueError(f"{name}={size!r} is more than 2^63 bytes.")
        return int(found)
    if isinstance(size, bool) or not isinstance(size, int):
        way_out = ""
        if isinstance(size, jax.Array):
            way_out = (
                " optax.inject_hyperparams makes an array of every number: there, pass"
                f" the string, or static_args={name!r}."
            )
        raise ValueError(
            f"{name}={size!r} is not a size: pass an int of bytes, or a string such as"
            f" '16MiB'.{way_out}"
        )
    if size < 0:
        raise ValueError(f"{name}={size} is negative: pass bytes, such as '16MiB'.")
    return size


def readable_bytes(size: int | float) -> str:
    """A number of bytes for people.

    Example:
      >>> readable_bytes(33 * 2**20)
      '33.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
