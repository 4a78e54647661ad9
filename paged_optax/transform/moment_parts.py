"""Updates of parts of moments: within a `jax.shard_map`, or of one layer of a stack.

Such a part does not have the shape of the whole moment, on which its encoding depends:
whether it is coded at all, and the layout of codes and scales. The arrays of the state
show the encoding.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.analysis.program import Analysis
from paged_optax.backend.types import (
    ArrayOrShape,
    in_shard_map,
    varying,
    varying_axes,
)
from paged_optax.codecs import Codec, arranged
from paged_optax.transform.context import Gate, current
from paged_optax.transform.trees import StoredOrShape


def held_parts(shapes: PyTree, state: PyTree) -> dict[int, StoredOrShape]:
    """Returns the encoded parts of moments in a state, by the leaf's position."""
    if not in_shard_map() and current().layer is None:
        return {}
    avals, structure = jax.tree.flatten(shapes)
    try:
        pairs = enumerate(zip(structure.flatten_up_to(state), avals, strict=True))
    except ValueError:
        return {}  # of another structure, which `StateLayout` refuses
    # A part without a codec has the moment's dtype.
    return {i: x for i, (x, y) in pairs if getattr(x, "dtype", None) != y.dtype}


def arranged_like(
    part: StoredOrShape, codec: Codec, shape: tuple[int, ...]
) -> Codec | None:
    """Returns a codec as it stores an encoded part; None: in no known arrangement."""
    candidates = (arranged(codec, shape, full) for full in _wholes(shape))
    return next(
        (x for x in candidates if layout_kinds(x.stored(shape)) == layout_kinds(part)),
        None,
    )


def _wholes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of which this may be a part, itself first."""
    if current().layer is not None and len(shape) > 2 and shape[0] == 1:
        yield shape
        shape = 2, *shape[1:]  # all stacks of several layers have one arrangement
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = [size for size, kind in sizes if kind is AxisType.Manual]
    for places in itertools.product(range(len(shape) + 1), repeat=len(manual)):
        full = [1, *shape]
        for place, size in zip(places, manual, strict=True):
            full[place] *= size  # at 0: divided along no axis of the moment
        yield tuple(full[1:])


def layout_kinds(stored: StoredOrShape) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Returns the shapes and dtypes of codes and scales; a row of scales is a vector.

    If shards are no ranges of the flattened moment, its scales have a row for each.
    """
    flat = lambda shape: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
    return [
        (flat(x.shape) if index else x.shape, x.dtype)
        for index, x in enumerate(jax.tree.leaves(stored))
    ]


def reshaped_like(x: ArrayOrShape, like: ArrayOrShape) -> ArrayOrShape:
    """Returns an array in the shape of another: scales with or without a row."""
    if x.shape == like.shape or isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x.reshape(like.shape)


def as_results(
    analysis: Analysis,
    buffers: Sequence[StoredOrShape],
    gates: Sequence[Gate],
    reset: Gate,
) -> list[StoredOrShape] | None:
    """Casts gradients and moments to vary along the axes of their results.

    A replicated moment may be updated with a gradient that varies. Its buffer is
    overwritten page by page, and has one type from the first page to the last.

    Returns:
      The gradients and the leaves; None if they vary already.
    """
    axes = {
        index: varying_axes(
            aval,
            gates
            if leaf.param_index is None
            else gates[leaf.param_index : leaf.param_index + 1],
            reset,
        )
        for leaf in analysis.leaf_updates
        for index, aval in zip(leaf.outputs, leaf.avals, strict=False)
    }
    buffers = list(buffers)
    # A page loop's carry keeps its type, so that buffers must vary before it begins.
    lacks = [
        p
        for p, names in axes.items()
        if any(names - varying_axes(x) for x in jax.tree.leaves(buffers[p]))
    ]
    for p in lacks:
        buffers[p] = varying(buffers[p], axes[p])
    return buffers if lacks else None
