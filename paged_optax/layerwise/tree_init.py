"""Initializes the state of a transformation for stacked parameters."""

from collections.abc import Callable, Sequence

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
        own = abstract_state(tx, shapes)
        state = tree.stack(own, stacked_shape)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return state
    return _filled(tx, tree, leaves, own, state)


def _filled(
    tx: optax.GradientTransformation,
    tree: LayerTree,
    params: Sequence[Array],
    own: PyTree[jax.ShapeDtypeStruct],
    shapes: PyTree[jax.ShapeDtypeStruct],
) -> optax.OptState:
    """Fills a state: first outside the layers, then each layer.

    Args:
      tx: The transformation.
      tree: The loss's own tree.
      params: The stacked parameters.
      own: The types of the state of the own tree.
      shapes: The types of the stacked state.
    """
    members, _ = tree.stacked
    of_own, structure_of_own = jax.tree.flatten(as_pure(own), is_leaf=is_quantized)
    of_state = tree.members_of(structure_of_own)

    def leaves_of(layer: int | None) -> dict[int, PyTree]:
        """The leaves of one layer's state, by their numbers in the own tree's."""
        numbers = [m if isinstance(m, int) else -1 for m in of_state]
        if layer is not None:
            numbers = [-1 if isinstance(m, int) else m[layer] for m in of_state]
        numbers = [number for number in numbers if number >= 0]
        # Arrays of size zero stand for the other leaves: masks and labels read the
        # whole tree, and no moment of these leaves takes memory.
        leaves = made(layer, _blank)
        state = as_pure(tx.init(tree.structure.unflatten(leaves)))
        found, structure = jax.tree.flatten(state, is_leaf=is_quantized)
        shapes_of = lambda leaves: [
            [x.shape for x in jax.tree.leaves(leaves[n])] for n in numbers
        ]
        if structure != structure_of_own or shapes_of(found) != shapes_of(of_own):
            found = by_shape(layer, numbers)
        return {n: found[n] for n in numbers}

    def made(
        layer: int | None, blank: Callable[[Members, Array], PyTree]
    ) -> list[PyTree]:
        blanks = [blank(m, x) for m, x in zip(members, params, strict=True)]
        outside = params if layer is None else blanks
        pairs = zip(members, params, blanks, outside, strict=True)
        entries = [y if isinstance(m, int) else (x, blank) for m, x, blank, y in pairs]
        at = lambda pair, i: _read(pair[0], i) if i == layer else pair[1]
        return tree_leaves(members, entries, at)

    def by_shape(layer: int | None, numbers: Sequence[int]) -> dict[int, PyTree]:
        """The same of a transformation whose masks or labels depend on shapes.

        All leaves have their shapes. XLA removes the moments that are not returned.
        """
        leaves = made(layer, _layer_shape)
        is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)

        def init(arrays: Sequence[Array]) -> dict[int, PyTree]:
            present = iter(arrays)
            full = [
                jnp.zeros(x.shape, x.dtype) if is_shape(x) else next(present)
                for x in leaves
            ]
            state = as_pure(tx.init(tree.structure.unflatten(full)))
            found = jax.tree.leaves(state, is_leaf=is_quantized)
            return {n: found[n] for n in numbers}

        return jax.jit(init)([x for x in leaves if not is_shape(x)])

    numbered = leaves_of(None)
    wanted, structure = jax.tree.flatten(shapes, is_leaf=is_stored)
    state = [numbered[m] if isinstance(m, int) else None for m in of_state]
    write = jax.jit(write_slice, donate_argnums=0)
    for i in range(tree.length):
        numbered = leaves_of(i)
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
