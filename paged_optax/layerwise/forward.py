"""The model's three functions: their forward pass, and their gradients."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.memory import HOST
from paged_optax.backend.text import dtype_and_shape
from paged_optax.layerwise.loss import WeightedLoss, loss_and_metrics, over
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.residuals import Learned, Saved
from paged_optax.layerwise.slices import (
    LayerIndex,
    over_layers,
    write_slice,
    written_back,
)
from paged_optax.layerwise.weights import (
    Dependency,
    Prefetched,
    Weights,
    fetch_after,
    on_device,
)

#: The parameters without the layers', by name.
Rest = Mapping[Hashable, PyTree]

#: Replaces a tree's chosen leaves.
Merge = Callable[[Sequence[Array]], PyTree]


#: `run(i, slices, x)` returns layer i's output, its kept outputs, and its residuals.
RunLayer = Callable[
    [LayerIndex, list[Array], PyTree], tuple[PyTree, PyTree, list[Array]]
]


class Activations(NamedTuple):
    """Activations of a forward pass over the layers.

    Attributes:
      x: The next layer's input; finally the last layer's output.
      inputs: The inputs of all layers, stacked, for the backward pass.
      kept: The layers' kept outputs for the epilogue, stacked.
      residuals: The layers' residuals, stacked; empty if they are computed again.
    """

    x: PyTree[Array]
    inputs: PyTree[Array]
    kept: PyTree[Array]
    residuals: list[Array]

    def after(self, i: LayerIndex, slices: list[Array], run: RunLayer) -> "Activations":
        """Runs layer i."""
        store = lambda to, x: write_slice(to, x[None], i)
        inputs = jax.tree.map(store, self.inputs, self.x)
        x, *new = run(i, slices, self.x)
        return Activations(
            x, inputs, *jax.tree.map(store, [self.kept, self.residuals], new)
        )


# The activations, the stacks, and the prefetched slices of the next layer.
_ForwardCarry = tuple[Activations, list[Array], Prefetched]


#: The results of a forward pass: the activations, the context, and the stacks.
Forward = tuple[Activations, PyTree, list[Array]]


class ForwardStart(NamedTuple):
    """The prologue's results, and what the last traced layer saves."""

    activations: Activations
    context: PyTree
    run: RunLayer
    saved: list[Saved]

    def results(self, activations: Activations, stacks: list[Array]) -> Forward:
        """Returns the results of a forward pass that ran all layers."""
        x, residuals = activations.inputs, activations.residuals
        for saved in self.saved:
            x = dataclasses.replace(saved, x=x, residuals=residuals)
        return activations._replace(inputs=x), self.context, stacks


class EpilogueGradients(NamedTuple):
    """The loss of one micro-batch, its metrics, and its gradients.

    Attributes:
      by_rest: The gradients of the parameters outside the layers.
      by_output: The gradients by the last layer's floating-point output.
      by_kept: The gradients by the floating-point kept outputs.
    """

    loss: Float[Array, ""] | WeightedLoss
    metrics: PyTree
    by_rest: Rest
    by_output: list[Array]
    by_kept: list[Array]


