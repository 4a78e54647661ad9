"""What of a model follows from the parameters that are trained."""

from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant
from paged_optax.backend.meshes import shape_dtype
from paged_optax.layerwise.model import Learned, Model, Rest, is_inexact
from paged_optax.layerwise.weights import Weights


def learned(model: Model, weights: Weights, rest: Rest, batch: PyTree) -> Learned:
    """Which leaves of the layers' input, and of the context, have gradients.

    Args:
      model: The model.
      weights: The layers' parameters.
      rest: The others.
      batch: A micro-batch.
    """
    entering, (x, context) = _entering(model, rest, batch)
    every = [is_inexact(leaf) for leaf in jax.tree.leaves(x)]
    seen = entering[len(every) :]
    if sum(every) < 2:
        return Learned(every, seen)

    def layer(stacks: list[Array], x: PyTree, context: PyTree) -> PyTree:
        slabs = weights.of(weights.slabs(stacks, 0))
        return model.through(*slabs, x, context, jnp.int32(0))[0]

    flat = Flat(jax.make_jaxpr(layer)(weights.stacks, x, context))
    first = len(weights.stacks)
    chosen = entering[: len(every)]
    while True:
        given = [n for n, yes in enumerate((*chosen, *seen), first) if yes]
        made = flat.dependents([*range(first), *given])
        becomes = [
            old or (inexact and not isinstance(new, Constant) and new in made)
            for old, inexact, new in zip(chosen, every, flat.outputs, strict=True)
        ]
        if becomes == chosen:
            return Learned(chosen, seen)
        chosen = becomes


def _entering(
    model: Model, rest: Rest, batch: PyTree
) -> tuple[list[bool], tuple[PyTree, PyTree]]:
    """The same of what the prologue makes alone, leaf by leaf; and its shapes."""
    found: list[bool] = []
    shapes: list[tuple[PyTree, PyTree]] = []

    def watched(number: int, x: ArrayLike) -> ArrayLike:
        @jax.custom_vjp
        def watch(x: ArrayLike) -> ArrayLike:
            return x

        def forward(x: CustomVJPPrimal) -> tuple[ArrayLike, None]:
            found[number] = x.perturbed
            return x.value, None

        watch.defvjp(forward, lambda _, dx: (dx,), symbolic_zeros=True)
        return watch(x)

    def run(rest: Rest) -> list[ArrayLike]:
        made = model.enter(rest, batch)
        shapes.append(jax.tree.map(shape_dtype, made))
        leaves = jax.tree.leaves(made)
        found.extend([False] * len(leaves))
        return [watched(i, x) for i, x in enumerate(leaves) if is_inexact(x)]

    jax.eval_shape(lambda rest: jax.vjp(run, rest)[0], rest)
    return found, shapes[0]


def used(
    function: Callable[..., PyTree], rest: Rest, *others: PyTree
) -> Mapping[Hashable, PyTree[bool]]:
    """Which leaves of `rest` the results of a function of it depend on."""
    flat = Flat(jax.make_jaxpr(function)(rest, *others))
    outputs = {x for x in flat.outputs if not isinstance(x, Constant)}
    leaves, structure = jax.tree.flatten(rest)
    return structure.unflatten(
        [not outputs.isdisjoint(flat.dependents([n])) for n in range(len(leaves))]
    )
