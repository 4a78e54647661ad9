"""Prologue, layer and epilogue of a split loss, called by a layerwise step."""

import dataclasses
import weakref
from collections.abc import Mapping, MutableMapping, Sequence

import jax
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import shape_dtype
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.split_loss import Loss, SplitLoss
from paged_optax.splitting.stacking import Stacking, leaf_shapes, nested


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Reference:
    """Weak, because JAX's caches keep the structures of arguments."""

    pieces: weakref.ref[Pieces]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitFunctions:
    """Prologue, layer and epilogue of a loss, for batches of any shapes and dtypes."""

    loss: Loss
    batch: PyTree[jax.ShapeDtypeStruct]  # types of the first batch
    split: SplitLoss  # for the first batch. All other batches have its stacks
    # Split losses by jaxpr. JAX caches jaxprs by everything that a trace depends on:
    # weak types, the ambient mesh, the matmul precision.
    cache: MutableMapping[core.ClosedJaxpr, SplitLoss]

    @classmethod
    def create(cls, loss: Loss, batch: PyTree) -> "SplitFunctions":
        """Splits a loss for a first batch, which determines the layers."""
        batch = jax.tree.map(shape_dtype, batch)
        jaxpr, split = loss.traced(batch).jaxpr, loss.split(batch)
        cache = weakref.WeakKeyDictionary({jaxpr: split})
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
        types = self.loss.frozen if frozen else self.loss.params
        # In the trace the frozen parameters follow the others.
        first = len(jax.tree.leaves(self.loss.params)) if frozen else 0
        layers = self.split.layers
        stacks = {x: y for (part, x), y in layers.stacks.items() if part == frozen}
        axes = {
            x.leaves[0] - first: x.axis for x in stacks.values() if x.axis is not None
        }
        numbers = {
            names: LayerNumbers(n - first for n in x.leaves)
            if x.axis is None
            else x.leaves[0] - first
            for names, x in stacks.items()
        }
        rest = {
            names: n - first
            for n, (part, names) in enumerate(self.loss.leaves)
            if part == frozen and n not in layers.leaves
        }
        members = {"layers": nested(numbers), "rest": nested(rest)}
        moved = frozenset(n for n, axis in axes.items() if axis)
        tree = LayerTree(jax.tree.structure(types), members, moved)
        return Stacking("frozen" if frozen else "params", types, tree, axes)

    def prologue(self, rest: PyTree, *remaining: PyTree) -> tuple[list[Array], PyTree]:
        """Computes the first layer's input, and the values that all layers read."""
        pieces = self._of(remaining[-1]).pieces
        x, context = pieces.prologue(self._numbered(rest, remaining))
        # A layer has no batch as an argument to choose its pieces by.
        return x, (_Reference(weakref.ref(pieces)), context)

    def layer(
        self, weights: PyTree, *remaining: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """Computes the next layer's input, and the values kept for the epilogue."""
        *frozen, x, (reference, context), i = remaining
        pieces = reference.pieces()
        assert pieces is not None
        return pieces.layer((weights, *frozen), x, context, i)

    def epilogue(self, rest: PyTree, *remaining: PyTree) -> PyTree:
        """Computes the result of the loss."""
        *frozen, x, kept, batch = remaining
        numbers = self._numbered(rest, (*frozen, batch))
        split = self._of(batch)
        return split.output.unflatten(split.pieces.epilogue(numbers, x, kept))

    def _of(self, batch: PyTree) -> SplitLoss:
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
            name = differ[0]
            if name not in old:
                how = f"with batch{name}, which split_layers did not get."
            elif name not in new:
                how = (
                    f"without batch{name}, which split_layers got. State has the same"
                    " place in each batch, and the loss returns all of it."
                )
            else:
                how = (
                    f"with batch{name} of shape {new[name]}, and split_layers got"
                    f" {old[name]}. Only with accumulate=True a step reads"
                    " micro-batches from the leading axis of each leaf."
                )
            raise ValueError(f"loss fails {how}") from error
        if jaxpr not in self.cache:
            self.cache[jaxpr] = self.loss.split(batch, self.split.layers)
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
            stacked = self.stacking(frozen=is_frozen).tree
            places = (first + n for n in jax.tree.leaves(stacked.members["rest"]))
            numbers.update(zip(places, jax.tree.leaves(tree["rest"]), strict=True))
            first += stacked.structure.num_leaves
        numbers.update(enumerate(jax.tree.leaves(batch), first))
        return numbers