class PrologueGradients(NamedTuple):
    """The gradients by the learned leaves of the prologue's output.

    Attributes:
      x: The gradients by the first layer's input. During the backward pass they are
        the gradients by a later layer's input.
      context: The gradients by the context.
    """

    x: list[Array]
    context: list[Array]


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """The model's three functions.

    Attributes:
      activations_on_host: If true, the layers' inputs are in host memory.
      frozen: The frozen parameters. If None, the functions do not take any.
      saves: The leaves whose gradients the forward pass saves residuals for; None saves
        the layers' inputs alone.
    """

    prologue: Callable[..., PyTree]
    layer: Callable[..., PyTree]
    epilogue: Callable[..., PyTree]
    activations_on_host: bool
    frozen: Partition | None = None
    saves: Learned | None = None

    def _all(self, rest: Rest) -> tuple[Rest, ...]:
        """The prologue's and epilogue's parameters, on the device."""
        every = (rest,) if self.frozen is None else (rest, self.frozen.rest)
        return jax.tree.map(on_device, every)

    def fetch_rest(
        self, rest: Rest, dependency: Dependency
    ) -> tuple["ModelFunctions", Rest, Dependency]:
        """Fetches parameters outside the layers after `dependency` is computed."""
        if self.frozen is None:
            return self, *fetch_after(rest, dependency)
        both = rest, self.frozen.rest
        (rest, fixed), dependency = fetch_after(both, dependency)
        frozen = dataclasses.replace(self.frozen, rest=fixed)
        return dataclasses.replace(self, frozen=frozen), rest, dependency

    def run_prologue(self, rest: Rest, batch: PyTree) -> tuple[PyTree[Array], PyTree]:
        """Returns the first layer's input, and the context."""
        x, context = self.prologue(*self._all(rest), batch)
        return jax.tree.map(jnp.asarray, x), context

    def run_layer(
        self,
        weights: PyTree[Array],
        frozen: PyTree[Array],
        x: PyTree,
        context: PyTree,
        i: LayerIndex,
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Returns one layer's output, and its kept outputs."""
        every = (weights,) if self.frozen is None else (weights, frozen)
        output, kept = self.layer(*every, x, context, i)
        return jax.tree.map(jnp.asarray, (output, kept))

    def run_epilogue(
        self, rest: Rest, x: PyTree[Array], kept: PyTree[Array], batch: PyTree
    ) -> PyTree:
        """Returns the loss, or the loss and metrics."""
        return self.epilogue(*self._all(rest), x, kept, batch)

    def start(
        self,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        item: Callable[..., PyTree],
    ) -> ForwardStart:
        """Runs the prologue; `item` calls a function for each micro-batch."""
        rest = jax.tree.map(on_device, rest)  # once for all micro-batches
        x, context = item(lambda b: self.run_prologue(rest, b), batch)
        saved = list[Saved]()

        def layer(
            i: LayerIndex, slices: list[Array], x: PyTree, context: PyTree
        ) -> tuple[PyTree, PyTree, list[Array]]:
            if self.saves is None:
                return *self.run_layer(*weights.of(slices), x, context, i), []
            both, index = weights.of(slices), jnp.asarray(i)
            pull, results = self.linearized(*both, x, context, self.saves, index)
            saved[:] = [Saved.of(pull, x, (*both, x, context, index))]
            return *results, saved[0].residuals

        run = lambda i, slices, x: item(lambda x, c: layer(i, slices, x, c), x, context)
        output, kept, residuals = jax.eval_shape(
            lambda stacks, x: run(jnp.int32(0), weights.slices(stacks, 0), x),
            weights.stacks,
            x,
        )
        check_same_input(x, output)
        # Empty: each layer writes its slice before anything reads it.
        empty = lambda x: lax.empty((weights.length, *x.shape), x.dtype)
        inputs = jax.tree.map(empty, x)
        if self.activations_on_host:
            inputs = jax.device_put(inputs, HOST)
        kept, residuals = jax.tree.map(empty, (kept, residuals))
        activations = Activations(x, inputs, kept, residuals)
        return ForwardStart(activations, context, run, saved)

    def forward(self, weights: Weights, start: ForwardStart) -> Forward:
        """Runs the layers."""

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: _ForwardCarry
        ) -> _ForwardCarry:
            activations, stacks, prefetched = carry
            slices = weights.slices(stacks, i, prefetched, vectors)
            count = len(stacks)
            stacks, slices[:count] = written_back(stacks, slices[:count], i)
            prefetched = weights.prefetch(stacks, next_item)
            activations = activations.after(i, slices, start.run)
            return activations, stacks, prefetched

        vectors = weights.vectors(weights.stacks)
        prefetched = weights.prefetch(weights.stacks, 0)
        activations, stacks, _ = over_layers(
            weights.length,
            body,
            (start.activations, weights.stacks, prefetched),
            prefetches=weights.prefetches,
        )
        return start.results(activations, stacks)

    def pull_epilogue(
        self,
        rest: Rest,
        x: PyTree[Array],
        kept: PyTree[Array],
        batch: PyTree,
        dtype: DTypeLike,
        before: Float[Array, ""] | None = None,
        last: Bool[Array, ""] | bool = True,
    ) -> EpilogueGradients:
        """Computes the loss of one micro-batch, its metrics, and its gradients.

        The loss's weight has dtype `dtype`. The gradients are divided by the weight of
        this and the preceding micro-batches, `before`, or by nothing if that is None.
        """
        inputs, merge_x = _inexact(x)
        floats, merge_kept = _inexact(kept)

        def loss(
            rest: Rest, inputs: list[Array], floats: list[Array]
        ) -> tuple[ArrayLike, tuple[WeightedLoss | None, PyTree]]:
            output = self.run_epilogue(rest, merge_x(inputs), merge_kept(floats), batch)
            value, metrics = loss_and_metrics(output)
            if not isinstance(value, WeightedLoss):
                return value, (None, metrics)
            total, weight = map(jnp.asarray, value)
            weight = lax.stop_gradient(weight).astype(dtype)  # it is data
            value = total if before is None else over(total, before + weight, last)
            return value, (WeightedLoss(total, weight), metrics)

        (value, (weighted, metrics)), grads = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True
        )(rest, inputs, floats)
        value = value if weighted is None else weighted
        return EpilogueGradients(value, metrics, *grads)

    def linearized(
        self,
        weights: PyTree[Array],
        frozen: PyTree[Array],
        x: PyTree[Array],
        context: PyTree,
        learned: Learned,
        i: LayerIndex,
    ) -> tuple[Callable[..., Any], tuple[PyTree[Array], PyTree[Array]]]:
        """Returns a layer's backward pass, and its outputs."""
        inputs, merge_x = select(x, learned.x)
        seen, merge_context = select(context, learned.context)

        def run(
            weights: PyTree[Array], inputs: list[Array], seen: list[Array]
        ) -> tuple[tuple[list[Array], list[Array]], tuple[PyTree, PyTree]]:
            args = weights, frozen, merge_x(inputs), merge_context(seen)
            x, new = self.run_layer(*args, i)
            return (select(x, learned.x)[0], _inexact(new)[0]), (x, new)

        _, pull, outputs = jax.vjp(run, weights, inputs, seen, has_aux=True)
        return pull, outputs

    def pull_prologue(
        self, rest: Rest, batch: PyTree, learned: Learned, grads: PrologueGradients
    ) -> Rest:
        """The prologue's gradients by `rest`."""

        def run(rest: Rest) -> PrologueGradients:
            x, context = self.run_prologue(rest, batch)
            subset = select(x, learned.x)[0], select(context, learned.context)[0]
            return PrologueGradients(*subset)

        return jax.vjp(run, rest)[1](grads)[0]


def is_inexact(x: object) -> bool:
    """True if a leaf is an array that can have a gradient."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _inexact(tree: PyTree) -> tuple[list[Array], Merge]:
    """Selects the floating-point leaves of a tree."""
    return select(tree, [is_inexact(x) for x in jax.tree.leaves(tree)])


def select(tree: PyTree, subset: Sequence[bool]) -> tuple[list[Array], Merge]:
    """Returns the chosen leaves of a tree, and a function that replaces them."""
    leaves, structure = jax.tree.flatten(tree)

    def merge(values: Sequence[Array]) -> PyTree:
        new = iter(values)
        return jax.tree.unflatten(
            structure,
            [next(new) if flag else x for x, flag in zip(leaves, subset, strict=True)],
        )

    return [x for x, flag in zip(leaves, subset, strict=True) if flag], merge


def check_same_input(
    x: PyTree[Array], output: PyTree[Array] | PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Raises if a layer's output cannot be the next layer's input."""
    describe = lambda tree: jax.tree.map(dtype_and_shape, tree)
    if describe(x) != describe(output):
        raise ValueError(
            f"layer turns {describe(x)} into {describe(output)}: a layer's output is"
            " the next one's input, so that both must be alike; cast in the layer, or"
            " in the prologue."
        )
