"""One transformation of a whole tree, applied to one layer after the other.

What `tx.update` computes of a stack is run on one layer's slab of it. At the end
`tx.update` runs on the whole tree, for what is not updated in slabs; its other results
are dead code.
"""

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, compress
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.barriers import barrier_on_cpu
from paged_optax.backend.memory import HOST, nbytes, on_host
from paged_optax.backend.meshes import on_one_device
from paged_optax.backend.variables import unflatten_like
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.apart import Apart, Leaf, scales_to
from paged_optax.layerwise.groups import Group
from paged_optax.layerwise.hosted import added, fetched, on_device
from paged_optax.layerwise.slices import (
    LayerIndex,
    put,
    slab,
)
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import Gate, current, within
from paged_optax.transform.gates import only_if

Tree = TypeVar("Tree", bound=PyTree)

# For each turn the whole update is traced. An embedding, a position's, a matrix of
# outputs: what is large besides is of no layer that was found.
_ALONE = 3

# A page of one moment may be so large a part of the layers that are on the device. Of
# layers on the host these are one that is used, the next one, and one of gradients.
_PART = 1 / 32
_HELD = 3


class Applied(Apart):
    """Updates layers, and the rest."""

    def only_if(self, happens: Gate) -> "Applied":
        """The same, whose updates happen or do not."""
        gated = copy.copy(self)
        gated.happens = happens
        return gated

    def collector(self, gradients: PyTree[Array], length: int) -> list[Array | None]:
        """Room for the gradients of small leaves, of all layers: norms, biases."""
        return [
            None if slabbed else jnp.zeros((length, *g.shape), g.dtype)
            for g, slabbed in zip(
                jax.tree.leaves(gradients), self.of_layers(self.slabbed), strict=True
            )
        ]

    @staticmethod
    def collect(
        collected: Sequence[Array | None], gradients: Sequence[Array], i: LayerIndex
    ) -> list[Array | None]:
        """Keeps the gradients of layer i's small leaves."""
        return [
            None if to is None else put(to, g, i)
            for to, g in zip(collected, gradients, strict=True)
        ]

    def layer(
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
          layer by layer are the objects that were given.
        """
        (every,) = self.grouped(1)
        state = [slab(x, i, self.length) for x in slots]
        with within(apart=True):
            made, new = self.part(every, state, weights, gradients, i)
        slots = [
            put(x, new, i, self.length) for x, new in zip(slots, made, strict=True)
        ]
        done = dict(zip(every.leaves, new, strict=True))
        return slots, [done.get(leaf, w) for leaf, w in enumerate(weights)]

    def part(
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
            layer's part of those that are updated early. What is of other leaves is not
            read.
          gradients: Their gradients.
          i: The layer's number.

        Returns:
          The leaves' new moments, and the leaves.
        """
        count = len(self.params)
        tree, updates = (
            list(map(dict(zip(self.numbers, values, strict=True)).get, range(count)))
            for values in (weights, gradients)
        )
        given = dict(zip(group.slots, state, strict=True))
        numbers = iter(range(len(self.slots)))
        held = [
            given.get(next(numbers), x) if yes else x
            for x, yes in zip(self.state, self.stacked, strict=True)
        ]
        run = self._one_layer if self.programs is None else self._one_slab
        old = [x for leaf in group.leaves if (x := weights[leaf]) is not None]

        def update() -> tuple[list[Stored], list[Array]]:
            leaves, moments = run(updates, held, tree, i, group)
            return self._if_it_happens((moments, leaves), (list(state), old))

        return barrier_on_cpu(update)

    def rest(
        self,
        stacks: Sequence[Array],
        small: Sequence[Array | None],
        others: Sequence[Array],
        gradients: Sequence[Array],
    ) -> tuple[list[Array], list[Array], list[Stored]]:
        """Updates what is not updated layer by layer.

        Args:
          stacks: The layers' parameters.
          small: The collected gradients of the small ones.
          others: The other parameters.
          gradients: Their gradients.

        Returns:
          The layers' parameters, the others, and the leaves of the state, blank where
          they are stacks; see `state_of`.
        """
        params = self.parts.joined(stacks, others)
        updates: list[Array | None] = self.parts.joined(small, gradients)
        alone = {n for n, slabbed in enumerate(self.slabbed) if not slabbed}
        hosted = [n for n in alone if on_host(params[n])]
        new, state = self._all_but(hosted, params, updates)
        # Of what is divided, rows are on other devices.
        whole = on_one_device([params[n] for n in hosted])
        add = functools.partial(jax.tree.map, added) if whole else optax.apply_updates
        last: PyTree[Array] = new
        for some in _in_turn(hosted, params):
            given = {n: (params[n], updates[n]) for n in some}
            given, last = fetched(given, last)
            for n, here in given.items():
                params[n], updates[n] = here
            made, moments = self._all_but(alone.difference(some), params, updates, add)
            last = {n: jax.device_put(made[n], HOST) for n in some}
            new = [last.get(n, x) for n, x in enumerate(new)]
            state = [
                one if owner in some else x
                for x, one, owner in zip(state, moments, self.owners, strict=True)
            ]
        others = [
            x for x, yes in zip(new, self.parts.in_layers, strict=True) if not yes
        ]
        return self.of_layers(new), others, state

    def _all_but(
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
        taken = [
            not slabbed and n not in left for n, slabbed in enumerate(self.slabbed)
        ]
        filled = lambda leaves: [
            x if yes else _blank(whole)
            for x, whole, yes in zip(leaves, self.params, taken, strict=True)
        ]
        mine = [
            not yes and owner not in left
            for yes, owner in zip(self.stacked, self.owners, strict=True)
        ]
        state = [
            x if yes else _blank(x) for x, yes in zip(self.state, mine, strict=True)
        ]
        with only_if(self.happens):
            made, new_state = self._update(
                filled(updates), state, filled(params), add=add
            )
        new = [
            self._if_it_happens(x, before) if yes else before
            for before, x, yes in zip(params, made, taken, strict=True)
        ]
        # The loops of paged moments have selected already.
        return new, [
            self._if_it_happens(x, before) if yes and not on_host(x) else x
            for before, x, yes in zip(self.state, new_state, mine, strict=True)
        ]

    def state_of(
        self, slots: Sequence[Stored], leaves: Sequence[Stored]
    ) -> PyTree[Array]:
        """The whole state.

        Args:
          slots: Its stacks.
          leaves: All its leaves, of which those that are stacks are not used.
        """
        final = iter(slots)
        whole = [
            unflatten_like(old, scales_to(next(final), host=on_host(old))) if yes else x
            for old, x, yes in zip(self.state, leaves, self.stacked, strict=True)
        ]
        return unflatten_like(self.given, whole)

    def _if_it_happens(self, new: Tree, old: Tree) -> Tree:
        """What is new where the update happens; else what is old."""
        if self.happens is True:
            return new
        return jax.tree.map(lambda x, y: jnp.where(self.happens, x, y), new, old)

    def _one_slab(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        tree: Sequence[Array | None],
        i: LayerIndex,
        group: Group,
    ) -> tuple[list[Array], list[Stored]]:
        """What the whole tree's update makes of some leaves of one layer."""
        assert self.programs is not None
        chosen = [self.numbers[leaf] for leaf in group.leaves]
        sizes = [len(jax.tree.leaves(x)) for x in state]
        places = accumulate(sizes, initial=len(tree))
        slots = [
            place
            for slot, place in enumerate(compress(places, self.stacked))
            if slot in group.slots
        ]
        results = self.programs.run(
            [*updates, *jax.tree.leaves(state), *tree],
            i,
            [*chosen, *slots],
            self.length,
        )
        weights = [x for n in chosen if (x := tree[n]) is not None]
        made = jax.tree.leaves(optax.apply_updates(weights, results[: len(chosen)]))
        return made, list[Stored](results[len(chosen) :])

    def _one_layer(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        tree: Sequence[Array | None],
        i: LayerIndex,
        group: Group,
    ) -> tuple[list[Array], list[Stored]]:
        """The update of a tree with some leaves of one layer in it."""
        chosen = {self.numbers[leaf] for leaf in group.leaves}
        mine = [
            yes and owner in chosen
            for yes, owner in zip(self.stacked, self.owners, strict=True)
        ]
        kept = [
            x if yes or owner is None or not jax.tree.leaves(x)[0].ndim else None
            for x, yes, owner in zip(state, mine, self.owners, strict=True)
        ]
        only = lambda leaves: [
            x if number in chosen else None for number, x in enumerate(leaves)
        ]
        made, new = self._traced_once(only(updates), kept, only(tree), i)
        leaves = [made[self.numbers[leaf]] for leaf in group.leaves]
        return leaves, list(compress(new, mine))

    @functools.cached_property
    def _traced_once(self) -> Callable[..., tuple[list[Array], list[Stored]]]:
        """`_update` with blanks for what is None: each group's is traced only once."""

        def update(
            updates: Sequence[Array | None],
            state: Sequence[Stored | None],
            tree: Sequence[Array | None],
            i: LayerIndex,
        ) -> tuple[list[Array], list[Stored]]:
            filled = lambda given, whole: [
                _blank(x) if one is None else one
                for one, x in zip(given, whole, strict=True)
            ]
            return self._update(
                filled(updates, self.params),
                filled(state, self.state),
                filled(tree, self.params),
                i,
            )

        return jax.jit(update, inline=True)

    def _update(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        params: Sequence[Array | None],
        layer: LayerIndex | None = None,
        add: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates,
    ) -> tuple[list[Array], list[Stored]]:
        """The leaves of new parameters and of a new state."""
        tree = jax.tree.unflatten(self.parts.structure, params)
        layers = self.of_layers(self.params)
        hosted = any(map(on_host, layers))
        room = _PART * sum(
            _HELD * nbytes(x) / self.length if on_host(x) else nbytes(x) for x in layers
        )
        apart = hosted or current().apart
        with within(fetched=True, layer=layer, room=int(room), apart=apart):
            made, new = self.tx.update(
                jax.tree.unflatten(self.parts.structure, updates),
                jax.tree.unflatten(self.state_structure, state),
                tree,
            )
        tree = add(tree, made)
        return jax.tree.leaves(tree), jax.tree.leaves(new, is_leaf=is_quantized)


def _in_turn(hosted: Sequence[int], params: Sequence[Array]) -> list[list[int]]:
    """Which parameters the device holds at a time: the largest ones alone."""
    large = sorted(hosted, key=lambda n: -nbytes(params[n]))
    turns = [[n] for n in large[:_ALONE]] + [large[_ALONE:]]
    return [turn for turn in turns if turn]


def _blank(x: Leaf) -> Leaf:
    """What stands for an array whose update nobody takes: zeros, which nobody makes.

    A count remains what it is.
    """
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if x.ndim else on_device(x), x
    )
