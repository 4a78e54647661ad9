"""Runs `tx.update` on the loss's own tree for one layer, and `tx.init` for all.

The own tree has one layer's parameters, gradients and moments in place of a layer of
the same kind. All other leaves are zeros, and their updates are dead code. Masks,
labels, norms and factors are then the same as Optax's on that tree.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, trace
from paged_optax.backend.flax_variables import as_pure
from paged_optax.backend.memory import on_host
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, PyTreeDef
from paged_optax.engine.paged_array import Stored
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
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.same_updates import (
    CrossLayerError,
    Roles,
    SameUpdates,
    computations,
)
from paged_optax.layerwise.slices import (
    LayerIndex,
    on_device,
    read_slice,
    write_slice,
)
from paged_optax.state.leaves import is_quantized
from paged_optax.state.restore import abstract_state
from paged_optax.transform.context import known_shardings, within
from paged_optax.transform.trees import leaf_paths

#: Leaves by their numbers in the stacked tree. Zeros stand for absent leaves.
Leaves = Mapping[int, Stored]

#: New parameters, and new leaves of the state.
Updated = tuple[dict[int, Any], dict[int, Any]]

#: Applies updates to parameters.
Add = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeUpdate:
    """Updates one layer, or the parameters outside the layers.

    Attributes:
      layered: The parameters and the state, stacked.
      state_structure: The structure of the own state.
      state_members: For each leaf of the stacked state, its leaves in the own state.
      same: The transformation, the own tree, and the kinds of its layers.
    """

    layered: LayeredState
    state_structure: PyTreeDef
    state_members: Sequence[Members]
    same: SameUpdates

    @classmethod
    def create(
        cls,
        tx: optax.GradientTransformation,
        tree: LayerTree | None,
        layered: LayeredState,
        tree_state: PyTree,
    ) -> "TreeUpdate":
        """Traces the update.

        If `tree` is None, the stacks are the own tree. An element-wise update of a
        stack is the update of each slice, and `tx` updates slices of length 1.

        Raises:
          ValueError: If `tx` mixes parameters, or several elements of a stack.
        """
        tx = optax.with_extra_args_support(tx)
        if tree is None:
            structure = layered.partition.structure
            tree = LayerTree(structure, list(range(structure.num_leaves)))
            structure, members = layered.state_structure, range(len(layered.state))
        else:
            structure = jax.tree.structure(tree_state, is_leaf=is_quantized)
            members = tree.get_members(structure)
        same = SameUpdates.create(tx, tree, layered)
        if not tree.length:
            sliced = [n for n, flag in enumerate(layered.sliced) if flag]
            same.check_complete(layered, sliced)
            layered.check_same_stacks()
        return cls(layered, structure, members, same)

    def layer(
        self, i: LayerIndex, updates: Leaves, state: Leaves, params: Leaves
    ) -> Updated:
        """Updates layer i.

        All arrays have a leading axis of 1, except counts. Returns the parameters and
        the leaves of the state.
        """
        kinds = self.same.kinds
        runs = [functools.partial(self._updated, layers[0]) for layers in kinds]
        if len(runs) == 1:
            return runs[0](i, updates, state, params)
        numbers = np.zeros(self.layered.length, np.int32)
        for kind, layers in enumerate(kinds):
            numbers[layers] = kind
        which = jnp.asarray(numbers)[i]
        return lax.switch(which, runs, i, updates, state, params)

    def unsliced(
        self,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        """Updates parameters outside the layers, and whole stacks of small leaves."""
        members, _ = self.same.tree.stacked
        trees = (updates, members), (state, self.state_members), (params, members)
        remaining, small = (
            [
                {n: x for n, x in leaves.items() if isinstance(items[n], kind)}
                for leaves, items in trees
            ]
            for kind in (int, LayerNumbers)
        )
        new_params, new_state = self._updated(None, None, *remaining, add=add)
        if not small[2]:
            return new_params, new_state
        of_stacks = [self._of_kind(layers, *small) for layers in self.same.kinds]
        order = np.argsort(np.concatenate(self.same.kinds))
        merged = of_stacks[0]
        if len(of_stacks) > 1:
            join = lambda *xs: jnp.concatenate(xs)[order]
            merged = jax.tree.map(join, *of_stacks)
        return new_params | merged[0], new_state | merged[1]

    def _of_kind(
        self, layers: Sequence[int], updates: Leaves, state: Leaves, params: Leaves
    ) -> Updated:
        """Updates all layers of one kind with `jax.vmap`."""
        numbers = np.asarray(layers, np.int32)
        shared = jax.tree.map(on_device, self.layered.shared)
        trees = updates, state, params
        if len(layers) < self.layered.length:
            trees = jax.tree.map(lambda x: x[numbers], trees)

        def one(i: Array, trees: PyTree) -> PyTree:
            updates, state, params = jax.tree.map(lambda x: x[None], trees)
            args = i, updates, shared | state, params
            new_params, new_state = self._updated(layers[0], *args)
            # The updates of shared leaves are not used.
            new = new_params, {k: new_state[k] for k in state}
            return jax.tree.map(lambda x: x[0], new)

        return jax.vmap(one)(jnp.asarray(numbers), trees)

    def _updated(
        self,
        place: int | None,
        i: LayerIndex | None,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        """Runs `tx.update` on the own tree, with the leaves of layer i among zeros.

        They stand in the place of layer `place`, which is of the same kind. If `place`
        is None, the leaves are those outside the layers.
        """
        members, _ = self.same.tree.stacked
        layered, structure = self.layered, self.same.tree.structure
        fill = functools.partial(self._filled, place, functools.cache(jnp.zeros))
        tree_params = fill(members, params, layered.params)
        gradients = structure.unflatten(fill(members, updates, layered.params))
        moments = fill(self.state_members, state, layered.state)
        moments = self.state_structure.unflatten(moments)
        in_place = lambda m: m if isinstance(m, int) else m[place or 0]
        # A slice is divided as its stack is, which its type does not have.
        shardings: list[NamedSharding | None] = [None] * len(tree_params)
        for n in params:
            m, shards = members[n], layered.moment_shards[n]
            if i is not None and shards is not None:
                spec = PartitionSpec(*shards.spec[not isinstance(m, int) :])
                shardings[in_place(m)] = NamedSharding(shards.mesh, spec)
        with within(layer=i), known_shardings(tree_params, shardings):
            changes, new_state = self.same.tx.update(
                gradients, moments, structure.unflatten(tree_params)
            )
        tree_changes = structure.flatten_up_to(changes)
        if self.same.pruned:
            new_leaves = self.state_structure.flatten_up_to(new_state)
        else:  # a state may come in containers that `tx` does not return
            new_leaves = jax.tree.leaves(new_state, is_leaf=is_quantized)
        as_stack = lambda m, x: (
            x if isinstance(m, int) else jax.tree.map(lambda x: x[None], x)
        )

        def new_param(m: Members) -> Array:
            old, change = tree_params[in_place(m)], tree_changes[in_place(m)]
            return as_stack(m, add([old], [change])[0])

        def new_moment(m: Members, old: Stored) -> Stored:
            if in_place(m) < 0:
                return old  # a layer of this kind has no such moment
            return as_stack(m, new_leaves[in_place(m)])

        return (
            {n: new_param(members[n]) for n in params},
            {k: new_moment(self.state_members[k], x) for k, x in state.items()},
        )

    def _filled(
        self,
        place: int | None,
        zeros: Callable[[tuple[int, ...], np.dtype], Array],
        members: Sequence[Members],
        leaves: Leaves,
        like: Sequence[Stored],
    ) -> list[PyTree]:
        """The own tree's leaves, one layer's in the place of layer `place`."""

        def entry(n: int, member: Members) -> PyTree:
            stacked = isinstance(member, LayerNumbers)
            empty: PyTree = optax.MaskedNode()
            if not (stacked and self.same.pruned):
                shape = lambda x: x.shape[1:] if stacked else x.shape
                empty = jax.tree.map(lambda x: zeros(shape(x), x.dtype), like[n])
            if not stacked:
                return leaves.get(n, empty)
            if n in leaves and place is not None and member[place] >= 0:
                return jax.tree.map(lambda x: x[0], leaves[n]), empty
            return empty, empty

        entries = [entry(n, member) for n, member in enumerate(members)]
        return tree_leaves(members, entries, lambda pair, i: pair[i != place])


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
