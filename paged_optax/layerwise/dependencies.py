"""Finds the leaves of a model that depend on given parameters, and residuals.

Gradients are computed for leaves that depend on trained parameters. A parameter that
the prologue does not read, such as an output matrix, has its gradient before the layers
have theirs. A chunk of its moments then travels with each layer's.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, used_values
from paged_optax.backend.memory import on_host
from paged_optax.backend.types import PyTreeDef, on_one_device
from paged_optax.layerwise.forward import ModelFunctions, Rest, is_inexact
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.slices import Weights
from paged_optax.transform.codec_rules import SMALLEST_CODED


class Learned(NamedTuple):
    """Marks the leaves that depend on trained parameters.

    No other leaf has a gradient. The gradient of a table would be one more buffer,
    which each layer adds to. Gradients by a frozen teacher's activations would need a
    backward pass through all of its layers.

    Attributes:
      x: Marks of the leaves of the layers' input.
      context: Marks of the leaves of the context.
    """

    x: list[bool]
    context: list[bool]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals"],
    meta_fields=["structure", "known"],
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """The residuals of a layer's backward pass.

    Attributes:
      residuals: The residuals that are not among the layer's arguments.
      structure: The structure of the backward pass, a pytree of residuals.
      known: For each residual its place among the layer's arguments, or None.
    """

    residuals: list[Array | jax.ShapeDtypeStruct]
    structure: PyTreeDef
    known: tuple[int | None, ...]

    @staticmethod
    def of(pull: PyTree[Array], args: PyTree[Array]) -> "Saved":
        """Separates the residuals of a backward pass from the layer's arguments."""
        leaves, structure = jax.tree.flatten(pull)
        places = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(args))}
        known = tuple(places.get(id(leaf)) for leaf in leaves)
        pairs = zip(leaves, known, strict=True)
        return Saved([y for y, n in pairs if n is None], structure, known)

    def pull(
        self, residuals: Sequence[Array], args: PyTree[Array]
    ) -> Callable[..., Any]:
        """Returns the backward pass with these residuals and arguments."""
        leaves, others = jax.tree.leaves(args), iter(residuals)
        return jax.tree.unflatten(
            self.structure,
            [next(others) if n is None else leaves[n] for n in self.known],
        )


def learned(
    model: ModelFunctions, weights: Weights, rest: Rest, batch: PyTree
) -> Learned:
    """Finds the leaves of the layers' input and of the context that have gradients."""
    prologue, shapes = jax.make_jaxpr(model.run_prologue, return_shape=True)(
        rest, batch
    )
    x, context = shapes
    every = [is_inexact(leaf) for leaf in jax.tree.leaves(x)]
    entering = _learned_results(Flat(prologue), range(len(jax.tree.leaves(rest))))
    marks, seen = entering[: len(every)], entering[len(every) :]
    if sum(every) < 2:
        return Learned(every, seen)

    def layer(stacks: list[Array], x: PyTree, context: PyTree) -> PyTree:
        slices = weights.of(weights.slices(stacks, 0))
        return model.run_layer(*slices, x, context, jnp.int32(0))[0]

    flat = Flat(jax.make_jaxpr(layer)(weights.stacks, x, context))
    first = len(weights.stacks)
    while True:
        inputs = [n for n, flag in enumerate((*marks, *seen), first) if flag]
        outputs = _learned_results(flat, [*range(first), *inputs])
        outputs = [old or new for old, new in zip(marks, outputs, strict=True)]
        if outputs == marks:
            return Learned(marks, seen)
        marks = outputs


def _learned_results(flat: Flat, values: Iterable[int]) -> list[bool]:
    """Marks the results that have gradients by these values."""
    reached = set(values)
    for eqn in flat.eqns:
        stops = eqn.primitive.name == "stop_gradient"
        if not stops and not reached.isdisjoint(eqn.numbers):
            reached.update(x for x in eqn.outputs if is_inexact(flat.avals[x]))
    return [not isinstance(x, Constant) and x in reached for x in flat.outputs]


def used(
    function: Callable[..., PyTree], rest: Rest, *others: PyTree
) -> Mapping[Hashable, PyTree[bool]]:
    """Marks the leaves of `rest` that a function's results depend on."""
    flat = Flat(jax.make_jaxpr(function)(rest, *others))
    leaves, structure = jax.tree.flatten(rest)
    read = {x for n in flat.needed(flat.outputs) for x in flat.eqns[n].numbers}
    read.update(used_values(flat.outputs))
    return structure.unflatten([n in read for n in range(len(leaves))])


# Rows of a chunk are a multiple of this: whole tiles of a TPU, also of four-code words.
_ROWS = 32


def chunked_leaves(
    run: Callable[[Rest, PyTree], PyTree], layered: LayeredState, batch: PyTree
) -> list[int]:
    """Returns the parameters outside the layers that can be updated in chunks."""
    partition = layered.partition
    used_first = partition.combine(
        [True] * partition.in_layers.count(True),
        partition.others(used(run, partition.rest, batch)),
    )
    owned = lambda k, n: layered.param_indices[k] == n and k not in layered.shared
    whole = lambda y, rows: y.ndim >= 2 and y.shape[0] % (layered.length * rows) == 0

    def divides(n: int, x: Array) -> bool:
        """True if a parameter and its moments divide into chunks of whole rows."""
        moments = [y for k, y in enumerate(layered.state) if owned(k, n)]
        arrays: list[Array] = jax.tree.leaves(moments)
        if not any(map(on_host, arrays)) or on_host(x) or not on_one_device(arrays):
            return False
        large = x.size // layered.length >= SMALLEST_CODED
        return large and whole(x, _ROWS) and all(whole(y, _ROWS // 4) for y in arrays)

    params = enumerate(layered.params)
    return [n for n, x in params if not used_first[n] and divides(n, x)]
