"""The rate of the link, by `paged_optax.cli.machine`, as rows of a benchmark."""

from typing import Any

from paged_optax.cli.machine import measure

SECTION = "link"


def rows(size: int, repeats: int) -> list[dict[str, Any]]:
    """Gigabytes a second of each program, or why there are none.

    Args:
      size: Bytes of one buffer; whole pages of 16 MiB.
      repeats: Transfers timed, after one that is not.
    """
    return [_row(rate, size, repeats) for rate in measure(size, repeats)]


def _row(rate: Any, size: int, repeats: int) -> dict[str, Any]:
    row = {"section": SECTION, "name": rate.name}
    if rate.reason:
        return row | {"reason": rate.reason}
    found = rate.gigabytes_per_second
    return row | {
        "gigabytes_per_second": rate.median,
        "gigabytes_per_second_range": [min(found), max(found)],
        "directions": rate.directions,
        "buffer_bytes": size,
        "page_bytes": rate.page_bytes,
        "repeats": repeats,
    }
