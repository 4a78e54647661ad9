"""Leaves of trees: their paths, their types, and their owners."""

import collections
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import ArrayOrShape, KeyPath

#: A parameter or a gradient: an array, or the shape and dtype of one.
Parameter = Array | jax.ShapeDtypeStruct

#: A leaf as it is stored: an array, or its encoded form; or their shapes and dtypes.
StoredOrShape = PyTree[ArrayOrShape]

#: A value of an update's programs: a leaf as it is stored, or a number.
Value = PyTree[ArrayOrShape | ArrayLike]

#: A traced leaf of an extra argument: a new value does not compile again.
Traceable = ArrayLike | jax.ShapeDtypeStruct


def is_traceable(x: object) -> bool:
    """Returns whether a new value of an extra argument means no new compilation."""
    kinds = jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex
    return isinstance(x, kinds) and not isinstance(x, bool)


def as_arrays(tree: PyTree) -> PyTree[Parameter]:
    """Converts Python numbers and NumPy arrays to JAX arrays."""
    is_array = lambda x: isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    return jax.tree.map(lambda x: x if is_array(x) else jnp.asarray(x), tree)


def leaf_paths(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[KeyPath], list[PyTree]]:
    """Returns the paths of the leaves, and the leaves."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [path for path, _ in flat], [leaf for _, leaf in flat]


def parameter_of(
    state_paths: Sequence[KeyPath], parameter_paths: Sequence[KeyPath]
) -> list[int | None]:
    """Returns the parameter of each state leaf, by the end of the leaf's path.

    Optax keeps moments in trees of the parameters' structure. The path of a moment
    therefore ends with the path of its parameter, like every other path in its tree.
    `paged_optax.state.leaves` does the same for a state without its parameters. None: a
    leaf of no parameter.
    """
    indices = {tuple(path): i for i, path in enumerate(parameter_paths)}
    lengths = sorted({len(path) for path in indices}, reverse=True)
    # For each leaf the trees that may have the parameters' structure, outermost first.
    candidates = [
        {
            tuple(path[:start]): indices[end]
            for start in (len(path) - n for n in lengths)
            if start >= 0 and (end := tuple(path[start:])) in indices
        }
        for path in state_paths
    ]
    members = collections.Counter(tree for trees in candidates for tree in trees)
    inner = collections.Counter(
        tuple(path[:n]) for path in state_paths for n in range(len(path) + 1)
    )
    # A step count is no moment, even if a parameter is called `count`: its tree has
    # leaves whose paths end with no parameter's path.
    complete = {tree for tree, count in members.items() if count == inner[tree]}
    return [
        next((item for tree, item in trees.items() if tree in complete), None)
        for trees in candidates
    ]
