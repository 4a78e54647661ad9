"""What the update of a whole tree computes of each leaf, and of one layer's slab.

`tx.update` is traced of the whole tree. So masks and labels, by path or by shape,
counts and schedules are what they are in an ordinary step.

Coded moments are no arrays of the parameters' shape. Where a stack has such moments,
`tx.update` itself runs on the tree with one layer in it, in stacks of length 1. That
this comes to the same is checked on the whole tree's jaxpr.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

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
    UNPAGED,
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
    """`tx` mixes several parameters, whose gradients are not there at once."""

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
    """An update, taken apart into one program a leaf.

    It is traced of whole stacks, so that what Optax chooses by shapes (masks, labels)
    is chosen as in an ordinary step.

    Attributes:
      analysis: The programs.
      constants: What they close over, by number.
      stacks: The outputs, by number, that are stacks of layers, updated in slabs.
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
          gradients: The gradients, or their shapes, as for the next two.
          state: The state.
          params: The parameters.
          stacks: Numbers of outputs, as above.
          name: A parameter's name, by its number.
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
        arguments: Sequence[ArrayLike | None],
        i: LayerIndex,
        wanted: Collection[int],
        length: int,
    ) -> list[Array]:
        """One layer's part of some stacks.

        Args:
          arguments: Gradients, state and parameters. Those that make a wanted stack
            are slabs. The others are not read.
          i: The layer.
          wanted: The numbers of the stacks, in ascending order.
          length: How many layers there are.

        Returns:
          What becomes of their slabs.
        """

        def cut(x: ArrayLike | None, shape: tuple[int, ...]) -> ArrayLike:
            assert x is not None  # all that a stack is made of is given
            # Arrays that the transformation closes over are whole stacks.
            if isinstance(x, Array | np.ndarray) and x.shape == shape:
                return slab(x, i, length)
            return x

        def run(leaf: LeafUpdate) -> Sequence[ArrayLike | None]:
            if not set(leaf.outputs) & set(wanted):
                return [None] * len(leaf.avals)
            shape = (leaf.shape[0] // length, *leaf.shape[1:])
            inputs = [cut(x, leaf.shape) for x in evaluation.inputs(leaf)]
            return leaf.program(inputs, shape)

        evaluation = Evaluation(self.analysis, [i, *arguments], self.constants)
        results = evaluation.results(list(map(run, self.analysis.leaf_updates)))
        return [results[output] for output in wanted]

    def differences(self, other: "Programs") -> list[int]:
        """Numbers of the stacks that another update computes in another way.

        Shapes do not count. If the equations of any stacks differ, it is those.
        Otherwise it is those that take other values from outside.
        """
        differ = lambda parts: [
            output
            for output in sorted(self.stacks)
            if parts(self._chosen(output)) != parts(other._chosen(output))
        ]
        return differ(lambda chosen: chosen[0]) or differ(lambda chosen: chosen)

    def _chosen(self, output: int) -> tuple[Sequence[object], tuple[object, ...]]:
        """The equations that make a stack, and what they are given."""
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
    """What an update computes of each leaf; None if moments are coded.

    Args:
      tx: The transformation.
      layered: The parameters and its state.
      gradients: For each parameter the shape of its gradient, of all layers.

    Raises:
      ValueError: If one layer's slice cannot be updated by it.
    """
    # With codecs too: a wrapper that skips steps, or reads codes and scales, shows so.
    programs = _traced(tx, layered, gradients, layered.state, layered.params)
    if not programs.not_elementwise:
        _refuse_state(layered, programs)
        return programs
    # Reading and writing codes is not element by element. What is computed in between
    # may be.
    with within(visitor=UNPAGED):
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
    """What an update computes, of the leaves of its arguments, or of their shapes."""

    def update(
        i: LayerIndex, gradients: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        # What a codec stores depends on how its parameter is divided.
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
    # What is seen through gives the state as it is computed, not as it is stored.
    flags = [*layered.slabbed, *([] if current().visitor == UNPAGED else stacked)]
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
    """Refuses moments of layers that cannot be cut, or told, layer by layer."""
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
        # Only of parts that are no ranges, and have no whole blocks, are there so many.
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
    """Refuses what one layer's update would choose otherwise than the whole's."""
    cut = lambda leaves, chosen: [
        jax.eval_shape(lambda x: slab(x, 0, layered.length), x) if yes else x
        for x, yes in zip(leaves, chosen, strict=True)
    ]
    try:
        with within(visitor=UNPAGED):
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
