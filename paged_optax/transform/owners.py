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
    # For each leaf the trees that may be of parameters, the outermost first.
    found = [
        {
            tuple(path[:start]): position[end]
            for start in (len(path) - n for n in lengths)
            if start >= 0 and (end := tuple(path[start:])) in position
        }
        for path in state_paths
    ]
    members = collections.Counter(tree for trees in found for tree in trees)
    inside = collections.Counter(
        tuple(path[:n]) for path in state_paths for n in range(len(path) + 1)
    )
    # A step count is no moment, even of a parameter that is called `count`: its tree
    # holds leaves that end with no parameter's path.
    whole = {tree for tree, count in members.items() if count == inside[tree]}
    return [
        next((each for tree, each in trees.items() if tree in whole), None)
        for trees in found
    ]
