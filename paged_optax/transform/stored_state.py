"""What a state holds in place of each leaf of its transformation's own.

With the default settings a state is Optax's own, leaf for leaf. A codec stores a moment
as something else, and with `per_parameter_steps` each integer scalar, which is what
Optax counts steps in, is a tree of the parameters' structure, so that bias corrections
and schedules follow the updates a parameter has really had.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from paged_optax.backend.memory import nbytes
from paged_optax.codecs import Codec, arranged
from paged_optax.engine.shards import Shards


class OtherLayoutError(ValueError):
    """A state holds a moment as another codec, or other shards, would store it."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A state's structure, and what is stored differently.

    Attributes:
      structure: The structure of the transformation's own state.
      avals: What the transformation sees of each leaf.
      codecs: What stores each leaf; None where it is stored as it is.
      counts: The positions of step counts of which each parameter has its own.
      parameters: The structure of the parameters.
      shards: How each leaf is divided over a mesh; None where it is not.
    """

    structure: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    codecs: tuple[Codec | None, ...]
    counts: tuple[int, ...]
    parameters: Any
    shards: tuple[Shards | None, ...]

    @classmethod
    def of(
        cls,
        shapes: Any,
        codecs: Sequence[Codec | None],
        params: Any,
        shards: Sequence[Shards | None],
        *,
        per_parameter_steps: bool,
    ) -> "Layout":
        """Lays a state out, given the shapes of the transformation's own.

        Args:
          shapes: The transformation's own state.
          codecs: What stores each of its leaves, or None.
          params: The parameters.
          shards: How each of its leaves is divided, or None.
          per_parameter_steps: Whether each parameter has its own step counts.
        """
        avals, structure = jax.tree.flatten(shapes)
        parameters = jax.tree.structure(params)
        counts = [
            position
            for position, x in enumerate(avals)
            if per_parameter_steps
            and parameters.num_leaves
            and x.ndim == 0
            and jnp.issubdtype(x.dtype, jnp.integer)
        ]
        codecs = [
            codec and arranged(codec, part.local(x.shape) if part else x.shape, x.shape)
            for codec, x, part in zip(codecs, avals, shards, strict=True)
        ]
        return cls(
            structure,
            tuple(avals),
            tuple(codecs),
            tuple(counts),
            parameters,
            tuple(shards),
        )

    def stored(self, position: int) -> Any:
        """The shapes and dtypes in which a leaf is stored."""
        codec, aval = self.codecs[position], self.avals[position]
        if codec is None:
            return aval
        shards = self.shards[position]
        return shards.stored(codec, aval.shape) if shards else codec.stored(aval.shape)

    def types(self, position: int, parameter: Any) -> Any:
        """What is divided as a stored leaf is; None for what is on all devices."""
        codec, aval = self.codecs[position], self.avals[position]
        shards = self.shards[position]
        if codec is None:
            return parameter if np.shape(parameter) == aval.shape else None
        stored = self.stored(position)
        if shards is None:
            return jax.tree.map(lambda _: None, stored)
        return shards.typed(codec, stored, shards.local(aval.shape))

    def sizes(self) -> list[int | None]:
        """Bytes a device of each leaf as it is stored; None for what is no moment."""
        return [
            nbytes(self.stored(position)) // self.parts(position)
            if x.ndim and jnp.issubdtype(x.dtype, jnp.inexact) and nbytes(x)
            else None
            for position, x in enumerate(self.avals)
        ]

    def parts(self, position: int) -> int:
        """Into how many parts a leaf is divided."""
        shards = self.shards[position]
        return math.prod(shards.divisions) if shards else 1

    def build(self, leaves: Sequence[Any]) -> Any:
        """A new state of stored leaves; each parameter gets a copy of every count."""
        leaves = list(leaves)
        for position in self.counts:
            count = leaves[position]
            copies = [_copy(count) for _ in range(self.parameters.num_leaves)]
            leaves[position] = jax.tree.unflatten(self.parameters, copies)
        return jax.tree.unflatten(self.structure, leaves)

    def take_apart(self, state: Any) -> tuple[list[Any], dict[int, list[Any]]]:
        """The stored leaves of a state, and the counts that each parameter has.

        Returns:
          The leaves, each count that of the first parameter; and for each count, by its
          position, one for each parameter.

        Raises:
          ValueError: If the state is of another layout.
        """
        leaves = self.structure.flatten_up_to(state)
        for position, codec in enumerate(self.codecs):
            if codec is not None:
                leaves[position] = self._read(leaves[position], position)
        own: dict[int, list[Any]] = {}
        for position in self.counts:
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
        return leaves, own

    def _read(self, found: Any, position: int) -> Any:
        """What a codec stored, in whatever container it comes back."""
        wanted = self.stored(position)
        describe = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        if describe(found) != describe(wanted):
            raise OtherLayoutError(
                f"the state holds {jax.tree.map(jax.typeof, found)} where codec"
                f" {self.codecs[position]!r} stores {wanted}: make the state with this"
                " transformation's own init, for parameters divided as these are."
            )
        return jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(found))

    def seen(self, leaves: Sequence[Any]) -> Any:
        """The state as the transformation sees it, of abstract values where coded."""
        return jax.tree.unflatten(
            self.structure,
            [
                x if codec is None else aval
                for x, aval, codec in zip(leaves, self.avals, self.codecs, strict=True)
            ],
        )

    def blank(self, leaves: Sequence[Any]) -> Any:
        """The same, to trace with: zeros where coded."""
        return jax.tree.map(
            lambda x: (
                jnp.zeros(x.shape, x.dtype)
                if isinstance(x, jax.ShapeDtypeStruct)
                else x
            ),
            self.seen(leaves),
        )


def _copy(count: Any) -> Any:
    return count if isinstance(count, Tracer) else jnp.array(count, copy=True)
