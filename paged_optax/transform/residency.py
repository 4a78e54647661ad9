"""Which moments stay on the device."""

from collections.abc import Sequence


def resident(
    sizes: Sequence[int | None],
    owners: Sequence[int | None],
    budget: int | None,
    min_paged_size: int,
) -> list[bool]:
    """Chooses the state leaves that stay on the device.

    A full sweep touches every page once a step, in one order, so the best choice
    (Belady's) is a fixed set: small leaves, step counts and keys always, then the
    moments of one parameter after the other until the budget is spent.

    Args:
      sizes: For each leaf of the state its bytes; None if it is never paged.
      owners: For each leaf the parameter that it belongs to, or None.
      budget: Bytes of moments that may stay; None: all.
      min_paged_size: Moments of fewer bytes stay, and cost no budget.

    Returns:
      For each state leaf whether it stays.
    """
    if budget is None:
        return [True] * len(sizes)
    stays = [size is None or size < min_paged_size for size in sizes]
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
