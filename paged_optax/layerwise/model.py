"""The user's three functions: run forward, and pulled back through."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_optax.backend.memory import HOST
from paged_optax.layerwise.slices import (
    kept,
    put,
    upwards,
)
from paged_optax.layerwise.weights import Weights


@dataclasses.dataclass(frozen=True)
class Model:
    """The user's three functions."""

    prologue: Callable[..., Any]
    layer: Callable[..., Any]
    epilogue: Callable[..., Any]
    activations_on_host: bool

    def enter(self, rest: Any, batch: Any) -> tuple[Any, Any]:
        """The first layer's input, and the context."""
        x, context = self.prologue(rest, batch)
        return jax.tree.map(jnp.asarray, x), context

    def through(self, *arguments: Any) -> tuple[Any, Any]:
        """One layer's output, and what it keeps."""
        return jax.tree.map(jnp.asarray, self.layer(*arguments))

    def forward(
        self, weights: "Weights", rest: Any, batch: Any, each: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Runs prologue and layers.

        Returns:
          The last layer's output, every layer's input, what the layers kept, what they
          all see, and the stacks.
        """
        x, context = each(lambda b: self.enter(rest, b), batch)
        length = weights.length
        run = lambda i, slabs, x: each(
            lambda x, c: self.through(weights.of(slabs), x, c, i), x, context
        )
        shapes = jax.eval_shape(
            lambda stacks, x: run(jnp.int32(0), weights.slabs(stacks, 0), x),
            weights.stacks,
            x,
        )
        _refuse_other_input(x, shapes[0])
        blank = lambda x: lax.empty((length, *x.shape), x.dtype)
        inputs = jax.tree.map(blank, x)
        if self.activations_on_host:
            inputs = jax.device_put(inputs, HOST)
        keep = jax.tree.map(blank, shapes[1])

        def body(i: Any, following: Any, carry: Any) -> Any:
            x, inputs, keep, stacks, ahead = carry
            stacks, slabs = kept(stacks, weights.slabs(stacks, i, ahead), i)
            ahead = weights.fetched(stacks, following)
            inputs = jax.tree.map(lambda to, x: put(to, x[None], i), inputs, x)
            x, made = run(i, slabs, x)
            keep = jax.tree.map(lambda to, x: put(to, x[None], i), keep, made)
            return x, inputs, keep, stacks, ahead

        ahead = weights.fetched(weights.stacks, 0)
        x, inputs, keep, stacks, _ = upwards(
            length,
            body,
            (x, inputs, keep, weights.stacks, ahead),
            ahead=weights.ahead,
        )
        return x, inputs, keep, context, stacks

    def head(self, rest: Any, x: Any, keep: Any, batch: Any) -> tuple[Any, ...]:
        """The loss of one micro-batch, its metrics, and the gradients.

        Returns:
          Loss, metrics, and the gradients by `rest` and by what is differentiable of
          `x` and of what the layers kept.
        """
        inputs, merge_x = _inexact(x)
        floats, merge_kept = _inexact(keep)

        def loss(rest: Any, inputs: Any, floats: Any) -> Any:
            result = self.epilogue(rest, merge_x(inputs), merge_kept(floats), batch)
            return result if isinstance(result, tuple) else (result, None)

        (value, metrics), gradients = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True
        )(rest, inputs, floats)
        return value, metrics, *gradients

    def pull(
        self,
        weights: Any,
        x: Any,
        context: Any,
        learned: Sequence[bool],
        i: Any,
        dx: Any,
        dkept: Any,
    ) -> tuple[Any, Any, Any]:
        """One layer's gradients by its weights, its input, and the learned context."""
        inputs, merge_x = _inexact(x)
        seen, merge_context = parted(context, learned)

        def run(weights: Any, inputs: Any, seen: Any) -> Any:
            x, made = self.through(weights, merge_x(inputs), merge_context(seen), i)
            return _inexact(x)[0], _inexact(made)[0]

        return jax.vjp(run, weights, inputs, seen)[1]((dx, dkept))

    def first(self, rest: Any, batch: Any, learned: Sequence[bool], back: Any) -> Any:
        """The prologue's gradients by `rest`."""

        def run(rest: Any) -> Any:
            x, context = self.enter(rest, batch)
            return _inexact(x)[0], parted(context, learned)[0]

        return jax.vjp(run, rest)[1](back)[0]

    def learned(self, rest: Any, batch: Any) -> list[bool]:
        """Which leaves of the context follow from the parameters.

        Nobody takes the gradients of the others: those of a table would be one more
        buffer of its size, added to by each layer.
        """
        found: list[bool] = []

        def watched(number: int, x: Any) -> Any:
            @jax.custom_vjp
            def watch(x: Any) -> Any:
                return x

            def forward(x: Any) -> Any:
                found[number] = x.perturbed
                return x.value, None

            watch.defvjp(forward, lambda _, dx: (dx,), symbolic_zeros=True)
            return watch(x)

        def run(rest: Any) -> Any:
            leaves = jax.tree.leaves(self.enter(rest, batch)[1])
            found.extend([False] * len(leaves))
            return [watched(i, x) for i, x in enumerate(leaves) if _is_inexact(x)]

        jax.eval_shape(lambda rest: jax.vjp(run, rest)[0], rest)
        return found


def _is_inexact(x: Any) -> bool:
    """Whether a leaf is an array that can have a gradient."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _inexact(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What is differentiable of a tree, and what puts it back."""
    return parted(tree, [_is_inexact(x) for x in jax.tree.leaves(tree)])


def parted(
    tree: Any, chosen: Sequence[bool]
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The chosen leaves of a tree, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def merge(values: list[Any]) -> Any:
        given = iter(values)
        return jax.tree.unflatten(
            structure,
            [next(given) if yes else x for x, yes in zip(leaves, chosen, strict=True)],
        )

    return [x for x, yes in zip(leaves, chosen, strict=True) if yes], merge


def _refuse_other_input(x: Any, made: Any) -> None:
    describe = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    if describe(x) != describe(made):
        raise ValueError(
            f"layer turns {describe(x)} into {describe(made)}: a layer's output is the"
            " next one's input, so that both must be alike; cast in the layer, or in"
            " the prologue."
        )
