"""Updates of whole stacks, traced once and run on slices.

`tx.update` is traced with whole stacks. Masks and labels by path or by shape, counts
and schedules are the same as in an ordinary step.

Encoded moments do not have the parameters' shape. For such stacks `tx.update` runs on
slices of length 1, and the whole tree's jaxpr shows that the result is the same.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
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
    FILLS,
    Analysis,
    Constant,
    Evaluation,
    LeafUpdate,
)
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, KeyPath, is_explicit
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.slabs import LayerIndex, slab
from paged_optax.transform.context import (
    current,
    known_shardings,
    sharding_in_type,
    within,
)

_WAY_OUT = (
    "If a mask or labels are computed from shapes, give the mask as it is, a tree of"
    " bools, and labels as a tree of strings; or leave out the codec."
)


class CrossLayerError(CrossLeafError):
    """Raised if `tx` mixes several parameters."""

    def __str__(self) -> str:
        return (
            f"layerwise_step updates each layer alone, and in tx {self.args[0]}: leave"
            " that out of tx. max_norm= clips by the global norm, and accumulate=True"
            " adds up micro-batches. Wrappers that skip steps, as MultiSteps and"
            " apply_if_finite do, need all gradients first; paged_optax.apply_if_finite"
            " may be around the whole of tx."
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
        update: Callable[[LayerIndex, PyTree, PyTree, PyTree], PyTree],
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        stacks: Collection[int],
        name: Callable[[int], str],
    ) -> "Programs":
        """Traces `update(i, gradients, state, params)` of layer i.

        Args:
          update: The update.
          gradients: The gradients, or their shapes.
          state: The state, or its shapes.
          params: The parameters, or their shapes.
          stacks: The numbers of the outputs that are updated in slices.
          name: Returns a parameter's name.
        """
        closed, _ = trace(update, jnp.int32(0), gradients, state, params)
        count = len(jax.tree.leaves(params))
        states = len(jax.tree.leaves(state))
        analysis, constants = analyse(
            closed,
            [None, *range(count), *[None] * states, *range(count)],
            [*range(count), *[None] * (len(closed.out_avals) - count)],
            name,
            range(1, 1 + len(closed.out_avals)),
        )
        return cls(analysis, constants, frozenset(stacks))

    @property
    def not_elementwise(self) -> frozenset[int]:
        """The stacks that are not updated element by element."""
        return self.stacks - self.analysis.elementwise

    def run(
        self,
        i: LayerIndex,
        updates: Sequence[Stored | None],
        state: Sequence[Stored | None],
        params: Sequence[Array | None],
        layered: LayeredState,
    ) -> tuple[list[Array | None], list[Stored | None]]:
        """Updates slice i of some stacks.

        Args:
          i: The layer.
          updates: The slices of the gradients; None for other leaves.
          state: The slices of the moments, and counts; None for other leaves.
          params: The slices of the parameters; None for other leaves.
          layered: The stacks.

        Returns:
          The new slices of the parameters and of the moments; None for other leaves.
        """
        length = layered.length

        def cut(x: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike:
            assert x is not None  # all inputs of an updated stack are slices
            # An array that the transformation closes over is a whole stack.
            if isinstance(x, Array | np.ndarray) and x.shape == shape:
                return slab(x, i, length)
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

    def differences(self, other: "Programs") -> list[int]:
        """Numbers of the stacks that another update computes differently.

        Shapes are ignored. Stacks with different inputs are returned only if no
        equations differ.
        """
        differ = lambda parts: [
            output
            for output in sorted(self.stacks)
            if parts(self._chosen(output)) != parts(other._chosen(output))
        ]
        return differ(lambda chosen: chosen[0]) or differ(lambda chosen: chosen)

    def _chosen(self, output: int) -> tuple[Sequence[object], tuple[object, ...]]:
        """The equations that compute a stack, and their inputs."""
        plain = lambda x: (
            (np.asarray(x.value).tobytes(), x.key[1:]) if isinstance(x, Constant) else x
        )
        for leaf in self.analysis.leaf_updates:
            if output in leaf.outputs:
                equations = [
                    (
                        equation.primitive.name,
                        equation.primitive.name in FILLS or equation.params,
                        [plain(x) for x in equation.inputs],
                        equation.outputs,
                    )
                    for equation in leaf.program.equations
                ]
                return equations, (leaf.inputs, leaf.outputs, leaf.between)
        return [plain(x) for n, x in self.analysis.direct if n == output], ()


def layer_programs(
    tx: optax.GradientTransformationExtraArgs,
    layered: LayeredState,
    gradients: Sequence[ArrayOrShape],
) -> Programs | None:
    """Returns the programs of an update; None if moments are encoded.

    Args:
      tx: The transformation.
      layered: The parameters and its state.
      gradients: The shapes of the gradients of all parameters.

    Raises:
      ValueError: If a slice of a stack cannot be updated alone.
    """
    # This also finds wrappers that skip steps, or that read codes and scales.
    programs = _traced(tx, layered, gradients, layered.state, layered.params)
    if not programs.not_elementwise:
        _refuse_state(layered, programs)
        return programs
    # Codecs are not element by element. The computation between them may be.
    with within(seen_through=True):
        whole = _traced(tx, layered, gradients, layered.state, layered.params)
    if whole.not_elementwise:
        name = layered.name(min(whole.not_elementwise))
        raise ValueError(
            f"the update of {name} is not element by element (a norm, a factored"
            " moment, a matrix product, noise), so that one layer's part of the stack"
            " cannot be updated without the others: with layerwise_step use a"
            " transformation such as paged_adamw, paged_lion or paged_sgd."
        )
    _refuse_state(layered, None)
    _refuse_choices_by_shape(tx, layered, whole, gradients)
    return None


def _traced(
    tx: optax.GradientTransformationExtraArgs,
    layered: LayeredState,
    gradients: Sequence[ArrayOrShape],
    state: Sequence[PyTree[ArrayOrShape]],
    params: Sequence[ArrayOrShape],
) -> Programs:

    def update(
        i: LayerIndex, gradients: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        # An encoded moment depends on its parameter's sharding.
        types = [sharding_in_type(x) for x in layered.params]
        explicit = [x if is_explicit(x) else None for x in types]
        leaves = jax.tree.leaves(params)
        with within(fetched=True, layer=i), known_shardings(leaves, explicit):
            return tx.update(gradients, state, params)

    stacked = [
        yes
        for x, yes in zip(state, layered.stacked, strict=True)
        for _ in jax.tree.leaves(x)
    ]
    # A trace without codecs returns the state in another form.
    flags = [*layered.slabbed, *([] if current().seen_through else stacked)]
    try:
        return Programs.of(
            update,
            layered.params_tree(gradients),
            layered.state_tree(state),
            layered.params_tree(params),
            [output for output, yes in enumerate(flags) if yes],
            layered.name,
        )
    except CrossLeafError as error:
        raise CrossLayerError(*error.args) from None


def _refuse_state(layered: LayeredState, programs: Programs | None) -> None:
    """Raises if moments of layers cannot be sliced, or belong to no known stack."""
    leaves = () if programs is None else programs.analysis.leaf_updates
    updated_with = {output: x.owner for x in leaves for output in x.outputs}
    output = len(layered.params)
    for path, x, owner, stacked in zip(
        layered.state_paths, layered.state, layered.owners, layered.stacked, strict=True
    ):
        number = updated_with.get(output)
        arrays = jax.tree.leaves(x)
        output += len(arrays)
        if stacked and owner is not None and owner not in layered.chunked:
            _refuse_other_stack(path, x, layered.params[owner])
        unstacked = not stacked and bool(arrays[0].ndim)
        if unstacked and number is not None and layered.slabbed[number]:
            raise ValueError(
                f"state{keystr(path)} is updated with {layered.name(number)}, and"
                " nothing in its path says so, so that no layer's part of it is"
                " known: keep moments in trees of the parameters' structure."
            )


def _refuse_other_stack(path: KeyPath, x: Stored, parameter: Array) -> None:
    length = parameter.shape[0]
    values = parameter.size // length
    fits = (
        x.shape == parameter.shape
        if not isinstance(x, Quantized)
        else (
            x.codes.shape[0] == length
            and (x.scales.ndim == 1 or x.scales.shape[0] == length)
            and x.scales.size % length == 0
            and values % -(-values // (x.scales.size // length)) == 0
        )
    )
    if fits:
        return
    way_out = "use moments of the parameters' own shape; with a codec, layers of whole"
    way_out += " blocks."
    if isinstance(x, Quantized) and x.scales.ndim == 2:
        # Scales have two axes only if parts are no ranges of whole blocks.
        way_out = (
            f"it is divided into {x.scales.shape[0]} parts, and a block runs through"
            " several rows of a part: divide another axis of the parameter, or none."
        )
    shapes = jax.tree.map(lambda x: x.shape, x)
    raise ValueError(
        f"state{keystr(path)} has shape {shapes}, which cannot be cut into the"
        f" {length} layers of its parameter of shape {parameter.shape}: {way_out}"
    )


def _refuse_choices_by_shape(
    tx: optax.GradientTransformationExtraArgs,
    layered: LayeredState,
    whole: Programs,
    gradients: Sequence[ArrayOrShape],
) -> None:
    """Raises if the update of a slice differs from the update of the whole stack."""
    cut = lambda leaves, chosen: [
        jax.eval_shape(lambda x: slab(x, 0, layered.length), x) if yes else x
        for x, yes in zip(leaves, chosen, strict=True)
    ]
    try:
        with within(seen_through=True):
            one = _traced(
                tx,
                layered,
                cut(gradients, layered.slabbed),
                cut(layered.state, layered.stacked),
                cut(layered.params, layered.slabbed),
            )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "where moments are coded each layer is updated in a stack of its own,"
            f" and tx.update refuses a stack of one layer: {error} {_WAY_OUT}"
        ) from error
    if differ := whole.differences(one):
        raise ValueError(
            f"the update of {layered.name(differ[0])} depends on the shape of the"
            " whole stack, and where moments are coded each layer is updated in a"
            f" stack of its own. {_WAY_OUT}"
        )
