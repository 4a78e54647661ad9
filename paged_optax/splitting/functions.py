"""Prologue, layer and epilogue of a split loss, called by a layerwise step."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from paged_optax.analysis.program import Constant, Operand, Program
from paged_optax.backend.text import keystr
from paged_optax.backend.types import shape_dtype
from paged_optax.splitting.dependence import producers_of
from paged_optax.splitting.numbered import Member, split_names
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
from paged_optax.splitting.split_loss import Loss, SplitLoss
from paged_optax.splitting.stacking import Stack, Stacking, unnested


class _Part(NamedTuple):
    """A program of equations outside the layers, and its arguments."""

    program: Program
    arguments: tuple[int, ...]

    def __call__(self, values: Mapping[int, ArrayLike]) -> list[ArrayLike]:
        return self.program([values[x] for x in self.arguments])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """Prologue, layer and epilogue of one trace of a loss."""

    pieces: Pieces
    before: _Part  # the first layer's input, and the values that all layers read
    after: _Part  # the results of the loss

    @classmethod
    def of(cls, pieces: Pieces) -> "Functions":
        """Collects the equations of the prologue and of the epilogue."""
        flat = pieces.flat
        producer = producers_of(flat)
        # In the order in which `prologue` reads the results.
        results: list[Operand] = [x for x in pieces.initial if x is not None]
        results += pieces.seen
        for table in pieces.tables:
            rows = [table] if isinstance(table, (int, Constant)) else table
            results += [x for x in rows if x is not None]
        outside = lambda x: x not in pieces.inside
        before = _Part(*flat.program(results, outside, producer, ()))
        until = lambda x: x not in pieces.after
        after = _Part(*flat.program(flat.outputs, until, producer, ()))
        return cls(pieces, before, after)

    def prologue(self, numbered: Mapping[int, ArrayLike]) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read.

        `numbered` maps the trace's numbers to the parameters outside the layers and the
        batch.
        """
        pieces = self.pieces
        results = iter(self.before({**numbered, **pieces.flat.constants}))
        x = [
            # A slot without a value before the first layer.
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
            # Layers that need no row get any row, because rows are stacked.
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
        """Computes the next layer's input, and the values kept for the epilogue."""
        pieces = self.pieces

        def run(kind: LayerKind) -> Callable[..., tuple[list[Array], list[Array]]]:
            return lambda x, context: self._layer(kind, weights, x, context, i)

        if len(pieces.kinds) == 1:
            return run(pieces.kinds[0])(x, context)
        # With several kinds, only the branch of the layer's kind is computed.
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
            # Kept values are stacked, so that each layer needs a row.
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
        """Computes the leaves of the loss's result; `kept` has all layers' values."""
        from_layers: dict[int, ArrayLike] = {}
        for value, where in self.pieces.after.items():
            if isinstance(where, FromCarry):
                from_layers[value] = x[where.slot]
            elif where.layer is None:
                from_layers[value] = kept[where.number]
            else:
                from_layers[value] = kept[where.number][where.layer]
        return self.after({**numbered, **self.pieces.flat.constants, **from_layers})


def _other_axes(batch: PyTree, first: PyTree) -> str:
    """Error text for a batch whose arrays all have one axis more, or less; or empty."""
    if jax.tree.structure(batch) != jax.tree.structure(first):
        return ""
    flat, _ = jax.tree_util.tree_flatten_with_path(batch)
    pairs = zip(flat, jax.tree.leaves(first), strict=True)
    shapes = [(path, x.shape, y.shape) for (path, x), y in pairs if x.shape or y.shape]
    more = {len(x) - len(like) for _, x, like in shapes}
    if more not in ({1}, {-1}):
        return ""
    path, shape, like = shapes[0]
    shapes = f"batch{keystr(path)} has shape {shape}, and split_layers got {like}"
    if more == {1}:
        return (
            f"{shapes}: it has an axis more. For stacked micro-batches pass"
            " accumulate=True to layerwise_step, or pass a batch without the axis."
        )
    return (
        f"{shapes}: it has an axis less. With accumulate=True a step reads"
        " micro-batches from the leading axis of each leaf. Stack them, with"
        " x.reshape(count, -1, *x.shape[1:]), or omit accumulate=True."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class SplitFunctions:
    """Prologue, layer and epilogue of a loss, for batches of any shapes and dtypes."""

    loss: Loss
    batch: PyTree[jax.ShapeDtypeStruct]  # types of the first batch
    split: SplitLoss  # for the first batch. All other batches have its stacks
    # Split losses by jaxpr. JAX caches jaxprs by everything that a trace depends on:
    # weak types, the ambient mesh, the matmul precision.
    cache: MutableMapping[core.ClosedJaxpr, tuple[SplitLoss, Functions]]

    @classmethod
    def of(cls, loss: Loss, batch: PyTree) -> "SplitFunctions":
        """Splits a loss for a first batch, which determines the layers."""
        batch = jax.tree.map(shape_dtype, batch)
        jaxpr, split = loss.jaxpr(batch), loss.split(batch)
        results = split, Functions.of(split.pieces)
        return cls(loss, batch, split, weakref.WeakKeyDictionary({jaxpr: results}))

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
        loss = self.loss
        tree = loss.frozen if frozen else loss.params
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        # In the trace the frozen parameters follow the others.
        first = len(jax.tree.leaves(loss.params)) if frozen else 0
        stacks = {
            names: Stack(tuple(n - first for n in stack.leaves), stack.axis)
            for (is_frozen, names), stack in self.split.stacks.items()
            if is_frozen == frozen
        }
        stacked = {n for stack in stacks.values() for n in stack.leaves}
        paths = tuple(path for path, _ in flat)
        names = enumerate(split_names(paths))
        rest = {name: n for n, name in names if n not in stacked}
        return Stacking(
            "frozen" if frozen else "params",
            structure,
            paths,
            tuple(x.shape for _, x in flat),
            stacks,
            rest,
        )

    def prologue(self, rest: PyTree, *others: PyTree) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read."""
        _, functions = self._of(others[-1])
        x, context = functions.prologue(self._numbered(rest, others))
        # A layer has no batch as an argument to choose its functions by.
        return x, (functions, context)

    def layer(
        self, weights: PyTree, *others: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """Computes the next layer's input, and the values kept for the epilogue."""
        *frozen, x, (functions, context), i = others
        trees = weights, *frozen

        def weight(member: Member) -> Array:
            is_frozen, names = member
            (leaf,) = unnested(trees[is_frozen], [names])
            return leaf

        return functions.layer(weight, x, context, i)

    def epilogue(self, rest: PyTree, *others: PyTree) -> PyTree:
        """Computes the result of the loss."""
        *frozen, x, kept, batch = others
        numbers = self._numbered(rest, (*frozen, batch))
        split, functions = self._of(batch)
        results = functions.epilogue(numbers, x, kept)
        return jax.tree.unflatten(split.output, results)

    def _of(self, batch: PyTree) -> tuple[SplitLoss, Functions]:
        """Splits the loss for a batch of these types, or reads it from the cache."""
        batch = jax.tree.map(shape_dtype, batch)
        try:
            jaxpr = self.loss.jaxpr(batch)
            if jaxpr not in self.cache:
                split = self.loss.split(batch)
                if split.stacks != self.split.stacks:
                    split = self.loss.split(batch, self.split)
                self.cache[jaxpr] = split, Functions.of(split.pieces)
            return self.cache[jaxpr]
        except Exception as error:
            # A loss may accept any number of axes: mention them only if it fails.
            if words := _other_axes(batch, self.batch):
                first_line = str(error).partition("\n")[0]
                raise ValueError(
                    f"{words} The loss fails with this batch:"
                    f" {type(error).__name__}: {first_line}"
                ) from error
            raise

    def _numbered(self, rest: PyTree, others: Sequence[PyTree]) -> dict[int, ArrayLike]:
        """Maps the trace's numbers to parameters outside the layers and the batch."""
        *frozen, batch = others
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
        for tree, is_frozen in ((rest, False), *((x, True) for x in frozen)):
            stacking = self.stacking(frozen=is_frozen)
            leaves = unnested(tree, [("rest", *names) for names in stacking.rest])
            places = (first + n for n in stacking.rest.values())
            numbers.update(zip(places, leaves, strict=True))
            first += len(stacking.paths)
        numbers.update(enumerate(jax.tree.leaves(batch), first))
        return numbers


def _array(x: ArrayLike, dtype: np.dtype) -> Array:
    """Converts a literal to an array of its traced dtype."""
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _dtype(pieces: Pieces, x: Operand) -> np.dtype:
    if isinstance(x, Constant):
        return np.dtype(str(x.key[2]))
    return pieces.flat.avals[x].dtype


def _stacked(rows: Sequence[ArrayLike], dtype: np.dtype) -> Array:
    if all(not isinstance(x, Array) for x in rows):
        return jnp.asarray(np.stack([np.asarray(x, dtype) for x in rows]))
    return jnp.stack([_array(x, dtype) for x in rows])
