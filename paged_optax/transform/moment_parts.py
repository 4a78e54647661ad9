"""An update of parts: within a `jax.shard_map`, or of one layer of a stack.

There a moment may be a part of a larger one, of a shape that nothing tells. What a
codec stores of the part depends on the whole: whether it is coded at all, and how its
codes and scales are arranged. So the arrays that are held tell.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis
from paged_optax.backend.types import PyTreeDef, in_shard_map, varying, varying_axes
from paged_optax.codecs import Codec, arranged
from paged_optax.transform.context import Gate, current
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import StoredOrShape


def held_parts(shapes: PyTree, state: PyTree) -> dict[int, StoredOrShape]:
    """What a state holds of parts of moments that a codec stores.

    Args:
      shapes: The transformation's own state.
      state: The state.

    Returns:
      What is held, by the leaf's position; nothing where every moment is a whole.
    """
    leaves, structure = jax.tree.flatten(shapes)
    parts = in_shard_map() or current().layer is not None
    held = (parts and _held(structure, state)) or leaves
    # A moment that no codec stores has its own dtype, whatever part of it is held.
    plain = lambda x, aval: getattr(x, "dtype", None) == aval.dtype
    pairs = enumerate(zip(held, leaves, strict=True))
    return {i: x for i, (x, aval) in pairs if not plain(x, aval)}


def arranged_as(
    layout: StateLayout,
    codecs: Sequence[Codec | None],
    parts: Mapping[int, StoredOrShape],
) -> StateLayout:
    """A layout in which parts of moments are arranged as they were stored.

    Args:
      layout: The layout, in which they are arranged as if each were a whole.
      codecs: For each leaf the codec, or None.
      parts: What is held of parts, by the leaf's position.

    Returns:
      The layout. It is unchanged where no arrangement fits, for its own message.
    """
    new_codecs = list(layout.codecs)
    for position, held in parts.items():
        if (codec := codecs[position]) is not None:
            shape = layout.avals[position].shape
            each = (arranged(codec, shape, whole) for whole in _wholes(shape))
            fits = (x for x in each if _kinds(x.stored(shape)) == _kinds(held))
            new_codecs[position] = next(fits, new_codecs[position])
    return dataclasses.replace(layout, codecs=tuple(new_codecs))


def _held(structure: PyTreeDef, state: PyTree) -> list[StoredOrShape] | None:
    """What a state holds in each leaf's place."""
    try:
        return structure.flatten_up_to(state)
    except ValueError:
        return None  # of another structure: what reads it says so


def _wholes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shapes of which this may be a part, itself first."""
    if current().layer is not None and len(shape) > 2 and shape[0] == 1:
        yield shape
        shape = 2, *shape[1:]  # all stacks of several layers are arranged alike
    mesh = jax.sharding.get_abstract_mesh()
    manual = [
        size
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind is AxisType.Manual
    ]
    for places in itertools.product(range(len(shape) + 1), repeat=len(manual)):
        whole = [1, *shape]
        for place, size in zip(places, manual, strict=True):
            whole[place] *= size  # at 0: divided along no axis of the moment
        yield tuple(whole[1:])


def _kinds(stored: StoredOrShape) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """The shapes and dtypes of codes and scales, of a row of scales without its axis.

    Where shards are no ranges of the flattened moment, its scales have a row for each.
    """
    codes, *scales = jax.tree.leaves(stored)
    flat = lambda shape: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
    return [(codes.shape, codes.dtype), *((flat(x.shape), x.dtype) for x in scales)]


def without_rows(layout: StateLayout, state: PyTree) -> PyTree:
    """A state in which each coded part has the shapes of a moment of its own."""
    held = _held(layout.structure, state) if in_shard_map() else None
    if held is None:
        return state
    for position, codec in enumerate(layout.codecs):
        if codec is None:
            continue
        wanted = layout.stored(position)
        if _kinds(held[position]) == _kinds(wanted):
            arrays = zip(*map(jax.tree.leaves, (held[position], wanted)), strict=True)
            arrays = [x.reshape(like.shape) for x, like in arrays]
            held[position] = jax.tree.structure(held[position]).unflatten(arrays)
    return layout.structure.unflatten(held)


def with_rows(new: Sequence[Array], old: PyTree) -> list[Array]:
    """The arrays of a new state in the old one's shapes: undoes `without_rows`."""
    pairs = zip(new, jax.tree.leaves(old), strict=True)
    return [x if x.shape == np.shape(y) else x.reshape(y.shape) for x, y in pairs]


def as_results(
    analysis: Analysis,
    updates: PyTree,
    leaves: Sequence[StoredOrShape],
    gates: Sequence[Gate],
    restart: Gate,
) -> tuple[PyTree, list[StoredOrShape]] | None:
    """Gradients and moments that vary along the axes of what takes their places.

    A moment that is the same on all devices takes a gradient in that is not. Its buffer
    is overwritten page by page, and has one type from the first page to the last.

    Args:
      analysis: What computes the results.
      updates: The gradients.
      leaves: The state's leaves as they are stored.
      gates: For each gradient its gate; empty if all are open.
      restart: Whether the state restarts.

    Returns:
      The gradients and the leaves; None if they vary so already.
    """
    gate_of = lambda owner: gates[owner] if gates and owner is not None else gates
    axes = {
        position: varying_axes(aval, gate_of(leaf.owner), restart)
        for leaf in analysis.leaf_updates
        for position, aval in zip(leaf.outputs, leaf.avals, strict=False)
    }
    gradients, structure = jax.tree.flatten(updates)
    buffers = [*gradients, *leaves]
    # A page loop's carry keeps its type, so that buffers must vary before it begins.
    lacks = [
        p
        for p, wanted in axes.items()
        if any(wanted - varying_axes(x) for x in jax.tree.leaves(buffers[p]))
    ]
    for p in lacks:
        buffers[p] = varying(buffers[p], axes[p])
    if not lacks:
        return None
    first = len(gradients)
    return structure.unflatten(buffers[:first]), buffers[first:]
