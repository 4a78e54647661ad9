"""One layer is updated while another one is computed.

A layer's leaves are in groups, and the other layer's computation, its gradients or its
forward pass, is in as many segments. Beside each segment the new moments of one group
travel to the host, and those of the group that is next travel to the device. So no
stack is read and written at once, because XLA would copy it. Between two segments a
group is updated.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.forward import Activations, Forward, ForwardStart
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.overlap import FrozenPortions, Group, ends_of, in_segments
from paged_optax.layerwise.slabs import LayerIndex, put, slab, upwards
from paged_optax.layerwise.weights import Slabs

Values = TypeVar("Values", bound=PyTree)


def _together(values: Values) -> Values:
    """Keeps what comes after all these values behind all of them."""
    return lax.optimization_barrier(values)


class GroupInputs(NamedTuple):
    """What a group is updated from, of what comes from the host for its update.

    Attributes:
      moments: Its moments.
      gradients: Its gradients, if they wait on the host.
      weights: Its parameters that are fetched for the update, by their positions.
    """

    moments: list[Stored]
    gradients: list[Array]
    weights: dict[int, Array]


class InFlight(NamedTuple):
    """Buffers in flight between host and device.

    Attributes:
      slots: The state's stacks.
      stacks: The parameters: the layers', and those that are updated in chunks.
      inputs: What the next group is updated from; None if no group is left.
      weights: Of the layer that is computed next, the parameters that wait on the host,
        by their positions, as far as they are on the device.
      frozen: Of that layer, the frozen parameters that come from the host, likewise.
    """

    slots: list[Stored]
    stacks: list[Array]
    inputs: GroupInputs | None
    weights: dict[int, Array]
    frozen: dict[int, Array]

    def read_first(
        self, slabs: list[Array], count: int
    ) -> tuple["InFlight", list[Array]]:
        """Binds each read of a layer's slabs, of `count` stacks, before each write."""
        read = {
            n: x for n, x in enumerate(self.stacks[:count]) if n not in self.weights
        }
        # Or XLA would copy a stack that is written before it is read.
        slabs, read = _together((slabs, read))
        stacks = [read.get(n, x) for n, x in enumerate(self.stacks)]
        return self._replace(stacks=stacks, frozen={}), slabs


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The update of one layer beside the computation of another.

    Attributes:
      optimizer: The transformation.
      frozen: The layers' frozen parameters.
      fetches_weights: Whether `InFlight.weights` come from the host. They may be those
        that have just been updated.
    """

    optimizer: LayerOptimizer
    frozen: Sequence[Array]
    fetches_weights: ClassVar[bool]

    @functools.cached_property
    def portions(self) -> FrozenPortions:
        """The frozen parameters, in as many shares as there are groups."""
        return FrozenPortions(self.frozen, len(self.groups))

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of leaves."""
        return self.optimizer.groups

    @property
    def moment_bytes(self) -> list[int]:
        """Bytes of each group's moments that are on the host."""
        slots = self.optimizer.layered.slots
        return [
            sum(nbytes(x) for n in group.slot_positions if on_host(x := slots[n]))
            for group in self.groups
        ]

    def update_group(
        self,
        k: int,
        flight: InFlight,
        weights: Sequence[Array | None],
        gradients: Sequence[Array | None],
        i: LayerIndex,
        computed: Values,
    ) -> tuple[InFlight, list[Array], Values]:
        """Updates group k of layer i, and begins to send it.

        Args:
          k: The group's number.
          flight: What has arrived.
          weights: The layer's parameters; see `LayerOptimizer.update_group`.
          gradients: Their gradients.
          i: The layer.
          computed: What is computed beside the transfers, before it goes on.

        Returns:
          What travels, the group's parameters, and `computed`.
        """
        assert flight.inputs is not None  # a turn fetches what the next one updates
        group, parts = self.groups[k], self.optimizer.layered.length
        new = self.optimizer.update_group(
            group, flight.inputs.moments, weights, gradients, i
        )
        # What is computed goes on after the update, with the transfers beside it.
        (moments, leaves), computed = _together((new, computed))
        slots, stacks = list(flight.slots), list(flight.stacks)
        for n, moment in zip(group.slot_positions, moments, strict=True):
            slots[n] = put(slots[n], moment, i, parts)
        for n, leaf in zip(group.positions, leaves, strict=True):
            stacks[n] = put(stacks[n], leaf, i)
        return flight._replace(slots=slots, stacks=stacks), leaves, computed

    def wait(
        self, k: int, flight: InFlight, computed: Values
    ) -> tuple[InFlight, Values]:
        """Waits for what travels beside segment k, and for the segment."""
        groups = self.groups[k], self.groups[(k + 1) % len(self.groups)]
        # Bound are those buffers alone that travel here: others stay free to move.
        slots = {n: flight.slots[n] for group in groups for n in group.slot_positions}
        positions = [n for group in groups for n in group.positions]
        stacks = {n: x for n in positions if on_host(x := flight.stacks[n])}
        weights = flight.weights if self.fetches_weights else {}
        moving = slots, stacks, flight.inputs, weights, flight.frozen
        (slots, stacks, inputs, weights, frozen), computed = _together(
            (moving, computed)
        )
        each = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        return InFlight(
            each(flight.slots, slots),
            each(flight.stacks, stacks),
            inputs,
            flight.weights | weights,
            frozen,
        ), computed


