"""Pinned host memory of XLA:GPU: the pool's limit, and the bytes it takes.

The pool is a `BFCAllocator` that grows (XLA's `pjrt/gpu/gpu_helpers.cc`). Its regions
double from 2 MiB on, are never merged, and are kept until the process ends. It may
therefore take twice the arrays' bytes; the limit bounds the last region.
"""

import math
import os
from collections.abc import Sequence

#: In whole GiB: XLA multiplies it by 2^30.
POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 1 << 30
_FIRST_REGION = 2 << 20  # bytes
_UNIT = 256  # bytes: all chunks are multiples
_SPLIT = 128 << 20  # a chunk is split if it exceeds the request by so many bytes
# Bounds of the limit over the arrays' bytes. Transfers of arrays that are not pinned
# take memory of the pool too.
_MOST = 1.15
_LEAST = 33 / 32


def pool_limit() -> int:
    """Returns the bytes of pinned memory that XLA:GPU allocates, by default 64 GiB."""
    return int(os.environ.get(POOL_LIMIT, "64")) * _GIB


def pinned_bytes(arrays: Sequence[int], limit: int | None = None) -> int | None:
    """Returns the bytes of the pool, or None if the arrays do not fit the limit.

    `arrays` has the bytes of each array, in the order of allocation. The rules are
    those of XLA's `tsl/framework/bfc_allocator.cc`.
    """
    limit = pool_limit() if limit is None else limit
    free: list[int] = []
    region, taken = _FIRST_REGION, 0
    for size in filter(None, arrays):
        requested = -(-size // _UNIT) * _UNIT
        if not any(chunk >= requested for chunk in free):
            # A new region: the last one doubled until it holds the array, within the
            # limit.
            left = (limit - taken) // _UNIT * _UNIT
            if requested > left:
                return None
            doubled = region
            while doubled < requested:
                doubled *= 2
            free.append(min(doubled, left))
            taken += free[-1]
            # The size of a region that was enlarged for an array is used once more.
            region = 2 * region if doubled == region else doubled
        # The smallest free chunk that fits. Its rest is split off if it is 128 MiB, or
        # as much as the request.
        chunk = min(chunk for chunk in free if chunk >= requested)
        free.remove(chunk)
        rest = chunk - requested
        if rest >= min(requested, _SPLIT):
            free.append(rest)
    return taken


def limit_gigabytes(arrays: Sequence[int]) -> int:
    """Returns a value of `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` for arrays.

    It is 1.15 times the arrays' bytes, rounded down, if the pool then has room for the
    arrays and a 32nd of their bytes; otherwise the smallest value with this room.
    """
    total = sum(arrays) / _GIB
    gigabytes = max(1, math.ceil(_LEAST * total), math.floor(_MOST * total))
    while pinned_bytes(arrays, gigabytes * _GIB) is None:
        gigabytes += 1
    return gigabytes
