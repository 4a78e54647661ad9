"""A step count of its own for each parameter.

Optax counts steps once for the whole tree. Here each integer scalar of a state, which
is what Optax counts in, becomes a tree of the parameters' structure, so that bias
corrections and schedules follow the updates a parameter has really had.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Where the step counts of a state are.

    Attributes:
      structure: The state's structure with one count for all parameters.
      positions: The counts among its leaves.
      parameters: The structure of the parameters.
    """

    structure: Any
    positions: tuple[int, ...]
    parameters: Any

    @classmethod
    def of(cls, init: Callable[[Any], Any], params: Any) -> "StepCounts":
        """Finds the counts in the state that `init` would make."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(init, params))
        positions = tuple(
            position
            for position, x in enumerate(leaves)
            if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
        )
        parameters = jax.tree.structure(params)
        return cls(structure, positions if parameters.num_leaves else (), parameters)

    def split(self, state: Any) -> Any:
        """Gives each parameter a copy of every count."""
        if not self.positions:
            return state
        leaves = self.structure.flatten_up_to(state)
        for position in self.positions:
            count = leaves[position]
            copies = [_copy(count) for _ in range(self.parameters.num_leaves)]
            leaves[position] = jax.tree.unflatten(self.parameters, copies)
        return jax.tree.unflatten(self.structure, leaves)

    def join(self, state: Any) -> tuple[Any, dict[int, list[Any]]]:
        """The state with one count for all, and each parameter's own.

        Returns:
          The state, each count that of the first parameter; and for each count, by its
          position among the state's leaves, one for each parameter.

        Raises:
          ValueError: If the state has one count for all parameters.
        """
        if not self.positions:
            return state, {}
        leaves = self.structure.flatten_up_to(state)
        own: dict[int, list[Any]] = {}
        for position in self.positions:
            counts = leaves[position]
            if jax.tree.structure(counts) != self.parameters:
                raise ValueError(
                    "per_parameter_steps=True, and the state has"
                    f" {jax.tree.structure(counts)} where one step count for each"
                    " parameter is called for: make the state with this"
                    " transformation's own init."
                )
            own[position] = jax.tree.leaves(counts)
            leaves[position] = own[position][0]
        return jax.tree.unflatten(self.structure, leaves), own


def _copy(count: Any) -> Any:
    return count if isinstance(count, Tracer) else jnp.array(count, copy=True)
