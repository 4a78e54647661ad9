"""Residuals of a layer's backward pass, and the leaves that have gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.types import PyTreeDef


class Learned(NamedTuple):
    """Marks the leaves that depend on trained parameters.

    No other leaf has a gradient. The gradient of a table would be one more buffer,
    which each layer adds to. Gradients by a frozen teacher's activations would need a
    backward pass through all of its layers.

    Attributes:
      x: Marks of the leaves of the layers' input.
      context: Marks of the leaves of the context.
    """

    x: list[bool]
    context: list[bool]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals"],
    meta_fields=["structure", "known"],
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals of a layer's backward pass.

    Attributes:
      residuals: The residuals that are not among the layer's arguments.
      structure: The structure of the backward pass, a pytree of residuals.
      known: For each residual its place among the layer's arguments, or None.
    """

    residuals: list[Array | jax.ShapeDtypeStruct]
    structure: PyTreeDef
    known: tuple[int | None, ...]

    @staticmethod
    def of(pull: PyTree[Array], args: PyTree[Array]) -> "Saved":
        """Separates the residuals of a backward pass from the layer's arguments."""
        leaves, structure = jax.tree.flatten(pull)
        places = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(args))}
        known = tuple(places.get(id(leaf)) for leaf in leaves)
        pairs = zip(leaves, known, strict=True)
        return Saved([y for y, n in pairs if n is None], structure, known)

    def pull(
        self, residuals: Sequence[Array], args: PyTree[Array]
    ) -> Callable[..., Any]:
        """Returns the backward pass with these residuals and arguments."""
        leaves, others = jax.tree.leaves(args), iter(residuals)
        return jax.tree.unflatten(
            self.structure,
            [next(others) if n is None else leaves[n] for n in self.known],
        )
