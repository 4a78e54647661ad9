"""One layer is updated while the gradients of the next one are made.

A layer's leaves are in groups, and the gradients are made in as many segments. Beside
each segment the new moments of one group travel to the host, and those of the group
that is next travel to the device; so no stack is read and written at once, because XLA
would copy it. Between two segments a group is updated.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.frozen import Shares
from paged_optax.layerwise.groups import Group
from paged_optax.layerwise.layer_update import Applied
from paged_optax.layerwise.slices import LayerIndex, put, slab

Living = TypeVar("Living", bound=PyTree)


class Flow(NamedTuple):
    """What travels, and where from and to.

    Attributes:
      slots: The state's stacks.
      stacks: The layers' parameters.
      moments: Those of the group that is to be updated next.
      weights: Of the layer whose gradients are made next, the leaves that come from the
        host, by their positions, as far as they have come.
      frozen: Of that layer, the frozen leaves that come from the host.
    """

    slots: list[Stored]
    stacks: list[Array]
    moments: list[Stored]
    weights: dict[int, Array]
    frozen: dict[int, Array]


class Turn(NamedTuple):
    """One layer is updated, and the gradients of another are made.

    Attributes:
      updated: The layer that is updated.
      fetched: Its parameters that came from the host, by their positions.
      gradients: Its gradients.
      made: The layer whose gradients are made; None: of none.
      following: The layer whose turn is next; None: of none.
    """

    updated: LayerIndex
    fetched: dict[int, Array]
    gradients: Sequence[Array]
    made: LayerIndex | None = None
    following: LayerIndex | None = None

    def weights(self, flow: Flow, parts: int) -> list[Array]:
        """The parameters that are updated: the layer's, and a part of each other one.

        Args:
          flow: What travels.
          parts: How many parts another parameter has.
        """
        return [
            self.fetched[n] if n in self.fetched else slab(x, self.updated, parts)
            for n, x in enumerate(flow.stacks)
        ]


@dataclasses.dataclass(frozen=True)
class Beside:
    """The update of one layer beside the gradients of another.

    Attributes:
      applied: The transformation.
      frozen: The layers' frozen parameters.
    """

    applied: Applied
    frozen: Sequence[Array]

    @property
    def shares(self) -> Shares:
        """The frozen parameters, in as many shares as there are groups."""
        return Shares(self.frozen, len(self.groups))

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of leaves."""
        return self.applied.groups

    @property
    def ends(self) -> list[float]:
        """Where the segments of the other computation end, as parts of its work.

        Each segment is as long as what travels beside it.
        """
        size = moving(self.applied.slots, self.groups)
        return ends_of(size, size, self.shares.sizes)

    def started(
        self, stacks: list[Array], i: LayerIndex, living: Living
    ) -> tuple[Flow, Living]:
        """Fetches what the first turn needs.

        Args:
          stacks: The parameters.
          i: The layer that is updated first.
          living: What has been computed before: else XLA fetches earlier.

        Returns:
          What arrives, and what has been computed.
        """
        given = self.applied.slots, stacks, living
        slots, stacks, living = lax.optimization_barrier(given)
        parts = self.applied.length
        moments = [slab(slots[n], i, parts) for n in self.groups[0].slots]
        weights = {n: slab(x, i - 1) for n, x in enumerate(stacks) if on_host(x)}
        frozen = {n: slab(x, i - 1) for n, x in enumerate(self.frozen) if on_host(x)}
        return Flow(slots, stacks, moments, weights, frozen), living

    def begun(
        self, k: int, flow: Flow, turn: Turn, living: Living
    ) -> tuple[Flow, Living]:
        """Updates group k of a layer, begins to send it, and to fetch the next one.

        Args:
          k: The group's number.
          flow: What has arrived.
          turn: Whose turn it is.
          living: What is computed beside the transfers, before it goes on.

        Returns:
          What travels, and `living`.
        """
        group, i, parts = self.groups[k], turn.updated, self.applied.length
        weights = turn.weights(flow, parts)
        made = self.applied.part(group, flow.moments, weights, turn.gradients, i)
        (moments, leaves), living = together((made, living))
        slots, stacks = list(flow.slots), list(flow.stacks)
        for n, moment in zip(group.slots, moments, strict=True):
            slots[n] = put(slots[n], moment, i, parts)
        for n, leaf in zip(group.leaves, leaves, strict=True):
            stacks[n] = put(stacks[n], leaf, i)
        last = k + 1 == len(self.groups)
        after, layer = self.groups[0 if last else k + 1], turn.made if last else i
        fetched = (
            [] if layer is None else [slab(slots[n], layer, parts) for n in after.slots]
        )
        coming, frozen = dict(flow.weights), dict(flow.frozen)
        if turn.following is not None:
            coming |= {
                n: slab(stacks[n], turn.following)
                for n in after.leaves
                if on_host(stacks[n])
            }
            frozen |= self.shares.fetched(k, turn.following)
        return Flow(slots, stacks, fetched, coming, frozen), living

    def arrived(self, k: int, flow: Flow, living: Living) -> tuple[Flow, Living]:
        """Waits for what travels beside segment k, and for the segment."""
        here, after = self.groups[k], self.groups[(k + 1) % len(self.groups)]
        slots = {n: flow.slots[n] for n in (*here.slots, *after.slots)}
        leaves = (*here.leaves, *after.leaves)
        stacks = {n: x for n in leaves if on_host(x := flow.stacks[n])}
        (slots, stacks, moments, weights, frozen), living = together(
            ((slots, stacks, flow.moments, flow.weights, flow.frozen), living)
        )
        each = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        arrived = each(flow.slots, slots), each(flow.stacks, stacks)
        return Flow(*arrived, moments, weights, frozen), living

    def alone(self, flow: Flow, turn: Turn) -> Flow:
        """Updates the last layer, with nothing beside it."""
        for k in range(len(self.groups)):
            flow, _ = self.begun(k, flow, turn, ())
            flow, _ = self.arrived(k, flow, ())
        return flow


def moving(slots: Sequence[Stored], groups: Sequence[Group]) -> list[int]:
    """Bytes of each group's moments that are on the host."""
    return [
        sum(nbytes(x) for n in group.slots if on_host(x := slots[n]))
        for group in groups
    ]


def ends_of(
    leaving: Sequence[int], coming: Sequence[int], shares: Sequence[int]
) -> list[float]:
    """Where segments end, as parts of the work: as long as what travels in them.

    Beside segment k group k leaves, and the group after it comes, and share k.

    Args:
      leaving: Bytes of each group that travel to the host.
      coming: Those that travel from it.
      shares: Bytes of each share of what is frozen.

    Returns:
      The ends. Segments are equally long if nothing of all this travels, as of weights
      on the host that are updated without moments.
    """
    after = map(sum, zip([*coming[1:], *coming[:1]], shares, strict=True))
    done = list(itertools.accumulate(map(max, zip(leaving, after, strict=True))))
    if not done[-1]:
        return [k / len(done) for k in range(1, len(done))]
    return [x / done[-1] for x in done[:-1]]


def together(values: Living) -> Living:
    """Keeps what comes after all these values behind all of them."""
    return lax.optimization_barrier(values)
