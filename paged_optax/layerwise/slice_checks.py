"""Checks of updates and states whose stacks are updated in slices."""

from collections.abc import Sequence

import jax
import optax
from jax import Array

from paged_optax.analysis.program import Analysis
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath
from paged_optax.codecs import Quantized
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.same_updates import TracedUpdates

_WAY_OUT = (
    "If a mask or labels are computed from shapes, give the mask as it is, a tree of"
    " bools, and labels as a tree of strings; or leave out the codec."
)


def refuse_dependence(
    tx: optax.GradientTransformationExtraArgs,
    layered: LayeredState,
    gradients: Sequence[jax.ShapeDtypeStruct],
) -> None:
    """Raises if `tx` without its codecs does not update each slice alone.

    Codecs are not element by element. The computation between them may be.

    Raises:
      ValueError: If the update of a slice differs from the update of the whole stack.
    """
    traced = TracedUpdates(tx, LayerTree.of_stacks(layered.partition.structure), {})
    params = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layered.params]
    whole = traced.update(layered.params_tree(gradients), layered.params_tree(params))
    names = [layered.name(n) for n, sliced in enumerate(layered.sliced) if sliced]
    if odd := whole.not_elementwise(names):
        raise ValueError(
            f"the update of {odd[0]} is not element by element (a norm, a factored"
            " moment, a matrix product, noise), so that one layer's part of the stack"
            " cannot be updated without the others: with layerwise_step use a"
            " transformation such as paged_adamw, paged_lion or paged_sgd."
        )
    refuse_unsliced_state(layered, None)
    cut = lambda leaves: layered.params_tree(
        [
            jax.ShapeDtypeStruct((x.shape[0] // layered.length, *x.shape[1:]), x.dtype)
            if sliced
            else x
            for x, sliced in zip(leaves, layered.sliced, strict=True)
        ]
    )
    try:
        one = traced.update(cut(gradients), cut(params))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "where moments are coded each layer is updated in a stack of its own,"
            f" and tx.update refuses a stack of one layer: {error} {_WAY_OUT}"
        ) from error
    if differ := whole.differences(one, names):
        raise ValueError(
            f"the update of {differ[0]} depends on the shape of the whole stack, and"
            " where moments are coded each layer is updated in a stack of its own."
            f" {_WAY_OUT}"
        )


def refuse_unsliced_state(layered: LayeredState, analysis: Analysis | None) -> None:
    """Raises if moments of layers cannot be sliced, or belong to no known stack."""
    leaves = () if analysis is None else analysis.leaf_updates
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
        if unstacked and number is not None and layered.sliced[number]:
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
