"""Trees taken apart: into paths and leaves, into arrays and the rest."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_optax.analysis.program import Analysis
from paged_optax.backend.key_paths import keystr
from paged_optax.transform.context import Gate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gates:
    """The gates of all gradients, each once.

    Passed one for each gradient, one tracer for all of them would become as many that
    are not known to be equal.

    Attributes:
      distinct: The gates.
      number: For each gradient the number of its gate.
    """

    distinct: list[Gate]
    number: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, gates: Sequence[Gate]) -> "Gates":
        """Takes the gates of all gradients."""
        distinct = {id(gate): gate for gate in gates}
        positions = list(distinct)
        numbers = tuple(positions.index(id(gate)) for gate in gates)
        return cls(list(distinct.values()), numbers)

    def each(self) -> list[Gate]:
        """The gate of each gradient."""
        return [self.distinct[i] for i in self.number]


@dataclasses.dataclass(frozen=True)
class Static:
    """What of a tree is no array, and where the arrays among it go."""

    treedef: Any
    is_array: tuple[bool, ...]
    rest: tuple[Any, ...]

    def merge(self, arrays: Sequence[Any]) -> Any:
        """The tree, with these arrays in their places."""
        array, rest = iter(arrays), iter(self.rest)
        leaves = [next(array) if yes else next(rest) for yes in self.is_array]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class Traced:
    """An update as a value: two that compute the same are equal.

    Attributes:
      analysis: Its programs, without the arrays closed over.
      structure: The structure of what it returns.
      gating: Its gates and its restart, but for those known on the device alone.
    """

    analysis: Analysis
    structure: Any
    gating: Static


def split(tree: Any) -> tuple[list[Any], Static]:
    """Takes the arrays and numbers of a tree apart from the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    numbers = (int, float, complex)  # a new value must not mean a new compilation
    is_array = [
        isinstance(x, (*kinds, *numbers)) and not isinstance(x, bool) for x in leaves
    ]
    arrays = [x for x, yes in zip(leaves, is_array, strict=True) if yes]
    rest = tuple(x for x, yes in zip(leaves, is_array, strict=True) if not yes)
    return arrays, Static(treedef, tuple(is_array), rest)


def arrays_of(tree: Any) -> Any:
    """Python numbers and NumPy arrays as JAX arrays."""

    def array(path: Any, x: Any) -> Any:
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return x
        try:
            return jnp.asarray(x)
        except TypeError as error:
            raise TypeError(
                f"leaf {keystr(path)} is of type {type(x).__name__}: parameters and"
                " gradients are trees of arrays."
            ) from error

    return jax.tree_util.tree_map_with_path(array, tree)


def paths_of(tree: Any) -> tuple[list[jax.tree_util.KeyPath], list[Any]]:
    """The paths of the leaves, and the leaves."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [path for path, _ in flat], [leaf for _, leaf in flat]
