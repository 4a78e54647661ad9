"""Initializes the state of a transformation for stacked parameters."""

from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, trace
from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape
from paged_optax.layerwise.layer_tree import (
    LayerNumbers,
    LayerTree,
    Members,
    is_stored,
    stack_of,
    stacked_shape,
    tree_leaves,
    with_stack,
)
from paged_optax.layerwise.same_updates import (
    CrossLayerError,
    Roles,
    computations,
)
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.layerwise.weights import on_device
from paged_optax.state.leaves import is_quantized
from paged_optax.state.restore import abstract_state
from paged_optax.transform.context import known_shardings, within
from paged_optax.transform.trees import leaf_paths


def init_stacked(
    tx: optax.GradientTransformation, tree: LayerTree, params: PyTree
) -> optax.OptState:
    """Initializes the state of `tx` for stacked parameters, layer by layer.

    Raises:
      ValueError: If `params` has no stacks, or if `tx.init` combines layers.
    """
    leaves: list[Array] = tree.stacked_leaves(params)
    members, _ = tree.stacked
    pairs = zip(leaves, members, strict=True)
    shapes = [_shape(x, isinstance(m, LayerNumbers)) for x, m in pairs]
    shapes = tree_leaves(members, shapes, lambda x, i: x)
    own = tree.structure.unflatten(shapes)
    paths, _ = leaf_paths(as_pure(own))
    stacks = [(n, m) for n, m in enumerate(members) if isinstance(m, LayerNumbers)]
    # The moments of a stack are all on the device, or all on the host.
    together = tuple((paths[index], n) for n, m in stacks for index in m)
    with within(stacks=together):
        entries = abstract_state(tx, own)
        types = tree.stack(entries, stacked_shape)
        same = _same_layers(tx, tree, own)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return types
        numbers = tree.get_members(
            jax.tree.structure(as_pure(entries), is_leaf=is_quantized)
        )

        def new_leaves(
            index: int | None, leaves: Sequence[Array], i: LayerIndex
        ) -> dict[int, PyTree]:
            """Initializes layer i in place of layer `index`; None: the other leaves.

            Masks and labels read the whole tree. XLA removes its other leaves.
            """
            given = {k: leaves[n] for n, k in _in_layer(members, index).items()}
            read = on_device if index is None else lambda x: read_slice(x, i)[0]
            full = [
                read(given[k]) if k in given else jnp.zeros(x.shape, x.dtype)
                for k, x in enumerate(shapes)
            ]
            with known_shardings(full, [x.sharding for x in shapes]):
                state = tx.init(tree.structure.unflatten(full))
            new = jax.tree.leaves(as_pure(state), is_leaf=is_quantized)
            return {n: new[k] for n, k in _in_layer(numbers, index).items()}

        like, structure = jax.tree.flatten(types, is_leaf=is_stored)
        # On a mesh of explicit axes a result without arguments would have no devices.
        run = jax.jit(new_leaves, static_argnums=0, keep_unused=True)
        write = jax.jit(write_slice, donate_argnums=0)
        state = run(None, leaves, 0)
        for i, index in enumerate(same):
            put = lambda stack, x, i=i: write(stack, on_device(x)[None], i)
            for n, x in run(index, leaves, i).items():
                if n not in state:
                    state[n] = jax.tree.map(_zeros, stack_of(like[n]))
                state[n] = jax.tree.map(put, state[n], x)
            jax.block_until_ready(state)
    pairs = ((x, state[n]) for n, x in enumerate(like))
    return structure.unflatten(with_stack(*pair) for pair in pairs)


def _in_layer(members: Sequence[Members], layer: int | None) -> dict[int, int]:
    """The own leaves of a layer, or of none, by the numbers of their stacked leaves."""
    if layer is None:
        return {n: m for n, m in enumerate(members) if isinstance(m, int)}
    stacks = ((n, m) for n, m in enumerate(members) if isinstance(m, LayerNumbers))
    return {n: m[layer] for n, m in stacks if m[layer] >= 0}


def _same_layers(
    tx: optax.GradientTransformation, tree: LayerTree, params: PyTree
) -> list[int]:
    """For each layer the first one whose moments are initialized equally.

    Raises:
      ValueError: If `tx.init` combines layers.
    """
    with within(plain=True):
        closed, state = trace(lambda params: tx.init(params), params)
    flat, roles = Flat(closed), Roles(tree, params)
    (paths, _), of_state = leaf_paths(state), roles.of("state", state)
    results = computations(flat, roles.of("parameter", params))
    layers = defaultdict[int | None, list[object]](list)
    for path, role, (result, read) in zip(paths, of_state, results, strict=True):
        if {x.layer for x in read} - {role.layer}:
            raise CrossLayerError(
                f"`init` computes state{keystr(path)} from parameters of several layers"
            )
        layers[role.layer].append((role.name, result))
    every = [layers[i] for i in range(tree.length)]
    return [every.index(x) for x in every]


def _shape(x: ArrayOrShape, stacked: bool) -> jax.ShapeDtypeStruct:
    """The shape of a parameter, or of one layer of a stack."""
    sharding, first = getattr(x, "sharding", None), int(stacked)
    if stacked and isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[first:], x.dtype, sharding=sharding)


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros with the placement of `like`."""
    if on_host(like):
        # NumPy's zeros take no memory before they are read.
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
    divided = isinstance(like.sharding, NamedSharding)
    device = like.sharding if divided else None
    return jnp.zeros(like.shape, like.dtype, device=device)
