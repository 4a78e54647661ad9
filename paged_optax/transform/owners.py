"""Which parameter a leaf of a state belongs to."""

import collections
from collections.abc import Sequence

import jax


def parameter_of(
    state_paths: Sequence[jax.tree_util.KeyPath],
    parameter_paths: Sequence[jax.tree_util.KeyPath],
) -> list[int | None]:
    """Which parameter each state leaf belongs to, by the end of its path.

    Optax keeps moments in trees of the parameters' structure, so that the path of a
    moment ends with the path of its parameter, as do those of all others of its tree.

    Returns:
      For each state leaf the parameter's position, or None.
    """
    position = {tuple(path): i for i, path in enumerate(parameter_paths)}
    lengths = sorted({len(path) for path in position}, reverse=True)
    split = lambda path, n: (tuple(path[: len(path) - n]), tuple(path[len(path) - n :]))
    found = [
        next(
            (
                (tree, position[end])
                for tree, end in (split(path, n) for n in lengths if n <= len(path))
                if end in position
            ),
            None,
        )
        for path in state_paths
    ]
    members = collections.Counter(tree for tree, _ in filter(None, found))
    inside = collections.Counter(
        tuple(path[:n]) for path in state_paths for n in range(len(path) + 1)
    )
    # A step count is no moment of a parameter that is called `count`: beside it, in
    # what would be their tree, are others.
    return [
        each and (each[1] if members[each[0]] == inside[each[0]] else None)
        for each in found
    ]
