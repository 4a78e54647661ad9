"""Prologue, layer and epilogue of a loss in pieces, as a layerwise step calls them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from paged_optax.analysis.program import Constant, Operand, Program
from paged_optax.splitting.dependence import producers_of
from paged_optax.splitting.numbered import Member
from paged_optax.splitting.pieces import (
    Carried,
    Fixed,
    FromCarry,
    FromTable,
    LayerKind,
    Pieces,
    Seen,
    Weight,
)


class _Part(NamedTuple):
    """Equations of the loss outside the layers, and their arguments."""

    program: Program
    arguments: tuple[int, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """A loss that is called in three parts.

    Attributes:
      pieces: The loss.
      before: Computes the first layer's input, and the values that all layers see.
      after: Computes the results of the loss.
    """

    pieces: Pieces
    before: _Part
    after: _Part

    @classmethod
    def of(cls, pieces: Pieces) -> "Functions":
        """The three functions of a loss in pieces."""
        flat = pieces.flat
        producer = producers_of(flat)
        # In the order in which `prologue` reads the results.
        wanted: list[Operand] = [x for x in pieces.initial if x is not None]
        wanted += pieces.seen
        for table in pieces.tables:
            rows = [table] if isinstance(table, (int, Constant)) else table
            wanted += [x for x in rows if x is not None]
        outside = lambda x: x not in pieces.inside
        before = _Part(*flat.program(wanted, outside, producer, ()))
        until = lambda x: x not in pieces.after
        after = _Part(*flat.program(flat.outputs, until, producer, ()))
        return cls(pieces, before, after)

    def prologue(self, numbered: Mapping[int, ArrayLike]) -> tuple[list[Array], PyTree]:
        """The first layer's input, and the values that all layers see.

        Args:
          numbered: The parameters outside the layers, and the batch, by number.
        """
        pieces = self.pieces
        results = iter(_run(self.before, {**numbered, **pieces.flat.constants}))
        x = [
            jnp.zeros(aval.shape, aval.dtype)
            if operand is None
            else _array(next(results), aval.dtype)
            for operand, aval in zip(pieces.initial, pieces.carried, strict=True)
        ]
        seen = {str(value): jnp.asarray(next(results)) for value in pieces.seen}
        tables: list[Array] = []
        for table in pieces.tables:
            if isinstance(table, (int, Constant)):
                tables.append(jnp.asarray(next(results)))
                continue
            rows = [None if x is None else next(results) for x in table]
            # Layers that need no row get any: rows of a table are stacked.
            blank = next(row for row in rows if row is not None)
            dtype = next(_dtype(pieces, x) for x in table if x is not None)
            each = [blank if row is None else row for row in rows]
            tables.append(_stacked(each, dtype))
        return x, {"seen": seen, "tables": tables}

    def layer(
        self,
        weights: Callable[[Member], Array],
        x: Sequence[Array],
        context: PyTree,
        i: Int[Array, ""],
    ) -> tuple[list[Array], list[Array]]:
        """The next layer's input, and the values to keep for the epilogue."""
        pieces = self.pieces

        def run(kind: LayerKind) -> Callable[..., tuple[list[Array], list[Array]]]:
            return lambda x, context: self._layer(kind, weights, x, context, i)

        if len(pieces.kinds) == 1:
            return run(pieces.kinds[0])(x, context)
        # Of layers of several kinds only the layer's branch is computed.
        which = jnp.asarray(np.asarray(pieces.kind_of, np.int32))[i]
        return lax.switch(which, list(map(run, pieces.kinds)), list(x), context)

    def _layer(
        self,
        kind: LayerKind,
        weights: Callable[[Member], Array],
        x: Sequence[Array],
        context: PyTree,
        i: Int[Array, ""],
    ) -> tuple[list[Array], list[Array]]:
        constants = self.pieces.flat.constants
        arguments: list[ArrayLike] = []
        for role in kind.roles:
            match role:
                case Weight(member):
                    arguments.append(weights(member))
                case Carried(slot):
                    arguments.append(x[slot])
                case Fixed(value):
                    arguments.append(value)
                case FromTable(table):
                    rows = context["tables"][table]
                    arguments.append(lax.dynamic_index_in_dim(rows, i, keepdims=False))
                case Seen(value):
                    known = value in constants
                    arguments.append(
                        constants[value] if known else context["seen"][str(value)]
                    )
        results = kind.program(arguments)
        carried = [
            old if n is None else jnp.asarray(results[n])
            for old, n in zip(x, kind.carried, strict=True)
        ]
        kept = [
            jnp.zeros(aval.shape, aval.dtype) if n is None else jnp.asarray(results[n])
            for aval, n in zip(self.pieces.kept, kind.kept, strict=True)
        ]
        return carried, kept

    def epilogue(
        self,
        numbered: Mapping[int, ArrayLike],
        x: Sequence[Array],
        kept: Sequence[Array],
    ) -> list[ArrayLike]:
        """The results of the loss, leaf by leaf.

        Args:
          numbered: The parameters outside the layers, and the batch, by number.
          x: The last layer's output.
          kept: The values that the layers kept, stacked.
        """
        from_layers: dict[int, ArrayLike] = {}
        for value, where in self.pieces.after.items():
            if isinstance(where, FromCarry):
                from_layers[value] = x[where.slot]
            elif where.layer is None:
                from_layers[value] = kept[where.number]
            else:
                from_layers[value] = kept[where.number][where.layer]
        return _run(
            self.after, {**numbered, **self.pieces.flat.constants, **from_layers}
        )


def _run(part: _Part, values: Mapping[int, ArrayLike]) -> list[ArrayLike]:
    return part.program([values[x] for x in part.arguments])


def _array(x: ArrayLike, dtype: np.dtype) -> Array:
    """An array; a literal gets the dtype that it was traced with."""
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _dtype(pieces: Pieces, x: Operand) -> np.dtype:
    if isinstance(x, Constant):
        return np.dtype(str(x.key[2]))
    return pieces.flat.avals[x].dtype


def _stacked(rows: Sequence[ArrayLike], dtype: np.dtype) -> Array:
    if all(not isinstance(x, Array) for x in rows):
        return jnp.asarray(np.stack([np.asarray(x, dtype) for x in rows]))
    return jnp.stack([_array(x, dtype) for x in rows])
