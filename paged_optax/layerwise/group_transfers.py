"""Groups of a layer's leaves, updated while their neighbours travel.

A layer's leaves are in groups. Another layer's computation, its backward or its forward
pass, runs in as many segments. During each segment the new moments of one group travel
to the host, and the next group's travel to the device. No stack is then read and
written at the same time, which would make XLA copy it. Between two segments a group is
updated.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.segments import FrozenPortions, Group
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.layerwise.weights import Weights

Values = TypeVar("Values", bound=PyTree)


def after_all(values: Values) -> Values:
    """Orders all uses of these values after all of them."""
    return lax.optimization_barrier(values)


class GroupInputs(NamedTuple):
    """Host arrays that a group's update fetches.

    Attributes:
      moments: The group's moments.
      gradients: Its gradients, if they are on the host.
      weights: Its parameters that are fetched for the update, by position.
    """

    moments: list[Stored]
    gradients: list[Array]
    weights: dict[int, Array]


class InFlight(NamedTuple):
    """Buffers in flight between host and device.

    Attributes:
      slots: The state's stacks.
      stacks: The parameters of the layers, and the chunked parameters.
      inputs: The inputs of the next group's update; None after the last group.
      weights: The fetched parameters of the layer that is computed next, by position.
      frozen: Its fetched frozen parameters, by position.
    """

    slots: list[Stored]
    stacks: list[Array]
    inputs: GroupInputs | None
    weights: dict[int, Array]
    frozen: dict[int, Array]

    def read_first(
        self, slices: list[Array], count: int
    ) -> tuple["InFlight", list[Array]]:
        """Orders each read of a layer, in `count` stacks, before each write."""
        read = {
            n: x for n, x in enumerate(self.stacks[:count]) if n not in self.weights
        }
        # XLA would copy a stack that is written before it is read.
        slices, read = after_all((slices, read))
        stacks = [read.get(n, x) for n, x in enumerate(self.stacks)]
        return self._replace(stacks=stacks, frozen={}), slices


@dataclasses.dataclass(frozen=True)
class GroupTransfers:
    """Updates groups of leaves, and orders their transfers.

    Attributes:
      optimizer: The transformation.
      weights: The layers' parameters.
      fetches_weights: If true, `InFlight.weights` come from the host. In a forward pass
        they are the parameters that were just updated.
    """

    optimizer: LayerOptimizer
    weights: Weights
    fetches_weights: bool

    @functools.cached_property
    def portions(self) -> FrozenPortions:
        """The frozen parameters, in as many portions as there are groups."""
        return FrozenPortions(self.weights, len(self.groups))

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of leaves."""
        return self.optimizer.groups

    @property
    def parts(self) -> int:
        """The number of layers."""
        return self.optimizer.layered.length

    @property
    def shards(self) -> list[Shards | None]:
        """The division of each of the layers' parameters, and of the chunked ones."""
        return [*self.weights.shards, *[None] * len(self.optimizer.layered.chunked)]

    @property
    def moment_bytes(self) -> list[int]:
        """The bytes of each group's moments in host memory."""
        slots = self.optimizer.layered.slots
        return [
            sum(nbytes(x) for n in group.slot_positions if on_host(x := slots[n]))
            for group in self.groups
        ]

    def fetch_moments(
        self, slots: Sequence[Stored], k: int, i: LayerIndex
    ) -> list[Stored]:
        """Begins to fetch group k's moments of layer i."""
        shards = self.optimizer.layered.slot_shards
        return [
            read_slice(slots[n], i, self.parts, shards[n])
            for n in self.groups[k].slot_positions
        ]

    def update(
        self,
        k: int,
        transfer_state: InFlight,
        weights: Sequence[Array | None],
        gradients: Sequence[Array | None],
        i: LayerIndex,
        computed: Values,
    ) -> tuple[InFlight, list[Array], Values]:
        """Updates group k of layer i, and begins to write it back.

        Returns:
          The transfers, the group's parameters, and `computed`.
        """
        assert (
            transfer_state.inputs is not None
        )  # every turn fetches what the next one updates
        group = self.groups[k]
        new = self.optimizer.update_group(
            group, transfer_state.inputs.moments, weights, gradients, i
        )
        # The other computation continues after the update, during the transfers.
        (moments, leaves), computed = after_all((new, computed))
        slots, stacks = list(transfer_state.slots), list(transfer_state.stacks)
        for n, moment in zip(group.slot_positions, moments, strict=True):
            shards = self.optimizer.layered.slot_shards[n]
            slots[n] = write_slice(slots[n], moment, i, self.parts, shards)
        for n, leaf in zip(group.positions, leaves, strict=True):
            stacks[n] = write_slice(stacks[n], leaf, i, shards=self.shards[n])
        return transfer_state._replace(slots=slots, stacks=stacks), leaves, computed

    def wait(
        self, k: int, transfer_state: InFlight, computed: Values
    ) -> tuple[InFlight, Values]:
        """Waits for segment k, and for the transfers during it."""
        groups = self.groups[k], self.groups[(k + 1) % len(self.groups)]
        # The barrier has the buffers of these transfers alone. Others may move.
        slots = {
            n: transfer_state.slots[n] for group in groups for n in group.slot_positions
        }
        positions = [n for group in groups for n in group.positions]
        stacks = {n: x for n in positions if on_host(x := transfer_state.stacks[n])}
        weights = transfer_state.weights if self.fetches_weights else {}
        moving = slots, stacks, transfer_state.inputs, weights, transfer_state.frozen
        (slots, stacks, inputs, weights, frozen), computed = after_all(
            (moving, computed)
        )
        replace = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        return InFlight(
            replace(transfer_state.slots, slots),
            replace(transfer_state.stacks, stacks),
            inputs,
            transfer_state.weights | weights,
            frozen,
        ), computed