class Stage(NamedTuple):
    """One layer is updated, and another one is differentiated.

    Attributes:
      updated: The layer that is updated.
      weights: Its parameters that came from the host, by their positions.
      gradients: Its gradients.
      differentiated: The layer that is differentiated; None: none is.
      following: The layer that is differentiated next; None: none is.
    """

    updated: LayerIndex
    weights: dict[int, Array]
    gradients: Sequence[Array]
    differentiated: LayerIndex | None = None
    following: LayerIndex | None = None


class BackwardOverlap(Overlap):
    """The update of one layer beside the gradients of the layer before."""

    fetches_weights = True

    @property
    def ends(self) -> list[float]:
        """Where the segments of the other computation end, as parts of its work."""
        return ends_of(self.moment_bytes, self.moment_bytes, self.portions.sizes)

    def start(
        self, stacks: list[Array], i: LayerIndex, computed: Values
    ) -> tuple[InFlight, Values]:
        """Fetches what the first turn needs, which updates layer i."""
        # Else XLA fetches before what is computed first.
        slots, stacks, computed = _together(
            (self.optimizer.layered.slots, stacks, computed)
        )
        inputs = self._inputs(slots, 0, i)
        weights = {n: slab(x, i - 1) for n, x in enumerate(stacks) if on_host(x)}
        frozen = {n: slab(x, i - 1) for n, x in enumerate(self.frozen) if on_host(x)}
        return InFlight(slots, stacks, inputs, weights, frozen), computed

    def _inputs(
        self, slots: Sequence[Stored], k: int, i: LayerIndex | None
    ) -> GroupInputs:
        """Begins to fetch group k's moments of layer i, or of none."""
        if i is None:
            return GroupInputs([], [], {})
        parts = self.optimizer.layered.length
        moments = [slab(slots[n], i, parts) for n in self.groups[k].slot_positions]
        return GroupInputs(moments, [], {})

    def update(
        self, k: int, flight: InFlight, stage: Stage, computed: Values
    ) -> tuple[InFlight, Values]:
        """Updates group k of a layer, begins to send it, and to fetch the next one."""
        i, parts = stage.updated, self.optimizer.layered.length
        weights = [
            stage.weights[n] if n in stage.weights else slab(x, i, parts)
            for n, x in enumerate(flight.stacks)
        ]
        flight, _, computed = self.update_group(
            k, flight, weights, stage.gradients, i, computed
        )
        last = k + 1 == len(self.groups)
        after = 0 if last else k + 1
        inputs = self._inputs(flight.slots, after, stage.differentiated if last else i)
        flight = flight._replace(inputs=inputs)
        if stage.following is None:
            return flight, computed
        weights = {
            n: slab(flight.stacks[n], stage.following)
            for n in self.groups[after].positions
            if on_host(flight.stacks[n])
        }
        frozen = self.portions.fetch(k, stage.following)
        return flight._replace(
            weights=flight.weights | weights, frozen=flight.frozen | frozen
        ), computed

    def finish(self, flight: InFlight, stage: Stage) -> InFlight:
        """Updates the last layer, with nothing beside it."""
        for k in range(len(self.groups)):
            flight, _ = self.update(k, flight, stage, ())
            flight, _ = self.wait(k, flight, ())
        return flight


