"""One transformation of a whole tree, applied to one layer after the other.

What `tx.update` computes of a stack is run on one layer's slab of it. At the end
`tx.update` runs on the whole tree, for what is not updated in slabs; its other results
are dead code.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, compress
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import HOST, nbytes, on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD, barrier_on_cpu
from paged_optax.backend.types import on_one_device
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.overlap import Group
from paged_optax.layerwise.programs import Programs, layer_programs
from paged_optax.layerwise.slabs import LayerIndex, put, slab
from paged_optax.layerwise.tree_update import TreeUpdate
from paged_optax.layerwise.weights import (
    add_in_place,
    fetch_after,
    host_like,
    on_device,
)
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import Gate, current, within
from paged_optax.transform.gates import only_if

Tree = TypeVar("Tree", bound=PyTree)

# For each fetch the whole update is traced. An embedding, a position's, a matrix of
# outputs: what else is large belongs to layers.
_FETCHED_SINGLY = 3

# A page of one moment may be so large a part of the layers that are on the device. Of
# layers on the host these are one that is used, the next one, and one of gradients.
_PAGE_PART = 1 / 32
_LAYERS_ON_DEVICE = 3


@dataclasses.dataclass(frozen=True)
class LayerOptimizer:
    """Updates layers, and the rest.

    Attributes:
      tx: The transformation.
      layered: The parameters and its state.
      programs: What an update computes of each leaf. None: moments are coded, and
        `tx.update` runs on stacks of one layer; or `tree` updates.
      tree: The update in the loss's own tree; None: stacks are that tree.
      overlaps: Whether a layer is updated while another one is computed.
      happens: Whether anything is updated at all.
    """

    tx: optax.GradientTransformationExtraArgs
    layered: LayeredState
    programs: Programs | None
    tree: TreeUpdate | None = None
    overlaps: bool = False
    happens: Gate = True

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        layered: LayeredState,
        gradients: PyTree[Array],
        happens: Gate,
        tree: LayerTree | None,
    ) -> "LayerOptimizer":
        """Traces the update.

        Args:
          tx: The transformation.
          layered: The parameters and its state.
          gradients: One layer's gradients.
          happens: Whether anything is updated at all.
          tree: The loss's own tree; None: stacks are that tree.
        """
        partition = layered.partition
        others = [None] * partition.in_layers.count(False)
        dtypes = [x.dtype for x in jax.tree.leaves(gradients)]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype)
            for x, dtype in zip(
                layered.params, partition.combine(dtypes, others), strict=True
            )
        ]
        extended = optax.with_extra_args_support(tx)
        if tree is not None:
            types = [x.dtype for x in shapes]
            update = TreeUpdate.of(extended, tree, layered, types)
            return cls(extended, layered, None, update, happens=happens)
        programs = layer_programs(extended, layered, shapes)
        return cls(extended, layered, programs, happens=happens)

    def only_if(self, happens: Gate) -> "LayerOptimizer":
        """The same, whose updates happen or do not."""
        return dataclasses.replace(self, happens=happens)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """What is updated in slabs, in groups that travel one after the other."""
        shared = (
            self.programs is not None and self.programs.analysis.tail.program.equations
        )
        return self.layered.grouped(1 if shared else None)

    @property
    def can_overlap(self) -> bool:
        """Whether a layer can be updated while another one is computed.

        Not yet on many devices, where gradients are reduced beside transfers.
        """
        layered = self.layered
        several = layered.length > 1 and len(self.groups) > 1
        return GPU_FETCHES_AHEAD and several and on_one_device(layered.slots)

    def update_layer(
        self,
        slots: Sequence[Stored],
        weights: Sequence[Array],
        gradients: Sequence[Array],
        i: LayerIndex,
    ) -> tuple[list[Stored], list[Array]]:
        """Updates layer i.

        Args:
          slots: The state's stacks.
          weights: The layer's parameters, with a leading axis of 1.
          gradients: Their gradients.
          i: Its number.

        Returns:
          The state's stacks, and the layer's parameters; those that are not updated
          layer by layer are the objects that were passed.
        """
        (every,), length = self.layered.grouped(1), self.layered.length
        state = [slab(x, i, length) for x in slots]
        # All leaves are one group, and each is isolated: the moments of one go while
        # those of another come.
        with within(isolate=True):
            moments, leaves = self.update_group(every, state, weights, gradients, i)
        slots = [put(x, new, i, length) for x, new in zip(slots, moments, strict=True)]
        new = dict(zip(every.positions, leaves, strict=True))
        return slots, [new.get(n, x) for n, x in enumerate(weights)]

    def update_group(
        self,
        group: Group,
        state: Sequence[Stored],
        weights: Sequence[Array | None],
        gradients: Sequence[Array | None],
        i: LayerIndex,
    ) -> tuple[list[Stored], list[Array]]:
        """Updates some leaves of layer i.

        Args:
          group: Which.
          state: Their moments, with a leading axis of 1.
          weights: All parameters of the layer, with a leading axis of 1, and the
            layer's chunk of those that are updated in chunks. What is of other leaves
            is not read.
          gradients: Their gradients.
          i: The layer's number.

        Returns:
          The leaves' new moments, and the leaves.
        """
        layered, count = self.layered, len(self.layered.params)
        params, updates = (
            list(map(dict(zip(layered.numbers, values, strict=True)).get, range(count)))
            for values in (weights, gradients)
        )
        moments = dict(zip(group.slot_positions, state, strict=True))
        # Of other groups the whole stacks are passed: nothing reads them.
        positions = iter(range(len(layered.slots)))
        state_leaves = [
            moments.get(next(positions), x) if stacked else x
            for x, stacked in zip(layered.state, layered.stacked, strict=True)
        ]
        run = self._one_layer if self.programs is None else self._one_slab
        old = [x for n in group.positions if (x := weights[n]) is not None]

        def update() -> tuple[list[Stored], list[Array]]:
            leaves, moments = run(updates, state_leaves, params, i, group)
            return self._if_it_happens((moments, leaves), (list(state), old))

        return barrier_on_cpu(update)

    def _one_slab(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        params: Sequence[Array | None],
        i: LayerIndex,
        group: Group,
    ) -> tuple[list[Array], list[Stored]]:
        """Updates some leaves of one layer by the whole tree's programs."""
        assert self.programs is not None
        chosen = [self.layered.numbers[n] for n in group.positions]
        sizes = [len(jax.tree.leaves(x)) for x in state]
        outputs = accumulate(sizes, initial=len(params))
        slots = list(compress(outputs, self.layered.stacked))
        results = self.programs.run(
            [*updates, *jax.tree.leaves(state), *params],
            i,
            [*chosen, *(slots[n] for n in group.slot_positions)],
            self.layered.length,
        )
        weights = [x for n in chosen if (x := params[n]) is not None]
        new = jax.tree.leaves(optax.apply_updates(weights, results[: len(chosen)]))
        return new, list[Stored](results[len(chosen) :])

    def _one_layer(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        params: Sequence[Array | None],
        i: LayerIndex,
        group: Group,
    ) -> tuple[list[Array], list[Stored]]:
        """Updates a tree with some leaves of one layer in it."""
        layered = self.layered
        numbers = [layered.numbers[n] for n in group.positions]
        moments = [
            stacked and owner in numbers
            for stacked, owner in zip(layered.stacked, layered.owners, strict=True)
        ]
        read = [
            x if yes or owner is None or not jax.tree.leaves(x)[0].ndim else None
            for x, yes, owner in zip(state, moments, layered.owners, strict=True)
        ]
        only = lambda leaves: [
            x if n in numbers else None for n, x in enumerate(leaves)
        ]
        leaves, new = self._jitted(only(updates), read, only(params), i)
        return [leaves[n] for n in numbers], list(compress(new, moments))

    @functools.cached_property
    def _jitted(self) -> Callable[..., tuple[list[Array], list[Stored]]]:
        """`_update` with blanks for what is None: each group's is traced only once."""

        def update(
            updates: Sequence[Array | None],
            state: Sequence[Stored | None],
            params: Sequence[Array | None],
            i: LayerIndex,
        ) -> tuple[list[Array], list[Stored]]:
            if self.tree is not None:
                with self._context():
                    return self.tree.layer(i, updates, state, params)
            return self._update(updates, state, params, i)

        return jax.jit(update, inline=True)

    def update_rest(
        self,
        stacks: Sequence[Array],
        small: Sequence[Array | None],
        others: Sequence[Array],
        gradients: Sequence[Array],
    ) -> tuple[list[Array], list[Array], list[Stored]]:
        """Updates what is not updated layer by layer.

        Args:
          stacks: The layers' parameters.
          small: The gradients of the small ones.
          others: The other parameters.
          gradients: Their gradients.

        Returns:
          The layers' parameters, the others, and the leaves of the state, blank where
          they are stacks; see `LayeredState.new_state`.
        """
        layered, partition = self.layered, self.layered.partition
        params = partition.combine(stacks, others)
        updates: list[Array | None] = partition.combine(small, gradients)
        rest = {n for n, slabbed in enumerate(layered.slabbed) if not slabbed}
        hosted = [n for n in rest if on_host(params[n])]
        new, state = self._update_all_but(hosted, params, updates)
        # Of what is divided, rows are on other devices.
        undivided = on_one_device([params[n] for n in hosted])
        add = (
            functools.partial(jax.tree.map, add_in_place)
            if undivided
            else optax.apply_updates
        )
        # The device holds the largest ones one at a time.
        large = sorted(hosted, key=lambda n: -nbytes(params[n]))
        fetches = [[n] for n in large[:_FETCHED_SINGLY]] + [large[_FETCHED_SINGLY:]]
        last: PyTree[Array] = new
        for numbers in filter(None, fetches):
            pairs = {n: (params[n], updates[n]) for n in numbers}
            # One after the other, or the device would hold all of them at once.
            pairs, last = fetch_after(pairs, last)
            for n, pair in pairs.items():
                params[n], updates[n] = pair
            leaves, moments = self._update_all_but(
                rest.difference(numbers), params, updates, add
            )
            last = {n: jax.device_put(leaves[n], HOST) for n in numbers}
            new = [last.get(n, x) for n, x in enumerate(new)]
            state = [
                one if owner in numbers else x
                for x, one, owner in zip(state, moments, layered.owners, strict=True)
            ]
        outside = [not inside for inside in partition.in_layers]
        return layered.of_layers(new), list(compress(new, outside)), state

    def _update_all_but(
        self,
        left: Collection[int],
        params: Sequence[Array],
        updates: Sequence[Array | None],
        add: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates,
    ) -> tuple[list[Array], list[Stored]]:
        """Updates what is not updated layer by layer, but for some parameters.

        Returns:
          All parameters, and the leaves of the state, blank of those.
        """
        layered = self.layered
        taken = [
            not slabbed and n not in left for n, slabbed in enumerate(layered.slabbed)
        ]
        only = lambda leaves: [
            x if yes else None for x, yes in zip(leaves, taken, strict=True)
        ]
        moments = [
            not stacked and owner not in left
            for stacked, owner in zip(layered.stacked, layered.owners, strict=True)
        ]
        state = [
            x if yes else None for x, yes in zip(layered.state, moments, strict=True)
        ]
        with only_if(self.happens):
            if self.tree is None:
                update = self._update
            else:
                update = self._update_tree
            leaves, new_state = update(only(updates), state, only(params), add=add)
        new = [
            self._if_it_happens(x, old) if yes else old
            for old, x, yes in zip(params, leaves, taken, strict=True)
        ]
        # The loops of paged moments have selected already.
        return new, [
            self._if_it_happens(x, old) if yes and not on_host(x) else x
            for old, x, yes in zip(layered.state, new_state, moments, strict=True)
        ]

    def _if_it_happens(self, new: Tree, old: Tree) -> Tree:
        """What is new where the update happens; else what is old."""
        if self.happens is True:
            return new
        return jax.tree.map(lambda x, y: jnp.where(self.happens, x, y), new, old)

    def _update_tree(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored | None],
        params: Sequence[Array | None],
        add: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates,
    ) -> tuple[list[Array], list[Stored]]:
        """The leaves of new parameters and of a new state; stacks of the small ones."""
        assert self.tree is not None
        stacks = [isinstance(x, LayerNumbers) for x in self.tree.state_members]
        fetched = [
            x if x is None or not stacked else jax.tree.map(on_device, x)
            for x, stacked in zip(state, stacks, strict=True)
        ]
        with self._context():
            leaves, new = self.tree.rest(updates, fetched, params, add)
        return leaves, [
            x
            if old is None or not stacked
            else host_like(self._if_it_happens(x, at), old)
            for x, old, at, stacked in zip(new, state, fetched, stacks, strict=True)
        ]

    def _update(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored | None],
        params: Sequence[Array | None],
        layer: LayerIndex | None = None,
        add: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates,
    ) -> tuple[list[Array], list[Stored]]:
        """The leaves of new parameters and of a new state; blanks for what is None."""
        layered = self.layered
        filled = lambda leaves, like: [
            _blank(old) if x is None else x for x, old in zip(leaves, like, strict=True)
        ]
        tree = layered.params_tree(filled(params, layered.params))
        with self._context(), within(layer=layer):
            changes, new_state = self.tx.update(
                layered.params_tree(filled(updates, layered.params)),
                layered.state_tree(filled(state, layered.state)),
                tree,
            )
        new_params = jax.tree.leaves(add(tree, changes))
        return new_params, jax.tree.leaves(new_state, is_leaf=is_quantized)

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """Around an update of what has been fetched."""
        layered = self.layered
        layers = layered.of_layers(layered.params)
        hosted = any(map(on_host, layers))
        spare = _PAGE_PART * sum(
            _LAYERS_ON_DEVICE * nbytes(x) / layered.length if on_host(x) else nbytes(x)
            for x in layers
        )
        isolate = hosted or current().isolate
        return within(fetched=True, spare_bytes=int(spare), isolate=isolate)


def _blank(x: Tree) -> Tree:
    """What stands for an array whose update nobody takes: zeros, which nobody makes.

    A count remains what it is.
    """
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if x.ndim else on_device(x), x
    )
