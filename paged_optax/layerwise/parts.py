"""A model's parameters, taken apart into the layers' and the rest, and put together."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.types import PyTreeDef

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parameters of a model.

    Attributes:
      key: The key of the layers' parameters.
      layers: The layers' parameters, stacked.
      rest: All others, by name.
      names: The mapping's keys, in the order of its leaves.
      structure: The structure of all parameters.
      in_layers: For each leaf of all parameters whether it is of the layers.
    """

    key: str
    layers: PyTree
    rest: dict[Hashable, PyTree]
    names: tuple[Hashable, ...]
    structure: PyTreeDef
    in_layers: tuple[bool, ...]

    @classmethod
    def of(cls, params: PyTree, key: str = "layers") -> "Parts":
        """Takes parameters apart.

        Args:
          params: The parameters of a model.
          key: The key of the layers' parameters.

        Raises:
          ValueError: If they are no mapping with that key.
        """
        given = by_name(params)
        if given is None or key not in given:
            keys = list(params) if isinstance(params, Mapping) else "no keys"
            raise ValueError(
                f"params is of type {type(params).__name__} and has {keys}: pass a dict"
                " or another mapping that JAX knows as a pytree, with the layers'"
                f" parameters stacked on a leading axis under the key {key!r}."
                " layerwise_step(..., layers=...) takes another key."
            )
        names = tuple(given)
        inside = [name == key for name in names for _ in jax.tree.leaves(given[name])]
        layers = given.pop(key)
        return cls(key, layers, given, names, jax.tree.structure(params), tuple(inside))

    def others(self, rest: Mapping[Hashable, PyTree[Array]]) -> list[Array]:
        """Leaves of a tree like `rest`, in the order that they have among all."""
        return [
            x
            for name in self.names
            if name != self.key
            for x in jax.tree.leaves(rest[name])
        ]

    def joined(self, layers: Sequence[Value], others: Sequence[Value]) -> list[Value]:
        """The leaves of both, in the order of all parameters."""
        of_layers, of_others = iter(layers), iter(others)
        return [next(of_layers if inside else of_others) for inside in self.in_layers]


def by_name(tree: PyTree) -> dict[Hashable, PyTree] | None:
    """What a mapping holds, in the order of its leaves; None of what is no mapping.

    Args:
      tree: The mapping: any that JAX knows as a pytree.
    """
    children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    # A mapping's leaves may come in any order: JAX itself says in which.
    numbers = jax.tree.unflatten(outer, range(len(children)))
    if not isinstance(numbers, Mapping):
        return None
    names = sorted(numbers, key=lambda name: numbers[name])
    return dict(zip(names, children, strict=True))
