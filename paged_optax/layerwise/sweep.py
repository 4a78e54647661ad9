"""The passes over the layers, for one micro-batch or for all of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.memory import HOST
from paged_optax.backend.platforms import on_platforms
from paged_optax.layerwise.dependencies import Learned, Saved, learned, used
from paged_optax.layerwise.forward import (
    EpilogueGradients,
    ModelFunctions,
    Rest,
    check_same_input,
    give_up_rest,
    is_inexact,
    pull_epilogue,
    pull_epilogues,
    select,
    select_inexact,
)
from paged_optax.layerwise.slices import (
    Carry,
    LayerIndex,
    Prefetched,
    Weights,
    bind_prefetched,
    fetch_after,
    on_device,
    over_layers,
    read_slice,
    write_slice,
    written_back,
)

#: `visit(carry, i, slices, gradients)` receives one layer's gradients. It returns the
#: next carry, and the layer's parameters, updated or as they were.
Visit = Callable[
    [Carry, LayerIndex, list[Array], PyTree[Array]], tuple[Carry, list[Array]]
]

#: `run(i, slices, x)` returns layer i's output, its kept outputs, and its residuals.
RunLayer = Callable[
    [LayerIndex, list[Array], PyTree], tuple[PyTree, PyTree, Saved | None]
]


class Activations(NamedTuple):
    """Activations of a forward pass over the layers.

    Attributes:
      x: The next layer's input; finally the last layer's output.
      inputs: The inputs of all layers, stacked, for the backward pass.
      kept: The layers' kept outputs for the epilogue, stacked.
      residuals: The layers' residuals, stacked; empty if they are not saved.
    """

    x: PyTree[Array]
    inputs: PyTree[Array]
    kept: PyTree[Array]
    residuals: list[Array]

    def after(self, i: LayerIndex, slices: list[Array], run: RunLayer) -> "Activations":
        """Runs layer i."""
        store = lambda to, x: write_slice(to, x[None], i)
        inputs = jax.tree.map(store, self.inputs, self.x)
        x, kept, saved = run(i, slices, self.x)
        new = kept, jax.tree.leaves(saved)
        kept, residuals = jax.tree.map(store, (self.kept, self.residuals), new)
        return Activations(x, inputs, kept, residuals)


class Cotangents(NamedTuple):
    """The cotangents of the learned leaves of a layer's input, and of the context.

    After the backward pass they are those of the prologue's output.
    """

    x: list[Array]
    context: list[Array]


# Loop carries. Both end with the stacks and the prefetched slices of the next layer.
_ForwardCarry = tuple[Activations, list[Array], Prefetched]
_BackwardCarry = tuple[Carry, Cotangents, list[Array], Prefetched]


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The layers after the prologue.

    Attributes:
      batch: The micro-batch, or all micro-batches.
      several: If true, `batch` stacks several micro-batches.
      x: The first layer's input.
    """

    model: ModelFunctions
    weights: Weights
    rest: Rest
    batch: PyTree
    several: bool
    x: PyTree[Array]
    context: PyTree

    @classmethod
    def after_prologue(
        cls,
        model: ModelFunctions,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        several: bool = False,
    ) -> "ForwardPass":
        """Runs the prologue."""
        loaded = jax.tree.map(on_device, rest)  # once for all micro-batches
        run = functools.partial(model.run_prologue, loaded)
        x, context = _for_each(several, run, batch)
        return cls(model, weights, rest, batch, several, x, context)

    @property
    def one(self) -> PyTree:
        """One micro-batch."""
        return jax.tree.map(lambda x: x[0], self.batch) if self.several else self.batch

    @functools.cached_property
    def learned(self) -> Learned:
        """The leaves of `x` and `context` that have gradients."""
        return learned(self.model, self.weights, self.rest, self.one)

    def layer(
        self, i: LayerIndex, slices: Sequence[Array], x: PyTree
    ) -> tuple[PyTree, PyTree, Saved | None]:
        """Returns layer i's output, its kept outputs, and its residuals."""

        def one(x: PyTree, context: PyTree) -> tuple[PyTree, PyTree, Saved | None]:
            both = self.weights.of(slices)
            if not self.model.saves:
                return *self.model.run_layer(*both, x, context, i), None
            index = jnp.asarray(i)
            pull, results = self.layer_vjp(both, x, context, index)
            return *results, Saved.of(pull, (both, x, context, index))

        return _for_each(self.several, one, x, self.context)

    def layer_vjp(
        self,
        both: tuple[PyTree[Array], PyTree[Array]],
        x: PyTree[Array],
        context: PyTree,
        i: LayerIndex,
    ) -> tuple[Callable[..., Any], tuple[PyTree[Array], PyTree[Array]]]:
        """Returns a layer's backward pass, and its outputs."""
        (weights, frozen), learned = both, self.learned
        inputs, merge_x = select(x, learned.x)
        seen, merge_context = select(context, learned.context)

        def run(
            weights: PyTree[Array], inputs: list[Array], seen: list[Array]
        ) -> tuple[tuple[list[Array], list[Array]], tuple[PyTree, PyTree]]:
            args = weights, frozen, merge_x(inputs), merge_context(seen)
            x, new = self.model.run_layer(*args, i)
            return (select(x, learned.x)[0], select_inexact(new)[0]), (x, new)

        _, pull, outputs = jax.vjp(run, weights, inputs, seen, has_aux=True)
        return pull, outputs

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree, Saved | None]:
        """The shapes of a layer's results."""
        run = lambda i, stacks, x: self.layer(i, self.weights.slices(stacks, 0), x)
        return jax.eval_shape(run, jnp.int32(0), self.weights.stacks, self.x)

    def start(self) -> Activations:
        """The activations before the first layer."""
        output, kept, saved = self.shapes
        check_same_input(self.x, output)
        # Empty: each layer writes its slice before anything reads it.
        empty = lambda x: lax.empty((self.weights.length, *x.shape), x.dtype)
        inputs = jax.tree.map(empty, self.x)
        if self.model.activations_on_host:
            inputs = jax.device_put(inputs, HOST)
        kept, residuals = jax.tree.map(empty, (kept, jax.tree.leaves(saved)))
        return Activations(self.x, inputs, kept, residuals)

    def run(self) -> tuple[Activations, list[Array]]:
        """Runs the layers; returns the activations and the stacks."""
        weights = self.weights

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: _ForwardCarry
        ) -> _ForwardCarry:
            activations, stacks, prefetched = carry
            slices = weights.slices(stacks, i, prefetched, vectors)
            count = len(stacks)
            stacks, slices[:count] = written_back(stacks, slices[:count], i)
            prefetched = weights.prefetch(stacks, next_item)
            return activations.after(i, slices, self.layer), stacks, prefetched

        start, vectors = self.start(), weights.vectors(weights.stacks)
        prefetched = weights.prefetch(weights.stacks, 0)
        activations, stacks, _ = over_layers(
            weights.length,
            body,
            (start, weights.stacks, prefetched),
            prefetches=weights.prefetches,
        )
        return activations, stacks


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The layers after their forward pass and the epilogue.

    Attributes:
      dtypes: The dtypes of the layers' gradients.
      stacks: The layers' parameters after the forward pass.
      inputs: The inputs and residuals of all layers, stacked.
    """

    forward: ForwardPass
    dtypes: Sequence[np.dtype]
    stacks: list[Array]
    inputs: tuple[PyTree[Array], list[Array]]
    epilogue: EpilogueGradients

    @classmethod
    def after_epilogue(
        cls,
        forward: ForwardPass,
        activations: Activations,
        stacks: list[Array],
        dtypes: Sequence[np.dtype],
        before: Float[Array, ""],
        last: Bool[Array, ""] | bool = True,
    ) -> "BackwardPass":
        """Runs the epilogue; see `pull_epilogue` for `before` and `last`."""
        rest, kept, batch = forward.rest, activations.kept, forward.batch
        follows = forward.learned
        model, loaded, x = forward.model.fetch_rest(rest, activations.x)
        pull = functools.partial(pull_epilogue, model, loaded, before.dtype)
        if forward.several:
            epilogue = pull_epilogues(pull, loaded, x, kept, batch)
        else:
            epilogue = pull(x, kept, batch, before, last)
        pairs = zip(follows.x, jax.tree.leaves(x), strict=True)
        subset = [flag for flag, leaf in pairs if is_inexact(leaf)]
        epilogue = epilogue._replace(by_output=select(epilogue.by_output, subset)[0])
        if loaded is not rest:
            if forward.several:
                x = jax.tree.map(lambda x: x[0], x)
                kept = jax.tree.map(lambda x: x[:, 0], kept)
            reads = used(model.run_epilogue, loaded, x, kept, forward.one)
            epilogue, stacks = give_up_rest(epilogue, stacks, rest, reads)
        inputs = activations.inputs, activations.residuals
        return cls(forward, dtypes, stacks, inputs, epilogue)

    def run(
        self, visit: Visit[Carry], start: Carry
    ) -> tuple[Carry, list[Array], Cotangents]:
        """Calls `visit(carry, i, slices, gradients)` for each layer, the last first."""
        weights = self.forward.weights

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: _BackwardCarry[Carry]
        ) -> _BackwardCarry[Carry]:
            inner, cts, stacks, prefetched = carry
            slices = weights.slices(stacks, i, prefetched, vectors)
            prefetched = weights.prefetch(stacks, next_item)
            gradients, cts = self.pull(slices, *self.read(i), cts, i)
            slices = slices[: len(stacks)]
            # XLA:CPU would fuse the products into the update, and copy the stacks.
            values = gradients, slices, cts
            values = on_platforms("cpu", lax.optimization_barrier, values)
            gradients, slices, cts = values
            gradients, cts, prefetched = bind_prefetched(gradients, cts, prefetched)
            inner, new = visit(inner, i, slices, gradients)
            if all(a is b for a, b in zip(new, slices, strict=True)):
                stacks, _ = written_back(stacks, slices, i)
            else:
                stacks = weights.write(stacks, slices, new, i)
            if weights.prefetches:
                # An iteration has two layers. The second one's moments wait for the
                # first one's.
                inner, cts = lax.optimization_barrier((inner, cts))
            return inner, cts, stacks, prefetched

        vectors = weights.vectors(self.stacks)
        prefetched = weights.prefetch(self.stacks, weights.length - 1)
        cts = self.first_gradients(self.epilogue.by_output)
        carry, cts, stacks, _ = over_layers(
            weights.length,
            body,
            (start, cts, self.stacks, prefetched),
            backward=True,
            prefetches=weights.prefetches,
        )
        return carry, stacks, cts

    def first_gradients(self, by_output: list[Array]) -> Cotangents:
        """The gradients before the last layer's: zeros for the context."""
        context, _ = select(self.forward.context, self.forward.learned.context)
        return Cotangents(by_output, list(map(jnp.zeros_like, context)))

    def read(self, i: LayerIndex) -> tuple[PyTree[Array], list[Array]]:
        """Reads layer i's input, residuals, and the cotangents of its kept outputs."""
        every = self.inputs, self.epilogue.by_kept
        return jax.tree.map(lambda stack: read_slice(stack, i)[0], every)

    def pull(
        self,
        slices: Sequence[Array],
        inputs: tuple[PyTree[Array], list[Array]],
        dkept: list[Array],
        cts: Cotangents,
        i: LayerIndex,
    ) -> tuple[PyTree[Array], Cotangents]:
        """Computes the gradients of layer i, by its parameters and by its input."""
        forward, both = self.forward, self.forward.weights.of(slices)

        def in_workspace_dtype(gradients: PyTree[Array]) -> PyTree[Array]:
            leaves, structure = jax.tree.flatten(gradients)
            pairs = zip(leaves, self.dtypes, strict=True)
            return structure.unflatten([x.astype(dtype) for x, dtype in pairs])

        def one(
            inputs: tuple[PyTree, list[Array]],
            context: PyTree,
            dx: list[Array],
            dkept: list[Array],
        ) -> tuple[PyTree[Array], Cotangents]:
            x, residuals = inputs
            saved = forward.shapes[2] if forward.model.saves else None
            if saved is None:
                pull, _ = forward.layer_vjp(both, x, context, i)
            else:
                pull = saved.pull(residuals, (both, x, context, jnp.asarray(i)))
            gradients, dx, dcontext = pull((dx, dkept))
            return in_workspace_dtype(gradients), Cotangents(dx, dcontext)

        args = inputs, forward.context, cts.x, dkept
        if forward.several:
            zeros = jax.tree.map(jnp.zeros_like, in_workspace_dtype(both[0]))
            gradients, new = _sum(one, zeros, args)
        else:
            gradients, new = one(*args)
        dcontext = jax.tree.map(jnp.add, cts.context, new.context)
        return gradients, new._replace(context=dcontext)

    def rest_gradients(self, cts: Cotangents) -> Rest:
        """Adds the prologue's gradients to the epilogue's, for the other parameters.

        They have the parameters' dtypes, unless the workspace's dtype is wider.
        """
        forward = self.forward
        by_rest, cts = fetch_after(self.epilogue.by_rest, cts)
        model, rest, cts = forward.model.fetch_rest(forward.rest, cts)

        def pull(batch: PyTree, cts: Cotangents) -> tuple[Rest, None]:
            def run(rest: Rest) -> Cotangents:
                results = model.run_prologue(rest, batch)
                pairs = zip(results, forward.learned, strict=True)
                return Cotangents(*[select(x, flags)[0] for x, flags in pairs])

            return jax.vjp(run, rest)[1](cts)[0], None

        if not forward.several:
            return jax.tree.map(jnp.add, by_rest, pull(forward.batch, cts)[0])
        total, _ = _sum(pull, by_rest, (forward.batch, cts))
        if self.dtypes != [x.dtype for x in forward.weights.stacks]:
            return total
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, rest)


def _for_each(several: bool, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Calls a function for the only micro-batch, or for each of several."""
    return lax.map(lambda xs: function(*xs), args) if several else function(*args)


def _sum(
    function: Callable[..., tuple[PyTree, PyTree]], start: PyTree, args: PyTree
) -> tuple[PyTree, PyTree]:
    """Adds up a function's first results over micro-batches, and stacks the others."""

    def one(total: PyTree, args: PyTree) -> tuple[PyTree, PyTree]:
        new, others = function(*args)
        return jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, new), others

    return lax.scan(one, start, args)
