"""Finds the parameter that a leaf of a state belongs to."""

import collections
from collections.abc import Sequence

from paged_optax.backend.types import KeyPath


def parameter_of(
    state_paths: Sequence[KeyPath],
    parameter_paths: Sequence[KeyPath],
) -> list[int | None]:
    """Finds the parameter of each state leaf, by the end of the leaf's path.

    Optax keeps moments in trees of the parameters' structure. The path of a moment thus
    ends with the path of its parameter, and so does every other path in its tree. For a
    state without its parameters `paged_optax.state.leaves` answers the same question.

    Args:
      state_paths: The paths of the state's leaves.
      parameter_paths: The paths of the parameters.

    Returns:
      For each state leaf the position of its parameter; None if it has none.
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
    # A step count is no moment, even of a parameter that is called `count`: its tree
    # holds leaves that end with no parameter's path.
    return [
        each and (each[1] if members[each[0]] == inside[each[0]] else None)
        for each in found
    ]
