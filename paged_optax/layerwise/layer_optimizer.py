"""Applies one transformation to a layer at a time, and to the other parameters.

A layer's slices of the moments are copied to the device. A `paged(...)` inside finds
them there, and loops over pages only to decode and encode them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import HOST, nbytes, on_host
from paged_optax.backend.platforms import barrier_on_cpu
from paged_optax.backend.types import on_one_device
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import LayerNumbers
from paged_optax.layerwise.layered_state import Group, LayeredState
from paged_optax.layerwise.slices import (
    LayerIndex,
    add_in_place,
    fetch_after,
    host_like,
    on_device,
    read_moment,
    write_moment,
)
from paged_optax.layerwise.tree_update import Leaves, TreeUpdate, Updated
from paged_optax.transform.context import Gate, current, only_if, within

Tree = TypeVar("Tree", bound=PyTree)

#: Leaves of a layer by their positions.
LayerLeaves = Mapping[int, Array] | Sequence[Array]

# The update of the rest is traced once for each fetch. A model has few large parameters
# outside its layers: embeddings of tokens and positions, and an output matrix.
_FETCHED_SINGLY = 3

# The largest page, as a part of the layers that are on the device. If the layers are on
# the host, the device holds the current layer, the next one and a layer's gradients.
_PAGE_PART = 1 / 32
_LAYERS_ON_DEVICE = 3


@dataclasses.dataclass(frozen=True)
class LayerOptimizer:
    """Updates layers, and the rest."""

    tree: TreeUpdate
    enabled: Gate = True

    @property
    def layered(self) -> LayeredState:
        """The parameters and the state, stacked."""
        return self.tree.layered

    def in_chunks(self, numbers: Sequence[int]) -> "LayerOptimizer":
        """Updates parameters outside the layers in chunks, one with each layer.

        Raises:
          ValueError: If their rows cannot be updated alone.
        """
        layered = self.layered.in_chunks(numbers)
        self.tree.same.check_complete(layered, numbers)
        tree = dataclasses.replace(self.tree, layered=layered)
        return LayerOptimizer(tree, self.enabled)

    def only_if(self, enabled: Gate) -> "LayerOptimizer":
        """The same optimizer, with updates that depend on `enabled`."""
        return dataclasses.replace(self, enabled=enabled)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The leaves that are updated layer by layer, in groups of equal travel."""
        return self.layered.grouped()

    def update_layer(
        self,
        moments: Sequence[Stored],
        weights: Sequence[Array],
        gradients: Sequence[Array],
        i: LayerIndex,
    ) -> tuple[list[Stored], list[Array]]:
        """Updates layer i, given its parameters and gradients with a leading axis of 1.

        Small leaves are returned as they were passed.
        """
        (every,), length = self.layered.grouped(1), self.layered.length
        shards = self.layered.sliced_shards
        pairs = zip(moments, shards, strict=True)
        state = [read_moment(x, i, length, divided) for x, divided in pairs]
        # Moments without a codec are computed whole here. Others have page loops, and
        # are isolated: one leaf's are written back while the next one's are read.
        with within(isolate=True):
            updated, leaves = self.update_group(every, state, weights, gradients, i)
        moments = [
            write_moment(x, new, i, length, divided)
            for x, new, divided in zip(moments, updated, shards, strict=True)
        ]
        new = dict(zip(every.positions, leaves, strict=True))
        return moments, [new.get(n, x) for n, x in enumerate(weights)]

    def update_group(
        self,
        group: Group,
        state: Sequence[Stored],
        weights: LayerLeaves,
        gradients: LayerLeaves,
        i: LayerIndex,
    ) -> tuple[list[Stored], list[Array]]:
        """Updates some leaves of layer i.

        All arrays have a leading axis of 1. `weights` has all parameters of the layer,
        and a chunk of each chunked parameter. Leaves outside the group are not read.

        Returns:
          The leaves' new moments, and the leaves.
        """
        layered = self.layered
        numbers = [layered.numbers[n] for n in group.positions]
        moment_numbers = [layered.moment_numbers[n] for n in group.moment_positions]
        leaves = dict(zip(moment_numbers, state, strict=True)) | layered.shared
        subset = lambda values: {layered.numbers[n]: values[n] for n in group.positions}
        params = subset(weights)

        def update() -> tuple[list[Stored], list[Array]]:
            # JAX would trace again for the weak type of a Python integer.
            layer = np.int32(i) if isinstance(i, int) else i
            new, moments = self._jitted(subset(gradients), leaves, params, layer)
            result = [moments[k] for k in moment_numbers], [new[n] for n in numbers]
            return self._if_it_happens(result, (list(state), list(params.values())))

        return barrier_on_cpu(update)

    @functools.cached_property
    def _jitted(self) -> Callable[..., Updated]:
        """The update of a layer, traced once for each group."""

        def update(
            updates: Leaves, state: Leaves, params: Leaves, i: LayerIndex
        ) -> Updated:
            with self._context():
                return self.tree.layer(i, updates, state, params)

        return jax.jit(update, inline=True)

    def update_unsliced(
        self,
        stacks: Sequence[Array],
        small: Sequence[Array | None],
        remaining: Sequence[Array],
        gradients: Sequence[Array],
    ) -> tuple[list[Array], list[Array], list[Any]]:
        """Updates parameters outside the layers, and the layers' small leaves.

        Returns the layers' parameters, the others, and the leaves of the state, in
        which stacks are unchanged.
        """
        layered, partition = self.layered, self.layered.partition
        params = partition.combine(stacks, remaining)
        updates: list[Array | None] = partition.combine(small, gradients)
        rest = {n for n, sliced in enumerate(layered.sliced) if not sliced}
        offloaded = [n for n in rest if on_host(params[n])]
        new, state = self._update_all_but(offloaded, params, updates)
        add = optax.apply_updates
        # The rows of a divided parameter are on other devices.
        if on_one_device([params[n] for n in offloaded]):
            add = functools.partial(jax.tree.map, add_in_place)
        # The device holds one of the largest at a time.
        large = sorted(offloaded, key=lambda n: -nbytes(params[n]))
        fetches = [[n] for n in large[:_FETCHED_SINGLY]] + [large[_FETCHED_SINGLY:]]
        last: PyTree[Array] = [new.get(n, x) for n, x in enumerate(params)]
        for numbers in filter(None, fetches):
            items = {n: (params[n], updates[n]) for n in numbers}
            # Each fetch follows the previous update, which limits device memory.
            items, last = fetch_after(items, last)
            for n in numbers:
                params[n], updates[n] = items[n]
            left = rest.difference(numbers)
            leaves, moments = self._update_all_but(left, params, updates, add)
            last = {n: jax.device_put(leaves[n], HOST) for n in numbers}
            new |= last
            indices = layered.param_indices
            state |= {k: x for k, x in moments.items() if indices[k] in numbers}
        params = [new.get(n, x) for n, x in enumerate(params)]
        remaining = [
            x for x, inner in zip(params, partition.in_layers, strict=True) if not inner
        ]
        leaves = [state.get(k) for k in range(len(layered.state))]
        return layered.of_layers(params), remaining, leaves

    def _update_all_but(
        self,
        left: Collection[int],
        params: Sequence[Array],
        updates: Sequence[Array | None],
        add: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates,
    ) -> Updated:
        """Updates what `update_unsliced` updates, except the parameters in `left`."""
        layered = self.layered
        small = [n for n, flag in enumerate(layered.sliced) if not flag]
        only = lambda leaves: {n: leaves[n] for n in small if n not in left}
        fetch = lambda x, member: (
            jax.tree.map(on_device, x) if isinstance(member, LayerNumbers) else x
        )
        fetched = {
            k: fetch(x, self.tree.state_members[k])
            for k, x in enumerate(layered.state)
            if k not in layered.moment_numbers and layered.param_indices[k] not in left
        }
        with only_if(self.enabled), self._context():
            leaves, state = self.tree.unsliced(
                only(updates), fetched, only(params), add
            )
        new = {n: self._if_it_happens(leaves[n], x) for n, x in only(params).items()}
        # The loops of paged moments have selected already.
        select = lambda k, x: (
            x
            if on_host(fetched[k])
            else host_like(self._if_it_happens(x, fetched[k]), layered.state[k])
        )
        return new, {k: select(k, state[k]) for k in fetched}

    def _if_it_happens(self, new: Tree, old: Tree) -> Tree:
        if self.enabled is True:
            return new
        return jax.tree.map(lambda x, y: jnp.where(self.enabled, x, y), new, old)

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """The context of an update whose arrays are on the device."""
        layered = self.layered
        layers = layered.of_layers(layered.params)
        offloaded = any(map(on_host, layers))
        spare = _PAGE_PART * sum(
            _LAYERS_ON_DEVICE * nbytes(x) / layered.length if on_host(x) else nbytes(x)
            for x in layers
        )
        # On several devices the weights of two more layers are small.
        isolate = (offloaded and on_one_device(layers)) or current().isolate
        return within(layerwise=True, spare_bytes=int(spare), isolate=isolate)
