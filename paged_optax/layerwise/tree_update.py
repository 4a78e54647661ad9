"""Updates one layer by running `tx.update` on the loss's own tree.

The own tree has one layer's parameters, gradients and moments in place of a layer of
the same kind. All other leaves are zeros, and their updates are dead code. Masks,
labels, norms and factors are then the same as Optax's on that tree.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.types import PyTreeDef
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import (
    LayerNumbers,
    LayerTree,
    Members,
    tree_leaves,
)
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.same_updates import SameUpdates
from paged_optax.layerwise.slices import LayerIndex
from paged_optax.layerwise.weights import on_device
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import known_shardings, within

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

    @functools.cached_property
    def by_kind(self) -> list[list[int]]:
        """The layers of each kind."""
        layers: dict[int, list[int]] = {}
        for i, kind in enumerate(self.same.kinds):
            layers.setdefault(kind, []).append(i)
        return list(layers.values())

    def layer(
        self, i: LayerIndex, updates: Leaves, state: Leaves, params: Leaves
    ) -> Updated:
        """Updates layer i.

        All arrays have a leading axis of 1, except counts. Returns the parameters and
        the leaves of the state.
        """
        runs = [functools.partial(self._updated, layers[0]) for layers in self.by_kind]
        if len(runs) == 1:
            return runs[0](i, updates, state, params)
        which = jnp.asarray(np.asarray(self.same.kinds, np.int32))[i]
        return lax.switch(which, runs, i, updates, state, params)

    def rest(
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
        of_stacks = [self._of_kind(layers, *small) for layers in self.by_kind]
        order = np.argsort(np.concatenate(self.by_kind))
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
        """Updates layer i in place of layer `place`, or the rest if that is None."""
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
