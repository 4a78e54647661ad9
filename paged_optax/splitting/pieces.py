"""Prologue, kinds of layers, and epilogue of a split loss."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import (
    Constant,
    NumberedProgram,
    Operand,
    used_values,
)
from paged_optax.splitting.numbered import Member


class Weight(NamedTuple):
    """A parameter of the layer."""

    member: Member


class Carried(NamedTuple):
    """A value of the carry."""

    slot: int


class Seen(NamedTuple):
    """A value from before the layers or a constant, the same for all layers."""

    value: Operand


class FromTable(NamedTuple):
    """A layer's row of a table."""

    table: int


class Kept(NamedTuple):
    """A value that a layer keeps for the epilogue; None: the values of all layers."""

    number: int
    layer: int | None


#: The role of a layer's argument.
Role = Weight | Carried | Seen | FromTable


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """The program of equal layers."""

    program: Callable[[Sequence[ArrayLike]], Sequence[ArrayLike]]
    roles: Sequence[Role]
    # The index of the result with the next value of each slot; others keep their value.
    carried: Mapping[int, int]
    # The index of the result for each kept value that layers of this kind compute.
    kept: Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A loss split into prologue, kinds of layers, and epilogue."""

    flat: Flat
    kinds: Sequence[LayerKind]
    kind_indices: Sequence[int]  # of each layer
    # First value of each slot of the carry; None for zeros.
    initial: Sequence[Operand | None]
    carried: Sequence[ShapedArray]  # the slots' shapes and dtypes
    # Arguments that differ between layers: an operand for each layer (None if the layer
    # needs none), or one operand with layers on its leading axis.
    tables: Sequence[Sequence[Operand | None]]
    # Shapes and dtypes of the values that each layer keeps.
    kept: Sequence[ShapedArray]
    # Values of layers that the epilogue reads, from the last carry or kept.
    after: Mapping[int, Carried | Kept]
    inside: frozenset[int]  # values that layers compute

    @property
    def seen(self) -> list[int]:
        """The values that all layers read, without the constants of the loss."""
        roles = (role for kind in self.kinds for role in kind.roles)
        values = used_values(role.value for role in roles if isinstance(role, Seen))
        return [x for x in dict.fromkeys(values) if x not in self.flat.constants]

    @functools.cached_property
    def before(self) -> NumberedProgram:
        """Computes the first layer's input, and the values that all layers read."""
        rows = (x for table in self.tables for x in table)
        results = [x for x in (*self.initial, *self.seen, *rows) if x is not None]
        return self.flat.program(results, lambda x: x not in self.inside)

    @functools.cached_property
    def results(self) -> NumberedProgram:
        """Computes the results of the loss."""
        return self.flat.program(self.flat.outputs, lambda x: x not in self.after)

    def prologue(self, numbered: Mapping[int, ArrayLike]) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read.

        `numbered` maps the trace's numbers to the parameters outside the layers and the
        batch.
        """
        values = self.before({**numbered, **self.flat.constants})
        x = [
            # A slot without a value before the first layer.
            _zeros(aval) if operand is None else _array(values[operand], aval.dtype)
            for operand, aval in zip(self.initial, self.carried, strict=True)
        ]
        seen = {str(value): jnp.asarray(values[value]) for value in self.seen}
        tables = [self._table(table, values) for table in self.tables]
        return x, {"seen": seen, "tables": tables}

    def _table(
        self, operands: Sequence[Operand | None], values: Mapping[Operand, ArrayLike]
    ) -> Array:
        # Layers that need no row get any row, because rows are stacked.
        like = next(x for x in operands if x is not None)
        rows = [values[like if x is None else x] for x in operands]
        if len(rows) == 1:
            return jnp.asarray(rows[0])
        _, dtype = self.flat.aval(like)
        if any(isinstance(row, Array) for row in rows):
            return jnp.stack([_array(row, dtype) for row in rows])
        return jnp.asarray(np.asarray(rows, dtype))

    def layer(
        self,
        weights: Sequence[PyTree],
        x: Sequence[Array],
        context: PyTree,
        i: Int[Array, ""],
    ) -> tuple[list[Array], list[Array]]:
        """Computes the next layer's input, and the values kept for the epilogue.

        `weights` are a layer's trained parameters, and its frozen ones, if any.
        """
        branches = [functools.partial(self._layer, k, weights, i) for k in self.kinds]
        if len(branches) == 1:
            return branches[0](x, context)
        # With several kinds, only the branch of the layer's kind is computed.
        which = jnp.asarray(np.asarray(self.kind_indices, np.int32))[i]
        return lax.switch(which, branches, list(x), context)

    def _layer(
        self,
        kind: LayerKind,
        weights: Sequence[PyTree],
        i: Int[Array, ""],
        x: Sequence[Array],
        context: PyTree,
    ) -> tuple[list[Array], list[Array]]:
        constants = self.flat.constants
        args: list[ArrayLike] = []
        for role in kind.roles:
            match role:
                case Weight((is_frozen, names)):
                    layer = weights[is_frozen]
                    args.append(functools.reduce(operator.getitem, names, layer))
                case Carried(slot):
                    args.append(x[slot])
                case FromTable(table):
                    rows = context["tables"][table]
                    args.append(lax.dynamic_index_in_dim(rows, i, keepdims=False))
                case Seen(Constant(value=value)):
                    args.append(value)
                case Seen(int(value)) if value in constants:
                    args.append(constants[value])
                case Seen(value):
                    args.append(context["seen"][str(value)])
        results = kind.program(args)
        carried, result = kind.carried, lambda n: jnp.asarray(results[n])
        x = [result(carried[k]) if k in carried else old for k, old in enumerate(x)]
        kept = [
            # Kept values are stacked, so that each layer needs a row.
            result(kind.kept[k]) if k in kind.kept else _zeros(aval)
            for k, aval in enumerate(self.kept)
        ]
        return x, kept

    def epilogue(
        self,
        numbered: Mapping[int, ArrayLike],
        x: Sequence[Array],
        kept: Sequence[Array],
    ) -> list[ArrayLike]:
        """Computes the results of the loss; `kept` has all layers' values."""
        values = {**numbered, **self.flat.constants}
        for value, role in self.after.items():
            match role:
                case Carried(slot):
                    values[value] = x[slot]
                case Kept(number, None):
                    values[value] = kept[number]
                case Kept(number, layer):
                    values[value] = kept[number][layer]
        results = self.results(values)
        return [results[x] for x in self.flat.outputs]


def _array(x: ArrayLike, dtype: DTypeLike) -> Array:
    """Converts a literal to an array of its traced dtype."""
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _zeros(aval: ShapedArray) -> Array:
    return jnp.zeros(aval.shape, aval.dtype)