@dataclasses.dataclass(frozen=True)
class ForwardOverlap(Overlap):
    """The update of one layer beside the forward pass of the layer before.

    Attributes:
      gradients: The gradients of all layers, stacked, and those of the parameters that
        are updated with the layers. A group's come from the host with its moments.
      clipped: `clipped(n, g)` returns what to update by, of the gradient at position n.
    """

    gradients: Sequence[Array]
    clipped: Callable[[int, Array], Array]
    fetches_weights = False

    @property
    def ends(self) -> list[float]:
        """Where segments end, as parts of their work; see `ends_of`."""
        gradients = [
            sum(nbytes(self.gradients[n]) for n in group.positions)
            for group in self.groups
        ]
        coming = [x + y for x, y in zip(self.moment_bytes, gradients, strict=True)]
        return ends_of(self.moment_bytes, coming, self.portions.sizes)

    def forward(
        self, start: ForwardStart, stacks: Sequence[Array], others: Sequence[Array]
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Updates the layers and the chunked others, and runs the layers forward.

        Returns:
          What the forward pass returns, the state's stacks, and the other parameters.
        """
        count, layered = len(stacks), self.optimizer.layered

        def turn(
            i: LayerIndex,
            following: LayerIndex | None,
            carry: tuple[Activations, InFlight],
        ) -> tuple[Activations, InFlight]:
            # Layer i runs forward, and layer i + 1 is updated beside it.
            activations, flight = carry
            flight, slabs = self._slabs(i, flight, count)

            def run(i: LayerIndex, slabs: Slabs, x: PyTree) -> tuple[PyTree, PyTree]:
                nonlocal flight
                after = None if following is None else following + 1

                def between(k: int, values: list[ArrayLike]) -> list[ArrayLike]:
                    # Group k has left and the next one is here: it is updated, and
                    # leaves beside the segment after.
                    nonlocal flight
                    flight, values = self.wait(k, flight, values)
                    flight, values = self._update(k + 1, flight, i + 1, after, values)
                    return values

                flight, arguments = self._update(0, flight, i + 1, after, (i, slabs, x))
                results = in_segments(start.run, arguments, self.ends, between)
                flight, results = self.wait(-1, flight, results)
                return results

            return activations.after(i, slabs, run), flight

        flight = InFlight(layered.slots, [*stacks, *others], None, {}, {})
        flight = flight._replace(inputs=self._inputs(flight, 0, 0))
        # No layer runs forward before the first one is updated.
        for k in range(len(self.groups)):
            flight, _ = self._update(k, flight, 0, 1, ())
            flight, _ = self.wait(k, flight, ())
        last, carry = layered.length - 1, (start.activations, flight)
        carry = upwards(last, turn, carry, prefetches=True, makes_room=True)
        activations, flight = carry
        # The last layer has been updated, so that nothing is beside its forward pass.
        i = jnp.int32(last)
        flight, slabs = self._slabs(i, flight, count)
        activations, stacks = activations.after(i, slabs, start.run), flight.stacks
        forward = Forward(activations, start.context, stacks[:count])
        return forward, flight.slots, stacks[count:]

    def _slabs(
        self, i: LayerIndex, flight: InFlight, count: int
    ) -> tuple[InFlight, Slabs]:
        """Layer i's parameters, read before the next layer's are written."""
        # What has been updated a turn ago has come from the host for that.
        new, frozen = flight.weights, self.portions.slabs(flight.frozen, i)
        layers = enumerate(flight.stacks[:count])
        slabs = [new[n] if n in new else slab(x, i) for n, x in layers]
        flight, slabs = flight.read_first(slabs, count)
        return flight._replace(weights={}), (slabs, frozen)

    def _inputs(self, flight: InFlight, k: int, i: LayerIndex) -> GroupInputs:
        """Begins to fetch what group k of layer i is updated from."""
        group, parts = self.groups[k], self.optimizer.layered.length
        return GroupInputs(
            [slab(flight.slots[n], i, parts) for n in group.slot_positions],
            [slab(self.gradients[n], i, parts) for n in group.positions],
            {
                n: slab(flight.stacks[n], i, parts)
                for n in group.positions
                if on_host(flight.stacks[n])
            },
        )

    def _update(
        self,
        k: int,
        flight: InFlight,
        i: LayerIndex,
        after: LayerIndex | None,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of layer i, begins to send it, and to fetch the next one.

        Layer `after` is updated next; None: none is.
        """
        assert flight.inputs is not None  # a turn fetches what the next one updates
        group, parts = self.groups[k], self.optimizer.layered.length
        _, gradients, fetched = flight.inputs
        weights = [
            fetched.get(n, slab(x, i, parts)) if n in group.positions else None
            for n, x in enumerate(flight.stacks)
        ]
        pairs = zip(group.positions, gradients, strict=True)
        clipped = {n: self.clipped(n, g) for n, g in pairs}
        by = [clipped.get(n) for n in range(len(weights))]
        flight, new, computed = self.update_group(k, flight, weights, by, i, computed)
        pairs = zip(group.positions, new, strict=True)
        updated = {n: x for n, x in pairs if n in fetched}
        flight = flight._replace(
            inputs=None,
            weights=flight.weights | updated,
            frozen=flight.frozen | self.portions.fetch(k, i),
        )
        last = k + 1 == len(self.groups)
        layer = after if last else i
        if layer is None:
            return flight, computed
        inputs = self._inputs(flight, 0 if last else k + 1, layer)
        return flight._replace(inputs=inputs), computed
