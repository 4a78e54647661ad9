"""The user's three functions: run forward, and pulled back through."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.text import dtype_and_shape
from paged_optax.backend.validation import brief
from paged_optax.layerwise.kept import Activations, RunLayer
from paged_optax.layerwise.loss import WeightedLoss, loss_and_metrics, over
from paged_optax.layerwise.slabs import LayerIndex, upwards, written_back
from paged_optax.layerwise.weights import (
    Dependency,
    Frozen,
    Prefetched,
    Weights,
    fetch_after,
    on_device,
)

#: The parameters without the layers', by name.
Rest = Mapping[Hashable, PyTree]

#: Puts others in the place of a tree's chosen leaves.
Merge = Callable[[Sequence[Array]], PyTree]


# The activations, the stacks, and what of the next layer is fetched.
_ForwardCarry = tuple[Activations, list[Array], Prefetched]


class ForwardStart(NamedTuple):
    """What a forward pass begins with.

    Attributes:
      activations: Those before the first layer.
      context: What all layers see.
      run: Runs a layer.
    """

    activations: Activations
    context: PyTree
    run: RunLayer


class Forward(NamedTuple):
    """What a forward pass makes.

    Attributes:
      activations: Those after the last layer.
      context: What all layers see.
      stacks: Their parameters.
    """

    activations: Activations
    context: PyTree
    stacks: list[Array]


class EpilogueGradients(NamedTuple):
    """The loss of one micro-batch, its metrics, and the gradients.

    Attributes:
      loss: The loss, whose weight is in the dtype that was asked for.
      metrics: What `epilogue` returned beside it, or None.
      by_rest: The gradients by `rest`.
      by_output: Those by what is differentiable of the last layer's output.
      by_kept: Those by what is differentiable of what the layers kept.
    """

    loss: Float[Array, ""] | WeightedLoss
    metrics: PyTree
    by_rest: Rest
    by_output: list[Array]
    by_kept: list[Array]


class Learned(NamedTuple):
    """Which leaves follow from parameters that are trained.

    Nobody takes the gradients of the others: those of a table would be one more buffer
    of its size, added to by each layer, and those of a frozen teacher's activations a
    backward pass through all of its layers.

    Attributes:
      x: Those of the layers' input.
      context: Those of what all layers see.
    """

    x: list[bool]
    context: list[bool]


class PrologueGradients(NamedTuple):
    """The gradients by what the prologue returned, as far as it can be learned.

    Attributes:
      x: Those by the learned leaves of the first layer's input; on the way to it, by
        those of a later layer's.
      context: Those by the learned leaves of the context.
    """

    x: list[Array]
    context: list[Array]


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """The user's three functions.

    Attributes:
      prologue: See `layerwise_step`, as for the next two.
      layer: As above.
      epilogue: As above.
      activations_on_host: Whether the layers' inputs wait in host memory.
      frozen: The frozen parameters. None: the functions do not take any.
    """

    prologue: Callable[..., PyTree]
    layer: Callable[..., PyTree]
    epilogue: Callable[..., PyTree]
    activations_on_host: bool
    frozen: Frozen | None = None

    def _all(self, rest: Rest) -> tuple[Rest, ...]:
        """What prologue and epilogue get of parameters."""
        every = (rest,) if self.frozen is None else (rest, self.frozen.rest)
        return jax.tree.map(on_device, every)

    def fetch_rest(
        self, rest: Rest, dependency: Dependency
    ) -> tuple["ModelFunctions", Rest, Dependency]:
        """Fetches what is outside the layers once `dependency` has been computed."""
        if self.frozen is None:
            return self, *fetch_after(rest, dependency)
        both = rest, self.frozen.rest
        (rest, fixed), dependency = fetch_after(both, dependency)
        frozen = dataclasses.replace(self.frozen, rest=fixed)
        return dataclasses.replace(self, frozen=frozen), rest, dependency

    def run_prologue(self, rest: Rest, batch: PyTree) -> tuple[PyTree[Array], PyTree]:
        """The first layer's input, and the context."""
        output = self.prologue(*self._all(rest), batch)
        x, context = _pair("prologue", "x, context", output)
        return jax.tree.map(jnp.asarray, x), context

    def run_layer(
        self,
        weights: PyTree[Array],
        frozen: PyTree[Array],
        x: PyTree,
        context: PyTree,
        i: LayerIndex,
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """One layer's output, and what it keeps."""
        every = (weights,) if self.frozen is None else (weights, frozen)
        output = self.layer(*every, x, context, i)
        return jax.tree.map(jnp.asarray, _pair("layer", "x, kept", output))

    def run_epilogue(
        self, rest: Rest, x: PyTree[Array], kept: PyTree[Array], batch: PyTree
    ) -> PyTree:
        """What `epilogue` returns."""
        return self.epilogue(*self._all(rest), x, kept, batch)

    def start(
        self,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        each: Callable[..., PyTree],
    ) -> ForwardStart:
        """Runs the prologue; `each` calls a function for each micro-batch."""
        rest = jax.tree.map(on_device, rest)  # once for all micro-batches
        x, context = each(lambda b: self.run_prologue(rest, b), batch)
        run = lambda i, slabs, x: each(
            lambda x, c: self.run_layer(*weights.of(slabs), x, c, i), x, context
        )
        shapes = jax.eval_shape(
            lambda stacks, x: run(jnp.int32(0), weights.slabs(stacks, 0), x),
            weights.stacks,
            x,
        )
        output, kept = shapes
        refuse_other_input(x, output)
        on_host = self.activations_on_host
        activations = Activations.before(x, kept, weights.length, on_host)
        return ForwardStart(activations, context, run)

    def forward(self, weights: Weights, start: ForwardStart) -> Forward:
        """Runs the layers."""

        def body(
            i: LayerIndex, following: LayerIndex | None, carry: _ForwardCarry
        ) -> _ForwardCarry:
            activations, stacks, prefetched = carry
            slabs, frozen = weights.slabs(stacks, i, prefetched, vectors)
            stacks, slabs = written_back(stacks, slabs, i)
            prefetched = weights.prefetch(stacks, following)
            activations = activations.after(i, (slabs, frozen), start.run)
            return activations, stacks, prefetched

        vectors = weights.vectors(weights.stacks)
        prefetched = weights.prefetch(weights.stacks, 0)
        activations, stacks, _ = upwards(
            weights.length,
            body,
            (start.activations, weights.stacks, prefetched),
            prefetches=weights.prefetches,
        )
        return Forward(activations, start.context, stacks)

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
        """The loss of one micro-batch, its metrics, and the gradients.

        Args:
          rest: The parameters without the layers'.
          x: The last layer's output.
          kept: What the layers kept.
          batch: The micro-batch.
          dtype: The dtype of weights.
          before: The weight of the micro-batches before. The gradients are of a total
            by the weight so far; None: of the total.
          last: Whether no micro-batch comes after.
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

        (value, (weighted, metrics)), gradients = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True
        )(rest, inputs, floats)
        value = value if weighted is None else weighted
        return EpilogueGradients(value, metrics, *gradients)

    def pull_layer(
        self,
        weights: PyTree[Array],
        frozen: PyTree[Array],
        x: PyTree[Array],
        context: PyTree,
        learned: Learned,
        i: LayerIndex,
        dx: list[Array],
        dkept: list[Array],
    ) -> tuple[PyTree[Array], list[Array], list[Array]]:
        """One layer's gradients by its weights, and what is learned beside them."""
        inputs, merge_x = select(x, learned.x)
        seen, merge_context = select(context, learned.context)

        def run(
            weights: PyTree[Array], inputs: list[Array], seen: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            arguments = weights, frozen, merge_x(inputs), merge_context(seen)
            x, new = self.run_layer(*arguments, i)
            return select(x, learned.x)[0], _inexact(new)[0]

        return jax.vjp(run, weights, inputs, seen)[1]((dx, dkept))

    def pull_prologue(
        self, rest: Rest, batch: PyTree, learned: Learned, back: PrologueGradients
    ) -> Rest:
        """The prologue's gradients by `rest`."""

        def run(rest: Rest) -> PrologueGradients:
            x, context = self.run_prologue(rest, batch)
            chosen = select(x, learned.x)[0], select(context, learned.context)[0]
            return PrologueGradients(*chosen)

        return jax.vjp(run, rest)[1](back)[0]


def is_inexact(x: object) -> bool:
    """Whether a leaf is an array that can have a gradient."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _inexact(tree: PyTree) -> tuple[list[Array], Merge]:
    """What is differentiable of a tree, and what puts it back."""
    return select(tree, [is_inexact(x) for x in jax.tree.leaves(tree)])


def select(tree: PyTree, chosen: Sequence[bool]) -> tuple[list[Array], Merge]:
    """The chosen leaves of a tree, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def merge(values: Sequence[Array]) -> PyTree:
        new = iter(values)
        return jax.tree.unflatten(
            structure,
            [next(new) if yes else x for x, yes in zip(leaves, chosen, strict=True)],
        )

    return [x for x, yes in zip(leaves, chosen, strict=True) if yes], merge


def _pair(function: str, names: str, output: PyTree) -> tuple[PyTree, PyTree]:
    """What one of the user's functions returns, which must be two things."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise TypeError(
            f"{function} returns {brief(output)}: it returns ({names}), of which the"
            " second may be None."
        )
    first, second = output
    return first, second


def refuse_other_input(
    x: PyTree[Array], output: PyTree[Array] | PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Refuses a layer's output that cannot be the next layer's input."""
    describe = lambda tree: jax.tree.map(dtype_and_shape, tree)
    if describe(x) != describe(output):
        raise ValueError(
            f"layer turns {describe(x)} into {describe(output)}: a layer's output is"
            " the next one's input, so that both must be alike; cast in the layer, or"
            " in the prologue."
        )
