"""Initializes the state of a transformation for stacked parameters."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import DEVICE, HOST, memory_kinds, on_host
from paged_optax.backend.types import ArrayOrShape, is_traced
from paged_optax.layerwise.layer_tree import (
    LayerNumbers,
    LayerTree,
    Members,
    SomeLayers,
    is_stored,
    stacked_shape,
    tree_leaves,
)
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.state.leaves import is_quantized
from paged_optax.state.restore import abstract_state
from paged_optax.transform.context import within
from paged_optax.transform.trees import paths_of


def init_stacked(
    tx: optax.GradientTransformation, tree: LayerTree, params: PyTree
) -> optax.OptState:
    """Initializes the state of `tx` for stacked parameters, layer by layer."""
    leaves: list[Array] = jax.tree.leaves(params)
    members, _ = tree.stacked
    shapes = [_layer_shape(m, x) for m, x in zip(members, leaves, strict=True)]
    shapes = tree_leaves(members, shapes, lambda x, i: x)
    shapes = tree.structure.unflatten(shapes)
    paths, _ = paths_of(as_pure(shapes))
    stacks = [(n, x) for n, x in enumerate(members) if isinstance(x, LayerNumbers)]
    # The moments of a stack are all on the device, or all on the host.
    together = tuple((paths[number], n) for n, x in stacks for number in x)
    with within(stacks=together):
        state = tree.stack(abstract_state(tx, shapes), stacked_shape)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return state
    return _filled(tx, tree, leaves, state)


def _filled(
    tx: optax.GradientTransformation,
    tree: LayerTree,
    params: Sequence[Array],
    shapes: PyTree[jax.ShapeDtypeStruct],
) -> optax.OptState:
    """Fills a state: first outside the layers, then each layer."""
    members, _ = tree.stacked

    def leaves_of(layer: int | None) -> tuple[list[PyTree], list[Members]]:
        # Arrays of size zero stand for the other leaves: masks and labels read the
        # whole tree, and no moment of these leaves takes memory.
        blanks = [_blank(m, x) for m, x in zip(members, params, strict=True)]
        outside = params if layer is None else blanks
        pairs = zip(members, params, blanks, outside, strict=True)
        entries = [y if isinstance(m, int) else (x, blank) for m, x, blank, y in pairs]
        at = lambda pair, i: _read(pair[0], i) if i == layer else pair[1]
        leaves = tree_leaves(members, entries, at)
        state = as_pure(tx.init(tree.structure.unflatten(leaves)))
        numbered, structure = jax.tree.flatten(state, is_leaf=is_quantized)
        return numbered, tree.members_of(structure)

    numbered, of_state = leaves_of(None)
    wanted, structure = jax.tree.flatten(shapes, is_leaf=is_stored)
    state = [numbered[m] if isinstance(m, int) else None for m in of_state]
    write = jax.jit(write_slice, donate_argnums=0)
    for i in range(tree.length):
        numbered, _ = leaves_of(i)
        for n, m in enumerate(of_state):
            if isinstance(m, int) or (number := m[i]) < 0:
                continue
            new, like = numbered[number], wanted[n]
            if state[n] is None:
                like = like.stack if isinstance(like, SomeLayers) else like
                state[n] = jax.tree.map(_zeros, like, new)
            put_layer = lambda stack, x, i=i: write(
                stack, jax.device_put(x, DEVICE)[None], i
            )
            state[n] = jax.tree.map(put_layer, state[n], new)
        jax.block_until_ready(state)
    wrapped = [
        SomeLayers(x, like.present) if isinstance(like, SomeLayers) else x
        for x, like in zip(state, wanted, strict=True)
    ]
    return structure.unflatten(wrapped)


def _layer_shape(members: Members, x: ArrayOrShape) -> PyTree:
    """The shape of a leaf, or of one layer of a stack."""
    sharding = getattr(x, "sharding", None)
    if isinstance(members, int):
        return (
            x
            if sharding is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        )
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _blank(members: Members, x: Array) -> Array:
    shape = x.shape if isinstance(members, int) else x.shape[1:]
    return jnp.zeros((0, *shape[1:]) if shape else (), x.dtype)


def _read(x: Array, layer: int) -> Array:
    """Reads one layer of a stack to the device."""
    sharding = x.sharding
    if not is_traced(x) and isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
        sharding = sharding.with_memory_kind(memory_kinds()[0])
    else:
        sharding = None
    # JAX compiles one function once for all layers.
    return jax.jit(_layer_of, out_shardings=sharding)(x, layer)


def _layer_of(x: Array, i: LayerIndex) -> Array:
    return read_slice(x, i)[0]


def _zeros(like: jax.ShapeDtypeStruct, layer: Array) -> Array:
    """A stack of zeros with the placement of `like`."""
    if is_traced(layer):
        zeros = jnp.zeros(like.shape, like.dtype)
        return jax.device_put(zeros, HOST) if on_host(like) else zeros
    if on_host(like):
        # NumPy's zeros take no memory before they are read.
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
    if isinstance(layer.sharding, NamedSharding):
        return jnp.zeros(like.shape, like.dtype, device=like.sharding)
    return jnp.zeros(like.shape, like.dtype)
