"""Updates of parts of moments: within a `jax.shard_map`, or of one layer of a stack.

Such a part does not have the shape of the whole moment, on which its encoding depends:
whether it is coded at all, and the layout of codes and scales. The arrays of the state
show the encoding.
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
    """Returns the encoded parts of moments in a state, by the leaf's position."""
    leaves, structure = jax.tree.flatten(shapes)
    parts = in_shard_map() or current().layer is not None
    held = (parts and _held(structure, state)) or leaves
    # A part without a codec has the moment's dtype.
    plain = lambda x, aval: getattr(x, "dtype", None) == aval.dtype
    pairs = enumerate(zip(held, leaves, strict=True))
    return {i: x for i, (x, aval) in pairs if not plain(x, aval)}


def arranged_as(
    layout: StateLayout,
    codecs: Sequence[Codec | None],
    parts: Mapping[int, StoredOrShape],
) -> StateLayout:
    """Returns a layout with the arrangement of encoded parts.

    Parts of no known arrangement are unchanged, and `StateLayout` refuses them.
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
    try:
        return structure.flatten_up_to(state)
    except ValueError:
        return None  # of another structure, which `StateLayout` refuses


def _wholes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of which this may be a part, itself first."""
    if current().layer is not None and len(shape) > 2 and shape[0] == 1:
        yield shape
        shape = 2, *shape[1:]  # all stacks of several layers have one arrangement
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
    """Returns the shapes and dtypes of codes and scales; a row of scales is a vector.

    If shards are no ranges of the flattened moment, its scales have a row for each.
    """
    codes, *scales = jax.tree.leaves(stored)
    flat = lambda shape: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
    return [(codes.shape, codes.dtype), *((flat(x.shape), x.dtype) for x in scales)]


def without_rows(layout: StateLayout, state: PyTree) -> PyTree:
    """Returns a state whose coded parts have the shapes of whole moments."""
    held = _held(layout.structure, state) if in_shard_map() else None
    if held is None:
        return state
    for position, codec in enumerate(layout.codecs):
        if codec is None:
            continue
        stored = layout.stored(position)
        if _kinds(held[position]) == _kinds(stored):
            arrays = zip(*map(jax.tree.leaves, (held[position], stored)), strict=True)
            arrays = [x.reshape(like.shape) for x, like in arrays]
            held[position] = jax.tree.structure(held[position]).unflatten(arrays)
    return layout.structure.unflatten(held)


def with_rows(new: Sequence[Array], old: PyTree) -> list[Array]:
    """Undoes `without_rows`: reshapes new arrays to the shapes of the old state."""
    pairs = zip(new, jax.tree.leaves(old), strict=True)
    return [x if x.shape == np.shape(y) else x.reshape(y.shape) for x, y in pairs]


def as_results(
    analysis: Analysis,
    updates: PyTree,
    leaves: Sequence[StoredOrShape],
    gates: Sequence[Gate],
    restart: Gate,
) -> tuple[PyTree, list[StoredOrShape]] | None:
    """Casts gradients and moments to vary along the axes of their results.

    A replicated moment may be updated with a gradient that varies. Its buffer is
    overwritten page by page, and has one type from the first page to the last.

    Returns:
      The gradients and the leaves; None if they vary already.
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
        for p, names in axes.items()
        if any(names - varying_axes(x) for x in jax.tree.leaves(buffers[p]))
    ]
    for p in lacks:
        buffers[p] = varying(buffers[p], axes[p])
    if not lacks:
        return None
    first = len(gradients)
    return structure.unflatten(buffers[:first]), buffers[first:]
