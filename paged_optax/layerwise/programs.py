"""Updates of whole stacks, traced once and run on slices.

`tx.update` is traced with whole stacks. Masks and labels by path or by shape, counts
and schedules are the same as in an ordinary step.

Encoded moments do not have the parameters' shape. For such stacks `tx.update` runs on
slices of length 1, and the whole tree's jaxpr shows that the result is the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import trace
from paged_optax.analysis.per_leaf import CrossLeafError, analyse
from paged_optax.analysis.program import (
    Analysis,
    Evaluation,
    LeafUpdate,
)
from paged_optax.backend.types import is_explicit
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.same_updates import CrossLayerError
from paged_optax.layerwise.slice_checks import refuse_dependence, refuse_unsliced_state
from paged_optax.layerwise.slices import LayerIndex, read_slice
from paged_optax.transform.context import (
    known_shardings,
    sharding_in_type,
    within,
)


@dataclasses.dataclass(frozen=True)
class Programs:
    """One program for each leaf of an update.

    Attributes:
      analysis: The programs.
      constants: Their captured values, by number.
      stacks: The numbers of the outputs that are updated in slices.
    """

    analysis: Analysis
    constants: Mapping[int, ArrayLike] = dataclasses.field(compare=False)
    stacks: frozenset[int]

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        layered: LayeredState,
        gradients: Sequence[jax.ShapeDtypeStruct],
    ) -> "Programs":
        """Traces an update of whole stacks."""

        def update(
            i: LayerIndex, gradients: PyTree, state: PyTree, params: PyTree
        ) -> tuple[PyTree, PyTree]:
            # An encoded moment depends on its parameter's sharding.
            types = [sharding_in_type(x) for x in layered.params]
            explicit = [x if is_explicit(x) else None for x in types]
            leaves = jax.tree.leaves(params)
            with within(fetched=True, layer=i), known_shardings(leaves, explicit):
                return tx.update(gradients, state, params)

        trees = (
            layered.params_tree(gradients),
            layered.state_tree(layered.state),
            layered.params_tree(layered.params),
        )
        count, states = len(layered.params), len(jax.tree.leaves(trees[1]))
        try:
            closed, _ = trace(update, jnp.int32(0), *trees)
            analysis, constants = analyse(
                closed,
                [None, *range(count), *[None] * states, *range(count)],
                [*range(count), *[None] * (len(closed.out_avals) - count)],
                layered.name,
                range(1, 1 + len(closed.out_avals)),
            )
        except CrossLeafError as error:
            raise CrossLayerError(*error.args) from None
        stacked = [
            yes
            for x, yes in zip(layered.state, layered.stacked, strict=True)
            for _ in jax.tree.leaves(x)
        ]
        flags = [*layered.sliced, *stacked]
        stacks = frozenset(output for output, yes in enumerate(flags) if yes)
        return cls(analysis, constants, stacks)

    @property
    def elementwise(self) -> bool:
        """True if all stacks are updated element by element."""
        return self.stacks <= self.analysis.elementwise

    def run(
        self,
        i: LayerIndex,
        updates: Sequence[Stored | None],
        state: Sequence[Stored | None],
        params: Sequence[Stored | None],
        layered: LayeredState,
    ) -> tuple[list[Array | None], list[Stored | None]]:
        """Updates slice i of some stacks."""
        length = layered.length

        def cut(x: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike:
            assert x is not None  # all inputs of an updated stack are slices
            # An array that the transformation closes over is a whole stack.
            if isinstance(x, Array | np.ndarray) and x.shape == shape:
                return read_slice(x, i, length)
            return x

        def run(leaf: LeafUpdate) -> Sequence[ArrayLike | None]:
            if not set(leaf.outputs) & {*new_params, *new_state}:
                return [None] * len(leaf.avals)
            shape = (leaf.shape[0] // length, *leaf.shape[1:])
            inputs = [cut(x, leaf.shape) for x in evaluation.inputs(leaf)]
            return leaf.program(inputs, shape)

        sizes = [len(jax.tree.leaves(x)) for x in layered.state]
        first = accumulate(sizes, initial=len(params))
        slots = zip(first, state, layered.stacked)  # noqa: B905  `first` has one more
        new_state = [n for n, x, stacked in slots if stacked and x is not None]
        new_params = [n for n in layered.numbers if params[n] is not None]
        arrays = [
            y
            for x, size in zip(state, sizes, strict=True)
            for y in ([None] * size if x is None else jax.tree.leaves(x))
        ]
        arguments = [i, *updates, *arrays, *params]
        evaluation = Evaluation(self.analysis, arguments, self.constants)
        results = evaluation.results(list(map(run, self.analysis.leaf_updates)))
        old = [x for n in new_params if (x := params[n]) is not None]
        new = optax.apply_updates(old, [results[n] for n in new_params])
        leaves = dict(zip(new_params, jax.tree.leaves(new), strict=True))
        moments = iter([results[n] for n in new_state])
        return [leaves.get(n) for n in range(len(params))], [
            next(moments) if stacked and x is not None else None
            for x, stacked in zip(state, layered.stacked, strict=True)
        ]


def layer_programs(
    tx: optax.GradientTransformationExtraArgs,
    layered: LayeredState,
    gradients: Sequence[jax.ShapeDtypeStruct],
) -> Programs | None:
    """Returns the programs of an update; None if moments are encoded.

    Raises:
      ValueError: If a slice of a stack cannot be updated alone.
    """
    # This also finds wrappers that skip steps, or that read codes and scales.
    programs = Programs.of(tx, layered, gradients)
    if programs.elementwise:
        refuse_unsliced_state(layered, programs.analysis)
        return programs
    refuse_dependence(tx, layered, gradients)
    return None
