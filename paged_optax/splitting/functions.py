"""Prologue, layer and epilogue of a split loss, called by a layerwise step."""

import dataclasses
import functools
import weakref
from collections.abc import Mapping, MutableMapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.analysis.program import Constant, NumberedProgram, Operand
from paged_optax.backend.types import shape_dtype
from paged_optax.splitting.assembly import (
    Carried,
    FromTable,
    Kept,
    LayerKind,
    Pieces,
    Seen,
    Weight,
)
from paged_optax.splitting.numbered import Stack
from paged_optax.splitting.split_loss import Loss, SplitLoss
from paged_optax.splitting.stacking import Stacking, leaf_shapes, unnested


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """Prologue, layer and epilogue of one trace of a loss."""

    split: SplitLoss

    @property
    def pieces(self) -> Pieces:
        """The pieces of the trace."""
        return self.split.pieces

    @functools.cached_property
    def before(self) -> NumberedProgram:
        """Computes the first layer's input, and the values that all layers read."""
        pieces = self.pieces
        tables = ([x] if isinstance(x, Operand) else x for x in pieces.tables)
        rows = (x for table in tables for x in table)
        results = [x for x in (*pieces.initial, *pieces.seen, *rows) if x is not None]
        return pieces.flat.program(results, lambda x: x not in pieces.inside)

    @functools.cached_property
    def results(self) -> NumberedProgram:
        """Computes the results of the loss."""
        flat, after = self.pieces.flat, self.pieces.after
        return flat.program(flat.outputs, lambda x: x not in after)

    def prologue(self, numbered: Mapping[int, ArrayLike]) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read.

        `numbered` maps the trace's numbers to the parameters outside the layers and the
        batch.
        """
        pieces = self.pieces
        values = self.before({**numbered, **pieces.flat.constants})
        x = [
            # A slot without a value before the first layer.
            _zeros(aval) if operand is None else _array(values[operand], aval.dtype)
            for operand, aval in zip(pieces.initial, pieces.carried, strict=True)
        ]
        seen = {str(value): jnp.asarray(values[value]) for value in pieces.seen}
        tables = [
            jnp.asarray(values[table])
            if isinstance(table, Operand)
            else self._table(table, values)
            for table in pieces.tables
        ]
        return x, {"seen": seen, "tables": tables}

    def _table(
        self, operands: Sequence[Operand | None], values: Mapping[Operand, ArrayLike]
    ) -> Array:
        # Layers that need no row get any row, because rows are stacked.
        like = next(x for x in operands if x is not None)
        rows = [values[like if x is None else x] for x in operands]
        _, dtype = self.pieces.flat.aval(like)
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
        kinds = self.pieces.kinds
        branches = [functools.partial(self._layer, x, weights, i) for x in kinds]
        if len(branches) == 1:
            return branches[0](x, context)
        # With several kinds, only the branch of the layer's kind is computed.
        which = jnp.asarray(np.asarray(self.pieces.kind_indices, np.int32))[i]
        return lax.switch(which, branches, list(x), context)

    def _layer(
        self,
        kind: LayerKind,
        weights: Sequence[PyTree],
        i: Int[Array, ""],
        x: Sequence[Array],
        context: PyTree,
    ) -> tuple[list[Array], list[Array]]:
        constants = self.pieces.flat.constants
        args: list[ArrayLike] = []
        for role in kind.roles:
            match role:
                case Weight((is_frozen, names)):
                    args += unnested(weights[is_frozen], [names])
                case Carried(slot):
                    args.append(x[slot])
                case FromTable(table):
                    rows = context["tables"][table]
                    args.append(lax.dynamic_index_in_dim(rows, i, keepdims=False))
                case Seen(value):
                    if isinstance(value, Constant):
                        args.append(value.value)
                    elif value in constants:
                        args.append(constants[value])
                    else:
                        args.append(context["seen"][str(value)])
        results = kind.program(args)
        carried, result = kind.carried, lambda n: jnp.asarray(results[n])
        x = [result(carried[k]) if k in carried else old for k, old in enumerate(x)]
        kept = [
            # Kept values are stacked, so that each layer needs a row.
            result(kind.kept[k]) if k in kind.kept else _zeros(aval)
            for k, aval in enumerate(self.pieces.kept)
        ]
        return x, kept

    def epilogue(
        self,
        numbered: Mapping[int, ArrayLike],
        x: Sequence[Array],
        kept: Sequence[Array],
    ) -> PyTree:
        """Computes the result of the loss; `kept` has all layers' values."""
        values = {**numbered, **self.pieces.flat.constants}
        for value, role in self.pieces.after.items():
            match role:
                case Carried(slot):
                    values[value] = x[slot]
                case Kept(number, None):
                    values[value] = kept[number]
                case Kept(number, layer):
                    values[value] = kept[number][layer]
        results = self.results(values)
        leaves = [results[x] for x in self.pieces.flat.outputs]
        return jax.tree.unflatten(self.split.output, leaves)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Reference:
    """Weak, because JAX's caches keep the structures of arguments."""

    functions: weakref.ref[Functions]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitFunctions:
    """Prologue, layer and epilogue of a loss, for batches of any shapes and dtypes."""

    loss: Loss
    batch: PyTree[jax.ShapeDtypeStruct]  # types of the first batch
    split: SplitLoss  # for the first batch. All other batches have its stacks
    # Split losses by jaxpr. JAX caches jaxprs by everything that a trace depends on:
    # weak types, the ambient mesh, the matmul precision.
    cache: MutableMapping[core.ClosedJaxpr, Functions]

    @classmethod
    def create(cls, loss: Loss, batch: PyTree) -> "SplitFunctions":
        """Splits a loss for a first batch, which determines the layers."""
        batch = jax.tree.map(shape_dtype, batch)
        jaxpr, split = loss.traced(batch).jaxpr, loss.split(batch)
        cache = weakref.WeakKeyDictionary({jaxpr: Functions(split)})
        return cls(loss, batch, split, cache)

    def for_types(
        self, params: Mapping[str, PyTree], frozen: Mapping[str, PyTree] | None
    ) -> "SplitFunctions":
        """Returns the functions for stacked parameters of other dtypes."""
        typed = lambda tree, frozen: self.stacking(frozen=frozen).unstacked(
            jax.tree.map(shape_dtype, tree)
        )
        loss = dataclasses.replace(self.loss, params=typed(params, False))
        if frozen is not None and loss.frozen is not None:
            loss = dataclasses.replace(loss, frozen=typed(frozen, True))
        return dataclasses.replace(self, loss=loss)

    def stacking(self, *, frozen: bool) -> Stacking:
        """Stacking of the trained parameters, or of the frozen ones."""
        tree = self.loss.frozen if frozen else self.loss.params
        # In the trace the frozen parameters follow the others.
        first = len(jax.tree.leaves(self.loss.params)) if frozen else 0
        layers, stacked = self.split.layers, self.split.layers.leaves
        stacks = {
            names: Stack(tuple(n - first for n in stack.leaves), stack.axis)
            for (is_frozen, names), stack in layers.stacks.items()
            if is_frozen == frozen
        }
        rest = {
            names: n - first
            for n, (is_frozen, names) in enumerate(self.loss.leaves)
            if is_frozen == frozen and n not in stacked
        }
        return Stacking("frozen" if frozen else "params", tree, stacks, rest)

    def prologue(self, rest: PyTree, *remaining: PyTree) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read."""
        functions = self._of(remaining[-1])
        x, context = functions.prologue(self._numbered(rest, remaining))
        # A layer has no batch as an argument to choose its functions by.
        return x, (_Reference(weakref.ref(functions)), context)

    def layer(
        self, weights: PyTree, *remaining: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """Computes the next layer's input, and the values kept for the epilogue."""
        *frozen, x, (reference, context), i = remaining
        functions = reference.functions()
        assert functions is not None
        return functions.layer((weights, *frozen), x, context, i)

    def epilogue(self, rest: PyTree, *remaining: PyTree) -> PyTree:
        """Computes the result of the loss."""
        *frozen, x, kept, batch = remaining
        numbers = self._numbered(rest, (*frozen, batch))
        return self._of(batch).epilogue(numbers, x, kept)

    def _of(self, batch: PyTree) -> Functions:
        """Splits the loss for a batch of these types, or reads it from the cache."""
        batch = jax.tree.map(shape_dtype, batch)
        try:
            jaxpr = self.loss.traced(batch).jaxpr
        except Exception as error:
            old, new = leaf_shapes(self.batch), leaf_shapes(batch)
            differ = [x for x in old | new if old.get(x) != new.get(x)]
            if not differ:
                raise
            # A loss may accept any shapes: mention them only if it fails.
            fails = f"loss fails with batch{differ[0]}"
            if differ[0] not in old:
                why = f"{fails}, which split_layers did not get."
            elif differ[0] not in new:
                why = (
                    f"loss fails without batch{differ[0]}, which split_layers got."
                    " State has the same place in each batch, and the loss returns all"
                    " of it."
                )
            else:
                why = (
                    f"{fails} of shape {new[differ[0]]}, and split_layers got"
                    f" {old[differ[0]]}. Only with accumulate=True a step reads"
                    " micro-batches from the leading axis of each leaf."
                )
            raise ValueError(why) from error
        if jaxpr not in self.cache:
            self.cache[jaxpr] = Functions(self.loss.split(batch, self.split.layers))
        return self.cache[jaxpr]

    def _numbered(
        self, rest: PyTree, remaining: Sequence[PyTree]
    ) -> dict[int, ArrayLike]:
        """Maps the trace's numbers to parameters outside the layers and the batch."""
        *frozen, batch = remaining
        if bool(frozen) != (self.loss.frozen is not None):
            raise TypeError(
                "frozen is given, and split_layers was given none: split the loss"
                " again, split_layers(loss, params, batch, frozen=frozen)."
                if frozen
                else "frozen is missing: the loss has parameters that are not trained."
                " Pass model.stack_frozen(frozen) after the batch to a step, and before"
                " it to model.loss."
            )
        # In the order of the trace's arguments.
        numbers: dict[int, ArrayLike] = {}
        first = 0
        for is_frozen, tree in zip((False, True), (rest, *frozen), strict=False):
            stacking = self.stacking(frozen=is_frozen)
            leaves = unnested(tree, [("rest", *names) for names in stacking.rest])
            places = (first + n for n in stacking.rest.values())
            numbers.update(zip(places, leaves, strict=True))
            first += stacking.structure.num_leaves
        numbers.update(enumerate(jax.tree.leaves(batch), first))
        return numbers


def _array(x: ArrayLike, dtype: DTypeLike) -> Array:
    """Converts a literal to an array of its traced dtype."""
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _zeros(aval: ShapedArray) -> Array:
    return jnp.zeros(aval.shape, aval.dtype)
