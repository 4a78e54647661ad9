"""One layer's update, as `tx.update` computes it in the loss's own tree.

`tx.update` runs on the own tree with one layer's parameters, gradients and moments in
the place of a layer that is updated alike. All other leaves are zeros, whose updates
are dead code. Masks, labels, norms and factors are then those of Optax on that tree.

Which layers are updated alike is read off a trace of the whole own tree: each leaf's
program, and what it is given.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from paged_optax.backend.memory import PINNED_HOST, on_host, typed_by_memory
from paged_optax.backend.types import ArrayOrShape, PyTreeDef
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree, Members
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.same_updates import (
    TracedUpdates,
    alike,
    refuse_chunks,
    tree_shapes,
)
from paged_optax.layerwise.slabs import LayerIndex
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import TYPES, within

#: Leaves by the numbers of the stacked tree; None: zeros, whose update nobody takes.
Leaves = Sequence[Stored | None]

Value = TypeVar("Value")

#: New parameters, and new leaves of the state, None where they were not given. Those
#: that were given are arrays: a caller reads no others.
Updated = tuple[list[Any], list[Any]]

#: Applies updates to parameters.
Add = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeUpdate:
    """The update of one layer, and of what is outside the layers.

    Attributes:
      tx: The transformation.
      tree: The loss's own tree.
      layered: The parameters and the state, stacked.
      state_structure: The structure of the own state.
      state_members: For each leaf of the stacked state those of the own state.
      kinds: For each layer the number of its kind, of layers that are updated alike.
      pruned: Whether a layer is updated alike in a tree that has no other layers: they
        are `optax.MaskedNode`s, and take no time to trace.
    """

    tx: optax.GradientTransformationExtraArgs
    tree: LayerTree
    layered: LayeredState
    state_structure: PyTreeDef
    state_members: Sequence[Members]
    kinds: tuple[int, ...]
    pruned: bool

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        tree: LayerTree,
        layered: LayeredState,
        dtypes: Sequence[np.dtype],
    ) -> "TreeUpdate":
        """Traces the update.

        Args:
          tx: The transformation.
          tree: The loss's own tree.
          layered: The parameters and the state, stacked.
          dtypes: For each parameter the dtype of its gradient.
        """
        params = tree_shapes(tree, layered.params)
        members, structure = tree_state(tx, tree, params)
        gradients = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(layered.params, dtypes, strict=True)
        ]
        traced = TracedUpdates(tx, tree, {})
        whole = traced.update(tree_shapes(tree, gradients), params)
        kinds = alike(whole.layers)
        firsts = [None, *map(kinds.index, range(max(kinds) + 1))]
        # Zeros of other layers take time to trace.
        try:
            pruned = all(
                whole.agrees(
                    traced.update(
                        tree_shapes(tree, gradients, (k,)),
                        tree_shapes(tree, layered.params, (k,)),
                    ),
                    k,
                )
                for k in firsts
            )
        except Exception:  # `tx` has a tree of its own, of all layers
            pruned = False
        if layered.chunked:
            refuse_chunks(traced, whole, layered, gradients)
        return cls(tx, tree, layered, structure, members, kinds, pruned)

    @functools.cached_property
    def by_kind(self) -> list[list[int]]:
        """The layers of each kind."""
        return [
            [i for i, kind in enumerate(self.kinds) if kind == k]
            for k in range(max(self.kinds) + 1)
        ]

    def layer(
        self,
        i: LayerIndex,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
    ) -> Updated:
        """Updates layer i.

        Args:
          i: The layer.
          updates: The gradients, those of the layer with a leading axis of 1.
          state: The leaves of the state, those of the layer likewise.
          params: The parameters, likewise.

        Returns:
          The parameters, and the leaves of the state; None where they were not given.
        """
        runs = [functools.partial(self._as_layer, layers[0]) for layers in self.by_kind]
        if len(runs) == 1:
            return runs[0](i, updates, state, params)
        if isinstance(i, int | np.integer):
            return runs[self.kinds[i]](i, updates, state, params)
        which = jnp.asarray(np.asarray(self.kinds, np.int32))[i]
        return lax.switch(which, runs, i, updates, state, params)

    def rest(
        self,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        """Updates what is outside the layers, and whole stacks of small leaves.

        Args:
          updates: The gradients, those of stacks with all layers.
          state: The leaves of the state, those of stacks likewise.
          params: The parameters, likewise.
          add: Applies updates outside the layers.

        Returns:
          As `layer` does.
        """
        members, _ = self.tree.stacked
        apart = lambda stacks: (
            only(updates, members, stacks),
            only(state, self.state_members, stacks),
            only(params, members, stacks),
        )
        new_params, new_state = self._updated(None, None, *apart(False), add=add)
        if all(x is None for x in apart(True)[2]):
            return new_params, new_state
        of_stacks = [self._of_kind(layers, *apart(True)) for layers in self.by_kind]
        order = np.argsort(np.concatenate(self.by_kind))
        joined = of_stacks[0]
        if len(of_stacks) > 1:
            join = lambda *xs: jnp.concatenate(xs)[order]
            joined = jax.tree.map(join, *of_stacks)
        return _merged(new_params, joined[0]), _merged(new_state, joined[1])

    def _shared(self, state: Leaves) -> list[Stored | None]:
        """The leaves of a state that belong to no parameter."""
        owners = zip(state, self.layered.owners, strict=True)
        return [x if owner is None else None for x, owner in owners]

    def _of_kind(
        self, layers: Sequence[int], updates: Leaves, state: Leaves, params: Leaves
    ) -> Updated:
        """Updates layers of one kind, all at once."""
        numbers = np.asarray(layers, np.int32)
        # Counts and rates belong to no layer.
        shared = self._shared(self.layered.state)
        trees = list(updates), list(state), list(params)
        if len(layers) < self.layered.length:
            trees = jax.tree.map(lambda x: x[numbers], trees)
        run = functools.partial(self._as_layer, layers[0])

        def one(i: Array, trees: PyTree) -> PyTree:
            updates, state, params = jax.tree.map(lambda x: x[None], trees)
            new_params, new_state = run(i, updates, _merged(state, shared), params)
            # Nobody takes what becomes of what is shared.
            new = new_params, only(new_state, self.state_members, True)
            return jax.tree.map(lambda x: x[0], new)

        return jax.vmap(one)(jnp.asarray(numbers), trees)

    def _as_layer(
        self,
        place: int,
        i: LayerIndex,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
    ) -> Updated:
        """Updates layer i in the place of layer `place`."""
        return self._updated(place, i, updates, state, params)

    def _updated(
        self,
        place: int | None,
        i: LayerIndex | None,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        members, _ = self.tree.stacked
        zeros = _Zeros()
        fill = functools.partial(_placed, place, zeros, self.pruned)
        layered, structure = self.layered, self.tree.structure
        tree_params = fill(members, params, layered.params)
        arguments = (
            structure.unflatten(fill(members, updates, layered.params)),
            self.state_structure.unflatten(
                fill(self.state_members, state, layered.state)
            ),
            structure.unflatten(tree_params),
        )
        with within(layer=i):
            changes, new_state = self.tx.update(*arguments)
        tree_changes = structure.flatten_up_to(changes)
        new_leaves = self.state_structure.flatten_up_to(new_state)
        in_place = lambda m: m if isinstance(m, int) else m[place or 0]
        of_state = lambda m, x: (
            # A layer of this kind has no such moment.
            x if in_place(m) < 0 else as_stack(m, new_leaves[in_place(m)])
        )
        as_stack = lambda m, x: (
            x if isinstance(m, int) else jax.tree.map(lambda x: x[None], x)
        )

        def new_param(m: Members, x: Stored | None) -> Array | None:
            if x is None:
                return None
            old, change = tree_params[in_place(m)], tree_changes[in_place(m)]
            return as_stack(m, add([old], [change])[0])

        return (
            [new_param(m, x) for m, x in zip(members, params, strict=True)],
            [
                None if x is None else of_state(m, x)
                for m, x in zip(self.state_members, state, strict=True)
            ],
        )


def only(
    leaves: Leaves, members: Sequence[Members], stacks: bool
) -> list[Stored | None]:
    """The leaves that are stacks of layers, or the others."""
    pairs = zip(leaves, members, strict=True)
    return [x if isinstance(m, LayerNumbers) == stacks else None for x, m in pairs]


def _merged(
    leaves: Sequence[Value | None], others: Sequence[Value | None]
) -> list[Value | None]:
    pairs = zip(leaves, others, strict=True)
    return [y if x is None else x for x, y in pairs]


class _Zeros(dict[Hashable, Array]):
    """Zeros by shape and dtype: each are made once."""

    def __missing__(self, key: tuple[tuple[int, ...], np.dtype]) -> Array:
        self[key] = jnp.zeros(*key)
        return self[key]


def _placed(
    place: int | None,
    zeros: _Zeros,
    pruned: bool,
    members: Sequence[Members],
    leaves: Leaves,
    like: Sequence[Stored],
) -> list[Stored]:
    """The own tree's leaves, one layer's in the place of layer `place`."""
    by_number: dict[int, Stored] = {}
    for member, x, old in zip(members, leaves, like, strict=True):
        if isinstance(member, int):
            blank = jax.tree.map(lambda x: zeros[x.shape, x.dtype], old)
            by_number[member] = blank if x is None else x
            continue
        blank: PyTree = optax.MaskedNode()
        if not pruned:
            blank = jax.tree.map(lambda x: zeros[x.shape[1:], x.dtype], old)
        by_number |= {n: blank for n in member if n >= 0}
        if x is not None and place is not None and member[place] >= 0:
            by_number[member[place]] = jax.tree.map(lambda x: x[0], x)
    return [by_number[n] for n in range(len(by_number))]


def stacked_shape(layers: Sequence[ArrayOrShape | None]) -> jax.ShapeDtypeStruct:
    """The shape of a stack of these leaves."""
    first = next(x for x in layers if x is not None)
    return jax.ShapeDtypeStruct((len(layers), *first.shape), first.dtype)


def one_layer(tree: LayerTree, stacked: PyTree) -> PyTree:
    """The own tree of stacks whose layers are all like the first; types alone."""

    def apart(stack: Array) -> list[jax.ShapeDtypeStruct]:
        kind = jax.typeof(stack)
        layer = jax.ShapeDtypeStruct(kind.shape[1:], kind.dtype)
        if on_host(stack):
            place = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED_HOST)
            layer = jax.ShapeDtypeStruct(
                layer.shape, layer.dtype, sharding=typed_by_memory(place)
            )
        return [layer] * tree.length

    return tree.unstack(stacked, apart)


def tree_state(
    tx: optax.GradientTransformation, tree: LayerTree, params: PyTree
) -> tuple[list[Members], PyTreeDef]:
    """For each leaf of a stacked state those of the own state, and its structure."""
    with within(visitor=TYPES):
        state = jax.eval_shape(lambda params: tx.init(params), params)
    structure = jax.tree.structure(state, is_leaf=is_quantized)
    return tree.members_of(structure), structure
