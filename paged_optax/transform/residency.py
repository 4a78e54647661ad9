"""Which moments stay on the device."""

import collections
from collections.abc import Hashable, Sequence

import jax
from jaxtyping import PyTree

from paged_optax.backend.types import ArrayOrShape

# A moment of less than this part of `min_paged_size` counts alone. Its transfer costs
# its latency, and remains a transfer of its own beside those of others.
_LEAST_PART = 8


def small(
    sizes: Sequence[int | None],
    stored: Sequence[PyTree[ArrayOrShape]],
    owners: Sequence[Hashable],
    min_paged_size: int,
) -> list[bool]:
    """Which leaves of a state are not worth their transfers.

    Like moments of several parameters travel together, and count together: 64 adapters
    of 64 KiB each are 4 MiB. A moment of less than an eighth of `min_paged_size` counts
    alone.

    Args:
      sizes: The bytes of each leaf; None if it is never paged.
      stored: The arrays that hold it. Like moments have arrays of one shape and dtype.
      owners: The parameter that it belongs to, or None.
      min_paged_size: The least bytes that are worth it.

    Example:
      >>> import numpy as np
      >>> def found(*shapes):
      ...     stored = [np.zeros(shape, np.float32) for shape in shapes]
      ...     return small([x.nbytes for x in stored], stored, range(len(stored)), 256)
      >>> found((8, 4), (8, 4)), found((8, 4), (4, 8)), found((4,), (4,))
      ([False, False], [True, True], [True, True])
    """
    kinds: list[Hashable] = []
    before = collections.Counter[Hashable]()
    for arrays, owner in zip(stored, owners, strict=True):
        like = *((x.shape, x.dtype) for x in jax.tree.leaves(arrays)), before[owner]
        before[owner] += 1
        kinds.append(like)
    total = collections.Counter[Hashable]()
    for size, kind in zip(sizes, kinds, strict=True):
        total[kind] += size or 0
    return [
        size is None
        or (size if size * _LEAST_PART < min_paged_size else total[kind])
        < min_paged_size
        for size, kind in zip(sizes, kinds, strict=True)
    ]


def resident(
    sizes: Sequence[int | None],
    owners: Sequence[int | None],
    budget: int | None,
    stays: Sequence[bool],
) -> list[bool]:
    """Chooses the state leaves that stay on the device.

    A full sweep touches every page once a step, in one order, so the best choice
    (Belady's) is a fixed set: small leaves, step counts and keys always, then the
    moments of one parameter after the other until the budget is spent.

    Args:
      sizes: For each leaf of the state its bytes; None if it is never paged.
      owners: For each leaf the parameter that it belongs to, or None.
      budget: Bytes of moments that may stay; None: all.
      stays: For each leaf whether it stays in any case, and costs no budget.

    Returns:
      For each state leaf whether it stays.
    """
    if budget is None:
        return [True] * len(sizes)
    stays = list(stays)
    together: dict[int | tuple[str, int], list[int]] = {}
    for leaf, owner in enumerate(owners):
        if not stays[leaf]:
            key = ("leaf", leaf) if owner is None else owner
            together.setdefault(key, []).append(leaf)
    for group in together.values():
        size = sum(sizes[leaf] or 0 for leaf in group)
        if size <= budget:
            budget -= size
            for leaf in group:
                stays[leaf] = True
    return stays
