"""A layer's leaves in groups, of which one travels while the one before is computed."""

from collections.abc import Sequence
from typing import NamedTuple

# A transfer is hidden by what is computed beside it. Of more groups fewer bytes wait
# on the device; of four, each is about one large matrix of a transformer.
_GROUPS = 4


class Group(NamedTuple):
    """Some leaves of a layer, which are updated together.

    Attributes:
      leaves: Their positions among the layer's leaves.
      slots: The positions of their moments among the state's stacks.
    """

    leaves: tuple[int, ...]
    slots: tuple[int, ...]


def grouped(
    leaves: Sequence[int],
    owners: Sequence[int],
    travel: Sequence[int],
    most: int | None = None,
) -> list[Group]:
    """Divides a layer's leaves into groups of about equal travel.

    Args:
      leaves: The positions of those that are updated layer by layer.
      owners: For each of the state's stacks the position of its leaf.
      travel: For each of `leaves` the bytes that travel.
      most: How many groups at most; None: as many as are worth it.

    Returns:
      The groups.
    """
    count = min(most or _GROUPS, sum(map(bool, travel)))
    groups: list[list[int]] = [[] for _ in range(max(1, count))]
    sizes = [0] * len(groups)
    for size, leaf in sorted(zip(travel, leaves, strict=True), reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(leaf)
        sizes[least] += size
    # The smallest first: it is fetched beside the last segment, where XLA:GPU begins to
    # fetch late (jax 0.12.0.1).
    return [
        Group(
            tuple(sorted(group)),
            tuple(n for n, owner in enumerate(owners) if owner in group),
        )
        for _, group in sorted(zip(sizes, groups, strict=True))
    ]
