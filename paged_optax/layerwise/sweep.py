"""The backward pass over the layers, for one micro-batch or for all of them."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.platforms import on_platforms
from paged_optax.layerwise.clipping import sum_dtype
from paged_optax.layerwise.dependencies import learned, used
from paged_optax.layerwise.forward import (
    EpilogueGradients,
    Forward,
    ModelFunctions,
    PrologueGradients,
    Rest,
    is_inexact,
    select,
)
from paged_optax.layerwise.loss import WeightedLoss, over
from paged_optax.layerwise.residuals import Learned, Saved
from paged_optax.layerwise.slices import (
    Carry,
    LayerIndex,
    over_layers,
    read_slice,
    written_back,
)
from paged_optax.layerwise.weights import (
    Prefetched,
    Weights,
    fetch_after,
    host_like,
)

#: `visit(carry, i, slices, gradients)` receives one layer's gradients. It returns the
#: next carry, and the layer's parameters, updated or as they were.
Visit = Callable[
    [Carry, LayerIndex, list[Array], PyTree[Array]], tuple[Carry, list[Array]]
]

# The visitor's carry, the gradients by the layer's input and the context, the stacks,
# and the prefetched slices of the next layer.
_PassCarry = tuple[Carry, PrologueGradients, list[Array], Prefetched]


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The layers after their forward pass, ready for the backward pass.

    Attributes:
      weights: The layers' parameters before the forward pass.
      batch: The micro-batch, or all micro-batches.
      several: If true, `batch` stacks several micro-batches.
      dtypes: The dtypes of the layers' gradients.
      stacks: The layers' parameters after the forward pass.
      inputs: The inputs of all layers, stacked.
      learned: The leaves of `inputs` and `context` that have gradients.
    """

    model: ModelFunctions
    weights: Weights
    rest: Rest
    batch: PyTree
    several: bool
    dtypes: Sequence[np.dtype]
    stacks: list[Array]
    inputs: PyTree[Array]
    context: PyTree
    learned: Learned
    epilogue: EpilogueGradients

    @classmethod
    def after_forward(
        cls,
        model: ModelFunctions,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        dtypes: Sequence[np.dtype],
        before: Float[Array, ""],
        *,
        several: bool = False,
        last: Bool[Array, ""] | bool = True,
        forward: Forward | None = None,
    ) -> "BackwardPass":
        """Runs the forward pass and the epilogue.

        `before` is the weight of the micro-batches before, see `pull_epilogue`.
        """
        if forward is None:
            apply = _for_each if several else for_one
            forward = model.forward(weights, model.start(weights, rest, batch, apply))
        activations, context, stacks = forward
        one = jax.tree.map(lambda x: x[0], batch) if several else batch
        follows = model.saves or learned(model, weights, rest, one)
        model_then, loaded, x = model.fetch_rest(rest, activations.x)
        args = loaded, x, activations.kept, batch, before.dtype
        if several:
            epilogue = _all_epilogues(model_then, *args)
        else:
            epilogue = model_then.pull_epilogue(*args, before, last)
        subset = [
            flag
            for flag, leaf in zip(follows.x, jax.tree.leaves(x), strict=True)
            if is_inexact(leaf)
        ]
        by_output, _ = select(epilogue.by_output, subset)
        epilogue = epilogue._replace(by_output=by_output)
        if loaded is not rest:
            kept = activations.kept
            if several:
                x = jax.tree.map(lambda x: x[0], x)
                kept = jax.tree.map(lambda x: x[:, 0], kept)
            reads = used(model_then.run_epilogue, loaded, x, kept, one)
            epilogue, stacks = _give_up_rest(epilogue, stacks, rest, reads)
        return cls(
            *(model, weights, rest, batch, several, dtypes, stacks),
            *(activations.inputs, context, follows, epilogue),
        )

    def run(
        self, visit: Visit[Carry], start: Carry
    ) -> tuple[Carry, list[Array], PrologueGradients]:
        """Calls `visit(carry, i, slices, gradients)` for each layer, the last first."""
        weights = self.weights

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: _PassCarry[Carry]
        ) -> _PassCarry[Carry]:
            inner, cts, stacks, prefetched = carry
            slices = weights.slices(stacks, i, prefetched, vectors)
            prefetched = weights.prefetch(stacks, next_item)
            x, dkept = self.read(i)
            gradients, cts = self.pull(slices, x, cts, dkept, i)
            slices = slices[: len(stacks)]
            # XLA:CPU would fuse the products into the update, and copy the stacks.
            values = gradients, slices, cts
            gradients, slices, cts = on_platforms(
                "cpu", lax.optimization_barrier, values
            )
            gradients, cts, prefetched = _with_prefetched(gradients, cts, prefetched)
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

    def first_gradients(self, by_output: list[Array]) -> PrologueGradients:
        """The gradients before the last layer's: zeros for the context."""
        context, _ = select(self.context, self.learned.context)
        return PrologueGradients(by_output, list(map(jnp.zeros_like, context)))

    def read(self, i: LayerIndex) -> tuple[PyTree[Array], list[Array]]:
        """Reads layer i's input, and the gradients by its kept outputs."""
        cut = lambda stack: read_slice(stack, i)[0]
        by_kept = self.epilogue.by_kept
        return jax.tree.map(cut, self.inputs), jax.tree.map(cut, by_kept)

    def pull(
        self,
        slices: Sequence[Array],
        x: PyTree[Array],
        cts: PrologueGradients,
        dkept: list[Array],
        i: LayerIndex,
    ) -> tuple[PyTree[Array], PrologueGradients]:
        """Computes the gradients of layer i, by its parameters and by its input."""
        weights, frozen = self.weights.of(slices)
        dx, dcontext = cts

        def pull(
            x: PyTree, context: PyTree, dx: list[Array], dkept: list[Array]
        ) -> tuple[PyTree[Array], list[Array], list[Array]]:
            args = weights, frozen
            if isinstance(x, Saved):
                backward = x.pull((*args, x.x, context, jnp.asarray(i)))
            else:
                learned = self.learned
                backward, _ = self.model.linearized(*args, x, context, learned, i)
            return backward((dx, dkept))

        add = lambda new: jax.tree.map(jnp.add, dcontext, new)
        narrow = lambda g: jax.tree.unflatten(
            self.weights.structure,
            [
                x.astype(dtype)
                for x, dtype in zip(jax.tree.leaves(g), self.dtypes, strict=True)
            ],
        )
        if not self.several:
            gradients, dx, new = pull(x, self.context, dx, dkept)
            return narrow(gradients), PrologueGradients(dx, add(new))

        def one(
            total: PyTree[Array],
            args: tuple[PyTree, PyTree, list[Array], list[Array]],
        ) -> tuple[PyTree[Array], PrologueGradients]:
            gradients, dx, new = pull(*args)
            total = jax.tree.map(jnp.add, total, narrow(gradients))
            return total, PrologueGradients(dx, new)

        zeros = jax.tree.map(jnp.zeros_like, narrow(weights))
        gradients, (dx, new) = lax.scan(one, zeros, (x, self.context, dx, dkept))
        return gradients, PrologueGradients(dx, add(new))

    def rest_gradients(self, cts: PrologueGradients) -> Rest:
        """Adds the prologue's gradients to the epilogue's, for the other parameters.

        They have the parameters' dtypes, unless the workspace's dtype is wider.
        """
        by_rest, cts = fetch_after(self.epilogue.by_rest, cts)
        model, rest, cts = self.model.fetch_rest(self.rest, cts)
        pull = lambda batch, cts: model.pull_prologue(rest, batch, self.learned, cts)
        if not self.several:
            return jax.tree.map(jnp.add, by_rest, pull(self.batch, cts))

        def one(
            total: Rest, args: tuple[PyTree, PrologueGradients]
        ) -> tuple[Rest, None]:
            add = lambda s, g: s + g.astype(s.dtype)
            return jax.tree.map(add, total, pull(*args)), None

        total = lax.scan(one, by_rest, (self.batch, cts))[0]
        if self.dtypes != [x.dtype for x in self.weights.stacks]:
            return total
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, rest)


