"""Pinned host memory of a GPU: what XLA's pool takes of the machine, and its limit.

The pool is a `BFCAllocator` that grows (XLA's `pjrt/gpu/gpu_helpers.cc`). Its regions
double from 2 MiB on, are never merged, and are kept until the process ends. So the pool
may take twice what is needed, and the limit decides how much the last region has.
"""

import math
import os
from collections.abc import Iterable, Sequence

#: An integer, of GiB: XLA multiplies it by 2^30.
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 1 << 30
_FIRST = 2 << 20  # bytes of the first region
_UNIT = 256  # bytes: all chunks are multiples
_SPLIT = 128 << 20  # a chunk that exceeds what is asked by so much is split
# Arrays of a number of bytes of which nothing else is known.
_PIECE = 64 << 20
# The most that the pool should take over what is needed.
_MOST = 1.15
# What it should hand out at least, over that: transfers of arrays that are not pinned
# go through the pool too.
_LEAST = 33 / 32

Arrays = int | Sequence[int]


def pool_limit() -> int:
    """Bytes of pinned host memory that XLA:GPU will hand out: 64 GiB unless told."""
    return int(os.environ.get(LIMIT, "64")) * _GIB


def pinned_bytes(needed: Arrays, limit: int | None = None) -> int | None:
    """The bytes that the pool takes of the machine.

    It is simulated by the rules of XLA's `tsl/framework/bfc_allocator.cc`. The smallest
    free chunk that is large enough is taken. What it has more is split off if that is
    128 MiB, or as much as was asked. If no chunk is large enough, a region is added:
    as large as the last one doubled, or doubled until it holds the array, and never
    beyond the limit.

    Args:
      needed: Bytes of each array in host memory, in the order in which they are made;
        or of all of them, which then are many small ones.
      limit: Bytes that the pool may take at most; None: as `pool_limit` has it.

    Returns:
      The bytes of all regions, or None if there is no room for an array.

    Example:
      >>> pinned_bytes(4711 << 20, limit=64 << 30) >> 30
      8
      >>> pinned_bytes(4711 << 20, limit=5 << 30) >> 30
      5
    """
    limit = pool_limit() if limit is None else limit
    free: list[int] = []
    region, taken = _FIRST, 0
    for size in _arrays(needed):
        asked = -(-size // _UNIT) * _UNIT
        if not any(chunk >= asked for chunk in free):
            left = (limit - taken) // _UNIT * _UNIT
            if asked > left:
                return None
            doubled = _doubled(region, asked)
            free.append(min(doubled, left))
            taken += free[-1]
            # A region that was made larger for an array comes once more.
            region = 2 * region if doubled == region else doubled
        chunk = min(chunk for chunk in free if chunk >= asked)
        free.remove(chunk)
        more = chunk - asked
        if more >= min(asked, _SPLIT):
            free.append(more)
    return taken


def limit_gigabytes(needed: Arrays) -> int:
    """The `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` to set for arrays in host memory.

    Args:
      needed: As in `pinned_bytes`.

    Returns:
      The most that is at most 1.15 of what is needed, if the pool then has room for all
      arrays and for a 32nd of their bytes; otherwise the least that has.

    Example:
      >>> limit_gigabytes(4711 << 20), limit_gigabytes(43 << 30)
      (5, 49)
    """
    total = sum(_arrays(needed)) / _GIB
    gigabytes = max(1, math.ceil(_LEAST * total), math.floor(_MOST * total))
    while pinned_bytes(needed, gigabytes * _GIB) is None:
        gigabytes += 1
    return gigabytes


def _doubled(region: int, asked: int) -> int:
    """The bytes of a region, doubled until they are enough."""
    while region < asked:
        region *= 2
    return region


def _arrays(needed: Arrays) -> Iterable[int]:
    """The bytes of each array; arrays of no bytes take nothing."""
    if not isinstance(needed, int):
        return filter(None, needed)
    pieces, rest = divmod(needed, _PIECE)
    return filter(None, (*[_PIECE] * pieces, rest))
