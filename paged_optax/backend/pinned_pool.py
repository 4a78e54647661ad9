"""XLA:GPU's pool of pinned host memory: its limit, and what it takes of the machine.

It is a `BFCAllocator` that grows (XLA's `pjrt/gpu/gpu_helpers.cc`). Its regions double
from 2 MiB on, are never merged, and are kept until the process ends. So it may take
twice what is needed, and the limit decides how much the last region has.
"""

import math
import os
from collections.abc import Iterable, Sequence

#: An integer, of GiB: XLA multiplies it by 2^30.
POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 1 << 30
_FIRST_REGION = 2 << 20  # bytes
_UNIT = 256  # bytes: all chunks are multiples
_SPLIT = 128 << 20  # a chunk that exceeds what is asked by so much is split
# Arrays of a number of bytes of which nothing else is known.
_PIECE = 64 << 20
# The most that the pool should take over what is needed.
_MOST = 1.15
# What it should hand out at least, over that: transfers of arrays that are not pinned
# go through the pool too.
_LEAST = 33 / 32

ArrayBytes = int | Sequence[int]


def pool_limit() -> int:
    """Bytes of pinned host memory that XLA:GPU will hand out: 64 GiB unless told."""
    return int(os.environ.get(POOL_LIMIT, "64")) * _GIB


def pinned_bytes(needed: ArrayBytes, limit: int | None = None) -> int | None:
    """The bytes that the pool takes of the machine; None if it has too little room.

    It is simulated by the rules of XLA's `tsl/framework/bfc_allocator.cc`.

    Args:
      needed: Bytes of each array in host memory, in the order in which they are made;
        or of all of them, which then are many small ones.
      limit: Bytes that the pool may take at most; None: as `pool_limit` has it.
    """
    limit = pool_limit() if limit is None else limit
    free: list[int] = []
    region, taken = _FIRST_REGION, 0
    for size in _arrays(needed):
        asked = -(-size // _UNIT) * _UNIT
        if not any(chunk >= asked for chunk in free):
            # A region is added: as large as the last one doubled, or doubled until it
            # holds the array, and never beyond the limit.
            left = (limit - taken) // _UNIT * _UNIT
            if asked > left:
                return None
            doubled = region
            while doubled < asked:
                doubled *= 2
            free.append(min(doubled, left))
            taken += free[-1]
            # A region that was made larger for an array comes once more.
            region = 2 * region if doubled == region else doubled
        # The smallest free chunk that is large enough is taken. What it has more is
        # split off if that is 128 MiB, or as much as was asked.
        chunk = min(chunk for chunk in free if chunk >= asked)
        free.remove(chunk)
        more = chunk - asked
        if more >= min(asked, _SPLIT):
            free.append(more)
    return taken


def limit_gigabytes(needed: ArrayBytes) -> int:
    """The `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` to set for arrays in host memory.

    It is the most that is at most 1.15 of what is needed, if the pool then has room for
    all arrays and for a 32nd of their bytes; otherwise the least that has.
    """
    total = sum(_arrays(needed)) / _GIB
    gigabytes = max(1, math.ceil(_LEAST * total), math.floor(_MOST * total))
    while pinned_bytes(needed, gigabytes * _GIB) is None:
        gigabytes += 1
    return gigabytes


def _arrays(needed: ArrayBytes) -> Iterable[int]:
    """The bytes of each array; arrays of no bytes take nothing."""
    if not isinstance(needed, int):
        return filter(None, needed)
    pieces, rest = divmod(needed, _PIECE)
    return filter(None, (*[_PIECE] * pieces, rest))
