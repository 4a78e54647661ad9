"""The backward pass over the layers, for all micro-batches or one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.memory import on_host
from paged_optax.layerwise.beside import Beside, Flow, Turn
from paged_optax.layerwise.hosted import fetched, returned
from paged_optax.layerwise.learned import learned, used
from paged_optax.layerwise.loss import WeightedLoss, over
from paged_optax.layerwise.model import (
    ByPrologue,
    Forward,
    Head,
    Model,
    Rest,
    is_inexact,
    parted,
)
from paged_optax.layerwise.norms import widened
from paged_optax.layerwise.segments import in_segments
from paged_optax.layerwise.slices import Carry, LayerIndex, downwards, kept, put, slab
from paged_optax.layerwise.weights import Fetched, Slabs, Weights
from paged_optax.layerwise.workspace import GradientWorkspace

#: One layer's turn: `visit(carry, i, slabs, gradients)` returns the next carry, and the
#: slabs, or what replaces them.
Visit = Callable[
    [Carry, LayerIndex, list[Array], PyTree[Array]], tuple[Carry, list[Array]]
]

# What is visited with, the gradients on their way to the prologue, the stacks, and what
# is fetched ahead.
_Carried = tuple[Carry, ByPrologue, list[Array], Fetched]

# Beside what else goes on: the parameters that came from the host, of the layer that is
# to be updated.
_Pipelined = tuple[Carry, ByPrologue, Flow, dict[int, Array]]


def written(
    stacks: Sequence[Array], slabs: Sequence[Array], new: Sequence[Array], i: LayerIndex
) -> list[Array]:
    """Stacks with the slabs of layer i replaced, where they changed."""
    return [
        x if made is old else put(x, made, i)
        for x, old, made in zip(stacks, slabs, new, strict=True)
    ]


def _of_first(x: Array) -> Array:
    """What each layer kept of the first micro-batch."""
    return x[:, 0]


def _each_with(
    gradients: PyTree[Array], back: ByPrologue, ahead: Fetched
) -> tuple[PyTree[Array], ByPrologue, Fetched]:
    """Ties each matrix of the following layer to this layer's gradient of it.

    So the matrix travels while the gradients are computed. It is read from the stack
    before this layer's matrix is written there. Otherwise XLA would copy the stack.
    Frozen matrices are tied to what the following layer begins with.
    """
    flat, structure = jax.tree.flatten(gradients)
    trained, frozen = ahead
    pairs = [
        (g, a) if a is None else lax.optimization_barrier((g, a))
        for g, a in zip(flat, trained, strict=True)
    ]
    if any(a is not None for a in frozen):
        back, frozen = lax.optimization_barrier((back, frozen))
    gradients = jax.tree.unflatten(structure, [g for g, _ in pairs])
    return gradients, back, ([a for _, a in pairs], frozen)


class Bundle:
    """The micro-batches that go through the layers together: all of them, or one."""

    def __init__(
        self,
        model: Model,
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
          forward: What the forward pass made; None: it is run.
          last: Whether no micro-batch comes after.
        """
        self.model, self.weights, self.rest, self.batch = model, weights, rest, batch
        self.several = several
        self.dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]
        self.widens = self.dtypes != [x.dtype for x in weights.stacks]
        if forward is None:
            entered = model.entered(weights, rest, batch, self._each)
            forward = model.forward(weights, entered)
        x, self.inputs, keep, self.context, self.stacks = forward
        one = jax.tree.map(lambda x: x[0], batch) if several else batch
        self.learned = learned(model, weights, rest, one)
        model, here, x = model.fetched(rest, x)
        head = self._heads(model, here, x, keep, before, last)
        self.loss, self.metrics = head.loss, head.metrics
        chosen = [
            yes
            for yes, leaf in zip(self.learned.x, jax.tree.leaves(x), strict=True)
            if is_inexact(leaf)
        ]
        self.drest, self.dkept = head.by_rest, head.by_kept
        self.dx, _ = parted(head.by_output, chosen)
        if here is rest:
            return
        if several:
            x, keep = jax.tree.map(lambda x: x[0], x), jax.tree.map(_of_first, keep)
        seen = jax.tree.leaves(used(model.finished, here, x, keep, one))
        made, structure = jax.tree.flatten(head.by_rest)
        known, merge = parted(made, seen)
        known = returned(known, parted(jax.tree.leaves(rest), seen)[0])
        # What follows comes after all of the head: its weights are then given up, and
        # none are fetched beside them. Zeros are made where they are added.
        known, self.dx, self.dkept, self.stacks = lax.optimization_barrier(
            (known, self.dx, self.dkept, self.stacks)
        )
        self.drest = structure.unflatten(merge(known))

    def _heads(
        self,
        model: Model,
        rest: Rest,
        x: PyTree[Array],
        keep: PyTree[Array],
        before: Float[Array, ""],
        last: Bool[Array, ""] | bool,
    ) -> Head:
        """The loss, and the gradients by what it is made of, of all micro-batches."""
        batch, dtype = self.batch, before.dtype
        if not self.several:
            return model.head(rest, x, keep, batch, dtype, before, last)
        count = len(jax.tree.leaves(batch)[0])

        def head(
            drest: Rest, given: tuple[PyTree, PyTree, PyTree]
        ) -> tuple[Rest, Head]:
            made = model.head(rest, *given, dtype)
            parts = 1 if isinstance(made.loss, WeightedLoss) else count
            mean = lambda tree: jax.tree.map(lambda g: g / parts, tree)
            drest = jax.tree.map(
                lambda s, g: s + g.astype(s.dtype) / parts, drest, made.by_rest
            )
            by = mean(made.by_output), mean(made.by_kept)
            return drest, Head(made.loss, made.metrics, {}, *by)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, widened(x.dtype)), rest)
        swapped = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
        drest, made = lax.scan(head, zeros, (x, swapped(keep), batch))
        every = Head(
            made.loss, made.metrics, drest, made.by_output, swapped(made.by_kept)
        )
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

    def backward(
        self, visit: Visit[Carry], start: Carry
    ) -> tuple[Carry, list[Array], ByPrologue]:
        """Runs `visit(carry, i, slabs, gradients)` for each layer, the last first.

        Returns:
          The last carry, the stacks with what `visit` returned in place of the slabs,
          and the gradients by what the prologue made: the first layer's input, and the
          learned context.
        """
        weights = self.weights

        def body(
            i: LayerIndex, following: LayerIndex | None, carry: _Carried[Carry]
        ) -> _Carried[Carry]:
            inner, back, stacks, ahead = carry
            fetched, frozen = weights.slabs(stacks, i, ahead, vectors)
            ahead = weights.fetched(stacks, following)
            x = jax.tree.map(lambda to: slab(to, i)[0], self.inputs)
            dkept = jax.tree.map(lambda to: slab(to, i)[0], self.dkept)
            gradients, back = self._pull((fetched, frozen), x, i, back, dkept)
            # Or XLA:CPU fuses the products into the update, and copies the stacks.
            gradients, fetched, back = lax.platform_dependent(
                (gradients, fetched, back),
                cpu=lax.optimization_barrier,
                default=lambda values: values,
            )
            gradients, back, ahead = _each_with(gradients, back, ahead)
            inner, new = visit(inner, i, fetched, gradients)
            if all(a is b for a, b in zip(new, fetched, strict=True)):
                stacks, _ = kept(stacks, fetched, i)
            else:
                stacks = written(stacks, fetched, new, i)
            if weights.ahead:
                # Of two layers a trip, the second's moments wait for the first's.
                inner, back = lax.optimization_barrier((inner, back))
            return inner, back, stacks, ahead

        vectors = weights.vectors(self.stacks)
        ahead = weights.fetched(self.stacks, weights.length - 1)
        seen, _ = parted(self.context, self.learned.context)
        dcontext = list(map(jnp.zeros_like, seen))
        carry, back, stacks, _ = downwards(
            weights.length,
            body,
            (start, ByPrologue(self.dx, dcontext), self.stacks, ahead),
            ahead=weights.ahead,
        )
        return carry, stacks, back

    def beside(
        self,
        update: Beside,
        visit: Callable[[Carry, LayerIndex, PyTree[Array]], Carry],
        gradients_of: Callable[[Carry, LayerIndex], Sequence[Array]],
        start: Carry,
        others: Sequence[Array] = (),
    ) -> tuple[Carry, Flow, ByPrologue]:
        """Makes each layer's gradients beside the update of the layer before.

        Args:
          update: The update.
          visit: `visit(carry, i, gradients)` is called for each layer, the last first,
            and returns the next carry.
          gradients_of: `gradients_of(carry, i)` returns the gradients to update by of
            the layer that was visited last.
          start: The first carry.
          others: Other parameters that are updated, a part with each layer.

        Returns:
          The last carry; the state's stacks, and the parameters of the layers and the
          others; and the gradients by what the prologue made.
        """
        last, count = self.weights.length - 1, len(self.stacks)
        vectors = self.weights.vectors(self.stacks)

        def at(i: LayerIndex) -> tuple[PyTree, list[Array]]:
            cut = lambda to: slab(to, i)[0]
            return jax.tree.map(cut, self.inputs), jax.tree.map(cut, self.dkept)

        def made(
            slabs: Slabs,
            x: PyTree[Array],
            back: ByPrologue,
            dkept: list[Array],
            i: LayerIndex,
        ) -> tuple[PyTree[Array], ByPrologue]:
            return self._pull(slabs, x, i, back, dkept)

        def turn(
            i: LayerIndex, following: LayerIndex | None, carry: _Pipelined[Carry]
        ) -> _Pipelined[Carry]:
            inner, back, flow, held = carry
            fetched, frozen = flow.weights, update.shares.slabs(flow.frozen, i)
            layers = flow.stacks[:count]
            ahead = [fetched.get(n) for n in range(count)], frozen
            slabs, frozen = self.weights.slabs(layers, i, ahead, vectors)
            stacks = {n: x for n, x in enumerate(layers) if n not in fetched}
            slabs, stacks = lax.optimization_barrier((slabs, stacks))
            flow = flow._replace(
                stacks=[stacks.get(n, x) for n, x in enumerate(flow.stacks)],
                frozen={},
            )
            now = Turn(i + 1, held, gradients_of(inner, i + 1), i, following)

            def between(k: int, living: list[ArrayLike]) -> list[ArrayLike]:
                nonlocal flow
                flow, living = update.arrived(k, flow, living)
                flow, living = update.begun(k + 1, flow, now, living)
                return living

            x, dkept = at(i)
            given = (slabs, frozen), x, back, dkept, i
            flow, given = update.begun(0, flow, now, given)
            results = in_segments(made, given, update.ends, between)
            k = len(update.groups) - 1
            flow, (gradients, back) = update.arrived(k, flow, results)
            return visit(inner, i, gradients), back, flow, fetched

        # What the last layer needs waits for the loss. XLA fetched some of it before.
        stacks, dx = lax.optimization_barrier((self.stacks, self.dx))
        slabs = self.weights.slabs(stacks, last)
        held = {n: x for n, x in enumerate(slabs[0]) if on_host(self.stacks[n])}
        flow, dx = update.started([*stacks, *others], last, dx)
        x, dkept = at(last)
        seen, _ = parted(self.context, self.learned.context)
        dcontext = list(map(jnp.zeros_like, seen))
        back = ByPrologue(dx, dcontext)
        gradients, back = self._pull(slabs, x, jnp.int32(last), back, dkept)
        flow, (gradients, back) = update.arrived(-1, flow, (gradients, back))
        carry = visit(start, last, gradients), back, flow, held
        inner, back, flow, held = downwards(
            last, turn, carry, following=self.weights.ahead
        )
        flow = update.alone(flow, Turn(0, held, gradients_of(inner, 0)))
        return inner, flow, back

    def _pull(
        self,
        slabs: Slabs,
        x: PyTree[Array],
        i: LayerIndex,
        back: ByPrologue,
        dkept: list[Array],
    ) -> tuple[PyTree[Array], ByPrologue]:
        """One layer's gradients; and those by its input, and so far by the context."""
        weights, frozen = self.weights.of(slabs)
        dx, dcontext = back
        pull = lambda x, context, dx, dkept: self.model.pull(
            weights, frozen, x, context, self.learned, i, dx, dkept
        )
        more = lambda made: jax.tree.map(jnp.add, dcontext, made)
        narrow = lambda g: jax.tree.unflatten(
            self.weights.structure,
            [
                x.astype(dtype)
                for x, dtype in zip(jax.tree.leaves(g), self.dtypes, strict=True)
            ],
        )
        if not self.several:
            gradients, dx, made = pull(x, self.context, dx, dkept)
            return narrow(gradients), ByPrologue(dx, more(made))

        def one(
            total: PyTree[Array], given: tuple[PyTree, PyTree, list[Array], list[Array]]
        ) -> tuple[PyTree[Array], ByPrologue]:
            gradients, dx, made = pull(*given)
            return jax.tree.map(jnp.add, total, narrow(gradients)), ByPrologue(dx, made)

        zeros = jax.tree.map(jnp.zeros_like, narrow(weights))
        gradients, (dx, made) = lax.scan(one, zeros, (x, self.context, dx, dkept))
        return gradients, ByPrologue(dx, more(made))

    def rest_gradients(self, back: ByPrologue) -> Rest:
        """The gradients by all parameters but the layers': the prologue's added.

        They have the parameters' dtypes, unless the workspace adds up in a wider one.
        """
        drest, back = fetched(self.drest, back)
        model, rest, back = self.model.fetched(self.rest, back)
        first = lambda batch, back: model.first(rest, batch, self.learned, back)
        if not self.several:
            return jax.tree.map(jnp.add, drest, first(self.batch, back))

        def one(total: Rest, given: tuple[PyTree, ByPrologue]) -> tuple[Rest, None]:
            made = first(*given)
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, made), None

        total = lax.scan(one, drest, (self.batch, back))[0]
        if self.widens:
            return total
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, rest)