def for_one(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Calls a function for the only micro-batch."""
    return function(*args)


def _for_each(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    return lax.map(lambda xs: function(*xs), args)


def _all_epilogues(
    model: ModelFunctions,
    rest: Rest,
    x: PyTree[Array],
    kept: PyTree[Array],
    batch: PyTree,
    dtype: DTypeLike,
) -> EpilogueGradients:
    """The losses of all micro-batches, and the gradients of their mean."""
    count = len(jax.tree.leaves(batch)[0])

    def epilogue(
        total: Rest, args: tuple[PyTree, PyTree, PyTree]
    ) -> tuple[Rest, EpilogueGradients]:
        one = model.pull_epilogue(rest, *args, dtype)
        divisor = 1 if isinstance(one.loss, WeightedLoss) else count
        mean = lambda tree: jax.tree.map(lambda g: g / divisor, tree)
        total = jax.tree.map(
            lambda s, g: s + g.astype(s.dtype) / divisor, total, one.by_rest
        )
        by = mean(one.by_output), mean(one.by_kept)
        return total, EpilogueGradients(one.loss, one.metrics, {}, *by)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), rest)
    swapped = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
    total, every = lax.scan(epilogue, zeros, (x, swapped(kept), batch))
    every = every._replace(by_rest=total, by_kept=swapped(every.by_kept))
    if not isinstance(every.loss, WeightedLoss):
        return every
    weight = jnp.sum(every.loss.weight)
    mean = lambda tree: jax.tree.map(lambda g: over(g, weight).astype(g.dtype), tree)
    return every._replace(
        by_rest=mean(every.by_rest),
        by_output=mean(every.by_output),
        by_kept=mean(every.by_kept),
    )


def _give_up_rest(
    epilogue: EpilogueGradients,
    stacks: list[Array],
    rest: Rest,
    reads: PyTree[bool],
) -> tuple[EpilogueGradients, list[Array]]:
    """Moves the epilogue's gradients to the host, where their parameters are.

    The barrier puts the backward pass after the epilogue, so that the fetched
    parameters are freed first. `reads` has the parameters that the epilogue reads; the
    gradients by the others are zeros, and are computed where they are added.
    """
    reading = jax.tree.leaves(reads)
    gradients, structure = jax.tree.flatten(epilogue.by_rest)
    known, merge = select(gradients, reading)
    known = host_like(known, select(jax.tree.leaves(rest), reading)[0])
    known, by_output, by_kept, stacks = lax.optimization_barrier(
        (known, epilogue.by_output, epilogue.by_kept, stacks)
    )
    by_rest = structure.unflatten(merge(known))
    by = {"by_rest": by_rest, "by_output": by_output, "by_kept": by_kept}
    return epilogue._replace(**by), stacks


def _with_prefetched(
    gradients: PyTree[Array], cts: PrologueGradients, prefetched: Prefetched
) -> tuple[PyTree[Array], PrologueGradients, Prefetched]:
    """Binds each prefetched matrix to the same matrix's gradient of this layer.

    The transfer then overlaps the computation of the gradients. Frozen matrices are
    bound to the gradients by the layer's input.
    """
    flat, structure = jax.tree.flatten(gradients)
    frozen = {n: x for n, x in prefetched.items() if n >= len(flat)}
    trained = {n: x for n, x in prefetched.items() if n < len(flat)}
    for n, x in trained.items():
        # The next layer's matrix is read from the stack before this layer's is written
        # there. Otherwise XLA would copy the stack.
        flat[n], trained[n] = lax.optimization_barrier((flat[n], x))
    if frozen:
        cts, frozen = lax.optimization_barrier((cts, frozen))
    return structure.unflatten(flat), cts, trained | frozen
