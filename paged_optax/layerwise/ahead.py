"""One layer is updated while the layer before it computes its forward pass.

As in `beside`, the layer's leaves are in groups, and what is computed is in segments.
A group's gradients come from the host together with its moments.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.beside import ends_of, moving, together
from paged_optax.layerwise.frozen import Shares
from paged_optax.layerwise.groups import Group
from paged_optax.layerwise.layer_update import Applied
from paged_optax.layerwise.model import Entered, Forward, stored
from paged_optax.layerwise.segments import in_segments
from paged_optax.layerwise.slices import LayerIndex, put, slab, upwards
from paged_optax.layerwise.weights import Slabs

Living = TypeVar("Living", bound=PyTree)


class Fetched(NamedTuple):
    """What a group is updated from.

    Attributes:
      moments: Its moments.
      gradients: Its gradients.
      weights: Its parameters that wait on the host, by their positions.
    """

    moments: list[Stored]
    gradients: list[Array]
    weights: dict[int, Array]


class Coming(NamedTuple):
    """What travels, and where from and to.

    Attributes:
      slots: The state's stacks.
      stacks: The parameters.
      fetched: What the next group is updated from; None if no group is left.
      updated: The new values of those parameters of the layer being updated that wait
        on the host, by their positions. It has those of the groups updated so far.
      frozen: The frozen parameters of that layer that come from the host, as far as
        they have come.
    """

    slots: list[Stored]
    stacks: list[Array]
    fetched: Fetched | None
    updated: dict[int, Array]
    frozen: dict[int, Array]


# The layer's input, all inputs so far, what is kept so far, and what travels.
_Carried = tuple[PyTree, PyTree, PyTree, Coming]


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The update of one layer beside the forward pass of the layer before.

    Attributes:
      applied: The transformation.
      gradients: The gradients of all layers, stacked, and those of the parameters that
        are updated with the layers.
      clipped: `clipped(n, g)` returns what to update by, of leaf n's gradient.
      frozen: The layers' frozen parameters.
    """

    applied: Applied
    gradients: Sequence[Array]
    clipped: Callable[[int, Array], Array]
    frozen: Sequence[Array]

    @property
    def shares(self) -> Shares:
        """The frozen parameters, in as many shares as there are groups."""
        return Shares(self.frozen, len(self.groups))

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of leaves."""
        return self.applied.groups

    def forward(
        self, entered: Entered, stacks: Sequence[Array], others: Sequence[Array]
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Updates the layers and runs them forward.

        Args:
          entered: What the forward pass begins with.
          stacks: The layers' parameters.
          others: Other parameters that are updated, a part with each layer.

        Returns:
          What the forward pass makes, the state's stacks, and the other parameters.
        """
        x, inputs, keep, context, run = entered
        count, length, last = len(stacks), self.applied.length, len(self.groups) - 1

        def weights_of(i: LayerIndex, flow: Coming) -> tuple[Coming, Slabs]:
            """Layer i's parameters, read before the next layer's are written."""
            held, frozen = flow.updated, self.shares.slabs(flow.frozen, i)
            layers = dict(enumerate(flow.stacks[:count]))
            slabs = [held[n] if n in held else slab(x, i) for n, x in layers.items()]
            here = {n: x for n, x in layers.items() if n not in held}
            slabs, here = together((slabs, here))
            each = [here.get(n, x) for n, x in enumerate(flow.stacks)]
            flow = flow._replace(stacks=each, updated={}, frozen={})
            return flow, (slabs, frozen)

        def turn(
            i: LayerIndex, following: LayerIndex | None, carry: _Carried
        ) -> _Carried:
            x, inputs, keep, flow = carry
            flow, slabs = weights_of(i, flow)
            inputs = stored(inputs, x, i)
            after = None if following is None else following + 1

            def between(k: int, living: list[ArrayLike]) -> list[ArrayLike]:
                nonlocal flow
                flow, living = self._arrived(k, flow, living)
                flow, living = self._begun(k + 1, flow, i + 1, after, living)
                return living

            flow, given = self._begun(0, flow, i + 1, after, (i, slabs, x))
            results = in_segments(run, given, self._ends(flow), between)
            flow, (x, made) = self._arrived(last, flow, results)
            return x, inputs, stored(keep, made, i), flow

        flow = Coming(self.applied.slots, [*stacks, *others], None, {}, {})
        flow = flow._replace(fetched=self._fetched(flow, 0, 0))
        for k in range(len(self.groups)):
            flow, _ = self._begun(k, flow, 0, 1, ())
            flow, _ = self._arrived(k, flow, ())
        carry = upwards(length - 1, turn, (x, inputs, keep, flow), following=True)
        x, inputs, keep, flow = carry
        i = jnp.int32(length - 1)
        flow, slabs = weights_of(i, flow)
        inputs = stored(inputs, x, i)
        x, made = run(i, slabs, x)
        made = Forward(x, inputs, stored(keep, made, i), context, flow.stacks[:count])
        return made, flow.slots, flow.stacks[count:]

    def _ends(self, flow: Coming) -> list[float]:
        """Where segments end, as parts of their work; see `ends_of`."""
        leaving = moving(flow.slots, self.groups)
        gradients = [
            sum(nbytes(self.gradients[n]) for n in group.leaves)
            for group in self.groups
        ]
        coming = [x + y for x, y in zip(leaving, gradients, strict=True)]
        return ends_of(leaving, coming, self.shares.sizes)

    def _fetched(self, flow: Coming, k: int, i: LayerIndex) -> Fetched:
        """Begins to fetch what group k of layer i is updated from."""
        group, parts = self.groups[k], self.applied.length
        return Fetched(
            [slab(flow.slots[n], i, parts) for n in group.slots],
            [slab(self.gradients[n], i, parts) for n in group.leaves],
            {
                n: slab(flow.stacks[n], i, parts)
                for n in group.leaves
                if on_host(flow.stacks[n])
            },
        )

    def _begun(
        self,
        k: int,
        flow: Coming,
        i: LayerIndex,
        after: LayerIndex | None,
        living: Living,
    ) -> tuple[Coming, Living]:
        """Updates group k of layer i, begins to send it, and to fetch the next one.

        Args:
          k: The group's number.
          flow: What has arrived.
          i: The layer.
          after: The layer that is updated next; None: none is.
          living: What is computed beside the transfers, before it goes on.

        Returns:
          What travels, and `living`.
        """
        assert flow.fetched is not None  # a turn fetches what the next one updates
        group, parts = self.groups[k], self.applied.length
        moments, gradients, waiting = flow.fetched
        by_leaf = dict(zip(group.leaves, gradients, strict=True))
        leaves = range(len(flow.stacks))
        given = [
            waiting.get(n, slab(flow.stacks[n], i, parts)) if n in by_leaf else None
            for n in leaves
        ]
        by = [self.clipped(n, by_leaf[n]) if n in by_leaf else None for n in leaves]
        made = self.applied.part(group, moments, given, by, i)
        (moments, new), living = together((made, living))
        slots, stacks, updated = list(flow.slots), list(flow.stacks), dict(flow.updated)
        for n, moment in zip(group.slots, moments, strict=True):
            slots[n] = put(slots[n], moment, i, parts)
        for n, leaf in zip(group.leaves, new, strict=True):
            if n in waiting:
                updated[n] = leaf
            stacks[n] = put(stacks[n], leaf, i)
        frozen = flow.frozen | self.shares.fetched(k, i)
        flow = Coming(slots, stacks, None, updated, frozen)
        last = k + 1 == len(self.groups)
        layer = after if last else i
        if layer is None:
            return flow, living
        return flow._replace(
            fetched=self._fetched(flow, 0 if last else k + 1, layer)
        ), living

    def _arrived(self, k: int, flow: Coming, living: Living) -> tuple[Coming, Living]:
        """Waits for what travels beside segment k, and for the segment."""
        here, after = self.groups[k], self.groups[(k + 1) % len(self.groups)]
        slots = {n: flow.slots[n] for n in (*here.slots, *after.slots)}
        leaves = (*here.leaves, *after.leaves)
        stacks = {n: x for n in leaves if on_host(x := flow.stacks[n])}
        (slots, stacks, fetched, frozen), living = together(
            ((slots, stacks, flow.fetched, flow.frozen), living)
        )
        each = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        return flow._replace(
            slots=each(flow.slots, slots),
            stacks=each(flow.stacks, stacks),
            fetched=fetched,
            frozen=frozen,
        ), living
