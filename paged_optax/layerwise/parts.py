"""A model's parameters, taken apart into the layers' and the rest, and put together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parameters of a model.

    Attributes:
      layers: The layers' parameters, stacked.
      rest: All others, by name.
      names: The mapping's keys, in the order of its leaves.
      structure: The structure of all parameters.
      in_layers: For each leaf of all parameters whether it is of the layers.
    """

    layers: Any
    rest: dict[Any, Any]
    names: tuple[Any, ...]
    structure: Any
    in_layers: tuple[bool, ...]

    @classmethod
    def of(cls, params: Any) -> "Parts":
        """Takes parameters apart.

        Raises:
          ValueError: If they are no mapping with the key `"layers"`.
        """
        children, outer = jax.tree.flatten(params, is_leaf=lambda x: x is not params)
        # A mapping's leaves may come in any order: JAX itself says in which.
        numbers = jax.tree.unflatten(outer, range(len(children)))
        if not isinstance(numbers, Mapping) or "layers" not in numbers:
            keys = list(params) if isinstance(params, Mapping) else "no keys"
            raise ValueError(
                f"params is of type {type(params).__name__} and has {keys}: pass a dict"
                " or another mapping that JAX knows as a pytree, with the layers'"
                " parameters stacked on a leading axis under the key 'layers'."
            )
        names = tuple(sorted(numbers, key=lambda name: numbers[name]))
        given = dict(zip(names, children, strict=True))
        inside = [
            name == "layers" for name in names for _ in jax.tree.leaves(given[name])
        ]
        layers = given.pop("layers")
        return cls(layers, given, names, jax.tree.structure(params), tuple(inside))

    def others(self, rest: Mapping[Any, Any]) -> list[Any]:
        """Leaves of a tree like `rest`, in the order that they have among all."""
        return [
            x
            for name in self.names
            if name != "layers"
            for x in jax.tree.leaves(rest[name])
        ]

    def joined(self, layers: list[Any], others: list[Any]) -> list[Any]:
        """The leaves of both, in the order of all parameters."""
        of_layers, of_others = iter(layers), iter(others)
        return [next(of_layers if inside else of_others) for inside in self.in_layers]
