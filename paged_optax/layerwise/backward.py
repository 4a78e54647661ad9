"""The backward pass over the layers, for all micro-batches or one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import on_cpu
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
from paged_optax.layerwise.kept import of_layer
from paged_optax.layerwise.loss import WeightedLoss, over
from paged_optax.layerwise.overlap import in_segments
from paged_optax.layerwise.overlapped_update import BackwardOverlap, InFlight, Stage
from paged_optax.layerwise.slabs import (
    Carry,
    LayerIndex,
    downwards,
    put,
    written_back,
)
from paged_optax.layerwise.weights import (
    Prefetched,
    Slabs,
    Weights,
    fetch_after,
    host_like,
)
from paged_optax.layerwise.workspace import GradientWorkspace

#: One layer's turn: `visit(carry, i, slabs, gradients)` returns the next carry, and the
#: slabs, or what replaces them.
Visit = Callable[
    [Carry, LayerIndex, list[Array], PyTree[Array]], tuple[Carry, list[Array]]
]

# What is visited with, the gradients on their way to the prologue, the stacks, and what
# of the next layer is fetched.
_PassCarry = tuple[Carry, PrologueGradients, list[Array], Prefetched]

# Beside an update: the parameters that came from the host, of the layer that is to be
# updated.
_OverlapCarry = tuple[Carry, PrologueGradients, InFlight, dict[int, Array]]


def write_slabs(
    stacks: Sequence[Array], slabs: Sequence[Array], new: Sequence[Array], i: LayerIndex
) -> list[Array]:
    """Stacks with the slabs of layer i replaced, where they changed."""
    return [
        x if update is old else put(x, update, i)
        for x, old, update in zip(stacks, slabs, new, strict=True)
    ]


def _with_prefetched(
    gradients: PyTree[Array], back: PrologueGradients, prefetched: Prefetched
) -> tuple[PyTree[Array], PrologueGradients, Prefetched]:
    """Binds each matrix of the following layer to this layer's gradient of it.

    So the matrix travels while the gradients are computed. Frozen matrices are bound to
    what the following layer begins with.
    """
    flat, structure = jax.tree.flatten(gradients)
    trained, frozen = dict(prefetched.trained), prefetched.frozen
    for n, x in trained.items():
        # The matrix is read from the stack before this layer's matrix is written there.
        # Otherwise XLA would copy the stack.
        flat[n], trained[n] = lax.optimization_barrier((flat[n], x))
    if frozen:
        back, frozen = lax.optimization_barrier((back, frozen))
    return structure.unflatten(flat), back, Prefetched(trained, frozen)


class BackwardPass:
    """The micro-batches that go through the layers together: all of them, or one."""

    def __init__(
        self,
        model: ModelFunctions,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        workspace: GradientWorkspace,
        several: bool,
        before: Float[Array, ""],
        forward: Forward | None = None,
        last: Bool[Array, ""] | bool = True,
    ):
        """Runs them forward, and the epilogue.

        Args:
          model: The model.
          weights: The layers' parameters.
          rest: The others.
          batch: The micro-batches.
          workspace: The workspace.
          several: Whether there are several of them.
          before: The weight of the micro-batches before these.
          forward: What the forward pass returned; None: it is run.
          last: Whether no micro-batch comes after.
        """
        self.model, self.weights, self.rest, self.batch = model, weights, rest, batch
        self.several = several
        self.dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]
        self.widens = self.dtypes != [x.dtype for x in weights.stacks]
        if forward is None:
            start = model.start(weights, rest, batch, self._each)
            forward = model.forward(weights, start)
        activations, self.context, self.stacks = forward
        self.inputs, kept = activations.inputs, activations.kept
        one = jax.tree.map(lambda x: x[0], batch) if several else batch
        self.learned = learned(model, weights, rest, one)
        model, fetched, x = model.fetch_rest(rest, activations.x)
        epilogue = self._epilogues(model, fetched, x, kept, before, last)
        self.loss, self.metrics = epilogue.loss, epilogue.metrics
        chosen = [
            yes
            for yes, leaf in zip(self.learned.x, jax.tree.leaves(x), strict=True)
            if is_inexact(leaf)
        ]
        self.drest, self.dkept = epilogue.by_rest, epilogue.by_kept
        self.dx, _ = select(epilogue.by_output, chosen)
        if fetched is rest:
            return
        if several:
            x = jax.tree.map(lambda x: x[0], x)
            kept = jax.tree.map(lambda x: x[:, 0], kept)
        in_epilogue = jax.tree.leaves(used(model.run_epilogue, fetched, x, kept, one))
        gradients, structure = jax.tree.flatten(epilogue.by_rest)
        known, merge = select(gradients, in_epilogue)
        known = host_like(known, select(jax.tree.leaves(rest), in_epilogue)[0])
        # What follows comes after the epilogue: its weights are then given up, and none
        # are fetched beside them. Zeros are made where they are added.
        known, self.dx, self.dkept, self.stacks = lax.optimization_barrier(
            (known, self.dx, self.dkept, self.stacks)
        )
        self.drest = structure.unflatten(merge(known))

    def _epilogues(
        self,
        model: ModelFunctions,
        rest: Rest,
        x: PyTree[Array],
        kept: PyTree[Array],
        before: Float[Array, ""],
        last: Bool[Array, ""] | bool,
    ) -> EpilogueGradients:
        """The loss, and the gradients by what it is made of, of all micro-batches."""
        batch, dtype = self.batch, before.dtype
        if not self.several:
            return model.pull_epilogue(rest, x, kept, batch, dtype, before, last)
        count = len(jax.tree.leaves(batch)[0])

        def epilogue(
            drest: Rest, arguments: tuple[PyTree, PyTree, PyTree]
        ) -> tuple[Rest, EpilogueGradients]:
            one = model.pull_epilogue(rest, *arguments, dtype)
            divisor = 1 if isinstance(one.loss, WeightedLoss) else count
            mean = lambda tree: jax.tree.map(lambda g: g / divisor, tree)
            drest = jax.tree.map(
                lambda s, g: s + g.astype(s.dtype) / divisor, drest, one.by_rest
            )
            by = mean(one.by_output), mean(one.by_kept)
            return drest, EpilogueGradients(one.loss, one.metrics, {}, *by)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), rest)
        swapped = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
        drest, every = lax.scan(epilogue, zeros, (x, swapped(kept), batch))
        every = every._replace(by_rest=drest, by_kept=swapped(every.by_kept))
        if not isinstance(every.loss, WeightedLoss):
            return every
        weight = jnp.sum(every.loss.weight)
        mean = lambda tree: jax.tree.map(
            lambda g: over(g, weight).astype(g.dtype), tree
        )
        return every._replace(
            by_rest=mean(every.by_rest),
            by_output=mean(every.by_output),
            by_kept=mean(every.by_kept),
        )

    def _each(self, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Calls a function for each micro-batch, one after the other."""
        if not self.several:
            return function(*arguments)
        return lax.map(lambda xs: function(*xs), arguments)

    def run(
        self, visit: Visit[Carry], start: Carry
    ) -> tuple[Carry, list[Array], PrologueGradients]:
        """Runs `visit(carry, i, slabs, gradients)` for each layer, the last first.

        Returns:
          The last carry, the stacks with what `visit` returned in place of the slabs,
          and the gradients by what the prologue returned: the first layer's input, and
          the learned context.
        """
        weights = self.weights

        def body(
            i: LayerIndex, following: LayerIndex | None, carry: _PassCarry[Carry]
        ) -> _PassCarry[Carry]:
            inner, back, stacks, prefetched = carry
            slabs, frozen = weights.slabs(stacks, i, prefetched, vectors)
            prefetched = weights.prefetch(stacks, following)
            x, dkept = of_layer(i, self.inputs, self.dkept)
            gradients, back = self._pull((slabs, frozen), x, back, dkept, i)
            # Or XLA:CPU fuses the products into the update, and copies the stacks.
            values = gradients, slabs, back
            gradients, slabs, back = on_cpu(lax.optimization_barrier, values)
            gradients, back, prefetched = _with_prefetched(gradients, back, prefetched)
            inner, new = visit(inner, i, slabs, gradients)
            if all(a is b for a, b in zip(new, slabs, strict=True)):
                stacks, _ = written_back(stacks, slabs, i)
            else:
                stacks = write_slabs(stacks, slabs, new, i)
            if weights.prefetches:
                # Of two layers a trip, the second's moments wait for the first's.
                inner, back = lax.optimization_barrier((inner, back))
            return inner, back, stacks, prefetched

        vectors = weights.vectors(self.stacks)
        prefetched = weights.prefetch(self.stacks, weights.length - 1)
        carry, back, stacks, _ = downwards(
            weights.length,
            body,
            (start, self._prologue_gradients(self.dx), self.stacks, prefetched),
            prefetches=weights.prefetches,
        )
        return carry, stacks, back

    def overlapped(
        self,
        update: BackwardOverlap,
        visit: Callable[[Carry, LayerIndex, PyTree[Array]], Carry],
        gradients_of: Callable[[Carry, LayerIndex], Sequence[Array]],
        start: Carry,
        others: Sequence[Array] = (),
    ) -> tuple[Carry, InFlight, PrologueGradients]:
        """Computes each layer's gradients beside the update of the layer after it.

        Args:
          update: The update.
          visit: `visit(carry, i, gradients)` is called for each layer, the last first,
            and returns the next carry.
          gradients_of: `gradients_of(carry, i)` returns the gradients to update by of
            the layer that was visited last.
          start: The first carry.
          others: Other parameters that are updated, a chunk with each layer.

        Returns:
          The last carry; the state's stacks, and the parameters of the layers and the
          others; and the gradients by what the prologue returned.
        """
        last, count = self.weights.length - 1, len(self.stacks)
        vectors = self.weights.vectors(self.stacks)

        def turn(
            i: LayerIndex, following: LayerIndex | None, carry: _OverlapCarry[Carry]
        ) -> _OverlapCarry[Carry]:
            inner, back, flight, hosted = carry
            fetched, frozen = flight.weights, update.portions.slabs(flight.frozen, i)
            prefetched = Prefetched(fetched, dict(enumerate(frozen)))
            slabs, frozen = self.weights.slabs(
                flight.stacks[:count], i, prefetched, vectors
            )
            flight, slabs = flight.read_first(slabs, count)
            stage = Stage(i + 1, hosted, gradients_of(inner, i + 1), i, following)

            def between(k: int, computed: list[ArrayLike]) -> list[ArrayLike]:
                nonlocal flight
                flight, computed = update.wait(k, flight, computed)
                flight, computed = update.update(k + 1, flight, stage, computed)
                return computed

            x, dkept = of_layer(i, self.inputs, self.dkept)
            arguments = (slabs, frozen), x, back, dkept, i
            flight, arguments = update.update(0, flight, stage, arguments)
            results = in_segments(self._pull, arguments, update.ends, between)
            flight, (gradients, back) = update.wait(-1, flight, results)
            # What came from the host for a layer's gradients stays for its update.
            return visit(inner, i, gradients), back, flight, fetched

        # What the last layer needs waits for the loss. XLA fetched some of it before.
        stacks, dx = lax.optimization_barrier((self.stacks, self.dx))
        slabs = self.weights.slabs(stacks, last)
        hosted = {n: x for n, x in enumerate(slabs[0]) if on_host(self.stacks[n])}
        flight, dx = update.start([*stacks, *others], last, dx)
        x, dkept = of_layer(last, self.inputs, self.dkept)
        back = self._prologue_gradients(dx)
        gradients, back = self._pull(slabs, x, back, dkept, jnp.int32(last))
        flight, (gradients, back) = update.wait(-1, flight, (gradients, back))
        carry = visit(start, last, gradients), back, flight, hosted
        inner, back, flight, hosted = downwards(
            last, turn, carry, prefetches=self.weights.prefetches, makes_room=True
        )
        flight = update.finish(flight, Stage(0, hosted, gradients_of(inner, 0)))
        return inner, flight, back

    def _prologue_gradients(self, dx: list[Array]) -> PrologueGradients:
        """The gradients that the last layer begins with; by the context, zeros."""
        context, _ = select(self.context, self.learned.context)
        return PrologueGradients(dx, list(map(jnp.zeros_like, context)))

    def _pull(
        self,
        slabs: Slabs,
        x: PyTree[Array],
        back: PrologueGradients,
        dkept: list[Array],
        i: LayerIndex,
    ) -> tuple[PyTree[Array], PrologueGradients]:
        """One layer's gradients; and those by its input, and so far by the context."""
        weights, frozen = self.weights.of(slabs)
        dx, dcontext = back
        pull = lambda x, context, dx, dkept: self.model.pull_layer(
            weights, frozen, x, context, self.learned, i, dx, dkept
        )
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
            arguments: tuple[PyTree, PyTree, list[Array], list[Array]],
        ) -> tuple[PyTree[Array], PrologueGradients]:
            gradients, dx, new = pull(*arguments)
            total = jax.tree.map(jnp.add, total, narrow(gradients))
            return total, PrologueGradients(dx, new)

        zeros = jax.tree.map(jnp.zeros_like, narrow(weights))
        gradients, (dx, new) = lax.scan(one, zeros, (x, self.context, dx, dkept))
        return gradients, PrologueGradients(dx, add(new))

    def rest_gradients(self, back: PrologueGradients) -> Rest:
        """The gradients by all parameters but the layers': the prologue's added.

        They have the parameters' dtypes, unless the workspace adds up in a wider one.
        """
        drest, back = fetch_after(self.drest, back)
        model, rest, back = self.model.fetch_rest(self.rest, back)
        pull = lambda batch, back: model.pull_prologue(rest, batch, self.learned, back)
        if not self.several:
            return jax.tree.map(jnp.add, drest, pull(self.batch, back))

        def one(
            total: Rest, arguments: tuple[PyTree, PrologueGradients]
        ) -> tuple[Rest, None]:
            add = lambda s, g: s + g.astype(s.dtype)
            return jax.tree.map(add, total, pull(*arguments)), None

        total = lax.scan(one, drest, (self.batch, back))[0]
        if self.widens:
            return total
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, rest)
