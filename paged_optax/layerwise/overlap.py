"""The schedule that updates one layer while another one is computed."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.backend.types import in_shard_map
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.forward import (
    Activations,
    Forward,
    ForwardStart,
    PrologueGradients,
)
from paged_optax.layerwise.group_transfers import (
    GroupInputs,
    GroupTransfers,
    InFlight,
    Values,
    after_all,
)
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.segments import ends_of, in_segments
from paged_optax.layerwise.sinks import HostGradients, WorkspaceCarry, WorkspaceSink
from paged_optax.layerwise.slices import LayerIndex, over_layers, read_slice
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.weights import LayerSlices, Prefetched, Vectors, Weights


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """Updates a layer while the layer before it is computed."""

    optimizer: LayerOptimizer

    @staticmethod
    def possible(optimizer: LayerOptimizer) -> bool:
        """True if XLA overlaps the transfers of such an update."""
        several = optimizer.layered.length > 1 and len(optimizer.groups) > 1
        return GPU_FETCHES_AHEAD and several and not in_shard_map()

    def backward(
        self, layers: BackwardPass, sink: WorkspaceSink, start: WorkspaceCarry
    ) -> tuple[WorkspaceCarry, list[Array], PrologueGradients]:
        """Computes each layer's gradients while the layer after it is updated."""
        layered = self.optimizer.layered
        remaining = [layered.params[n] for n in layered.chunked]
        transfers = GroupTransfers(self.optimizer, layers.weights, True)
        schedule = _BackwardOverlap(transfers, layers, sink)
        carry, transfer_state, back = schedule.run(start, remaining)
        return carry._replace(slots=transfer_state.slots), transfer_state.stacks, back

    def forward(
        self,
        start: ForwardStart,
        weights: Weights,
        gradients: HostGradients,
        remaining: Sequence[Array],
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Runs each layer forward while the layer after it is updated.

        Returns:
          The result of the forward pass, the state's stacks, and the new `remaining`.
        """
        transfers = GroupTransfers(self.optimizer, weights, False)
        schedule = _ForwardOverlap(transfers, start, gradients, len(weights.stacks))
        return schedule.run([*weights.stacks, *remaining])


# The sink's carry, the gradients by the prologue's output, the transfers, and the
# fetched parameters of the layer that is updated next.
_BackwardCarry = tuple[WorkspaceCarry, PrologueGradients, InFlight, dict[int, Array]]


@dataclasses.dataclass(frozen=True)
class _BackwardOverlap:
    """Updates a layer during the backward pass of the layer before it."""

    transfers: GroupTransfers
    layers: BackwardPass
    sink: WorkspaceSink

    def run(
        self, start: WorkspaceCarry, remaining: Sequence[Array]
    ) -> tuple[WorkspaceCarry, InFlight, PrologueGradients]:
        """Runs the pass, and updates a chunk of each of `remaining` with each layer."""
        layers, weights = self.layers, self.layers.weights
        last = weights.length - 1
        vectors = weights.vectors(layers.stacks)
        # XLA would fetch the last layer before the loss is computed.
        stacks, dx = after_all((layers.stacks, layers.epilogue.by_output))
        slices = weights.slices(stacks, last)
        offloaded = {n: x for n, x in enumerate(slices[0]) if on_host(layers.stacks[n])}
        # The same holds of the first moments.
        slots, stacks, dx = after_all(
            (self.transfers.optimizer.layered.slots, [*stacks, *remaining], dx)
        )
        inputs = self._inputs(slots, 0, last)
        prefetched = weights.prefetch(stacks, last - 1)
        transfer_state = InFlight(slots, stacks, inputs, *prefetched)
        x, dkept = layers.read(last)
        back = layers.first_gradients(dx)
        gradients, back = layers.pull(slices, x, back, dkept, jnp.int32(last))
        transfer_state, (gradients, back) = self.transfers.wait(
            -1, transfer_state, (gradients, back)
        )
        carry = self.sink.store(start, last, gradients), back, transfer_state, offloaded
        carry, back, transfer_state, offloaded = over_layers(
            last,
            functools.partial(self._turn, vectors),
            carry,
            backward=True,
            prefetches=weights.prefetches,
            makes_room=True,
        )
        update = functools.partial(
            self._update, 0, None, None, offloaded, self.sink.read(carry, 0)
        )
        for k in range(len(self.transfers.groups)):
            transfer_state, _ = update(k, transfer_state, ())
            transfer_state, _ = self.transfers.wait(k, transfer_state, ())
        return carry, transfer_state, back

    def _turn(
        self,
        vectors: Vectors,
        i: LayerIndex,
        next_item: LayerIndex | None,
        carry: _BackwardCarry,
    ) -> _BackwardCarry:
        """Differentiates layer i, and updates layer i + 1."""
        (inner, back, transfer_state, offloaded), layers = carry, self.layers
        transfers, count = self.transfers, len(layers.stacks)
        loaded = transfer_state.weights
        frozen = transfers.portions.slices(transfer_state.frozen, i)
        prefetched = Prefetched(loaded, dict(enumerate(frozen)))
        slices, frozen = layers.weights.slices(
            transfer_state.stacks[:count], i, prefetched, vectors
        )
        transfer_state, slices = transfer_state.read_first(slices, count)
        update = functools.partial(
            *(self._update, i + 1, i, next_item, offloaded),
            self.sink.read(inner, i + 1),
        )

        def between(k: int, computed: list[ArrayLike]) -> list[ArrayLike]:
            nonlocal transfer_state
            transfer_state, computed = transfers.wait(k, transfer_state, computed)
            transfer_state, computed = update(k + 1, transfer_state, computed)
            return computed

        x, dkept = layers.read(i)
        args = (slices, frozen), x, back, dkept, i
        transfer_state, args = update(0, transfer_state, args)
        sizes = transfers.moment_bytes
        ends = ends_of(sizes, sizes, transfers.portions.sizes)
        results = in_segments(layers.pull, args, ends, between)
        transfer_state, (gradients, back) = transfers.wait(-1, transfer_state, results)
        # Parameters that were fetched for a layer's gradients stay for its update.
        return self.sink.store(inner, i, gradients), back, transfer_state, loaded

    def _inputs(
        self, slots: Sequence[Stored], k: int, i: LayerIndex | None
    ) -> GroupInputs:
        if i is None:
            return GroupInputs([], [], {})
        return GroupInputs(self.transfers.fetch_moments(slots, k, i), [], {})

    def _update(
        self,
        i: LayerIndex,
        differentiated: LayerIndex | None,
        next_item: LayerIndex | None,
        offloaded: dict[int, Array],
        by: Sequence[Array],
        k: int,
        transfer_state: InFlight,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of a layer, and begins to fetch the next group.

        Args:
          i: The layer that is updated.
          differentiated: The layer that is differentiated meanwhile, if any.
          next_item: The layer that is differentiated next, if any.
          offloaded: The parameters of layer i that came from the host, by position.
          by: The gradients of layer i.
          k: The group.
          transfer_state: The transfers.
          computed: The values of the other computation at this point.
        """
        transfers = self.transfers
        weights = [
            offloaded[n] if n in offloaded else read_slice(x, i, transfers.parts)
            for n, x in enumerate(transfer_state.stacks)
        ]
        transfer_state, _, computed = transfers.update(
            k, transfer_state, weights, by, i, computed
        )
        last = k + 1 == len(transfers.groups)
        after = 0 if last else k + 1
        inputs = self._inputs(
            transfer_state.slots, after, differentiated if last else i
        )
        transfer_state = transfer_state._replace(inputs=inputs)
        if next_item is None:
            return transfer_state, computed
        weights = {
            n: self.layers.weights.read(n, transfer_state.stacks[n], next_item)
            for n in transfers.groups[after].positions
            if on_host(transfer_state.stacks[n])
        }
        frozen = transfers.portions.fetch(k, next_item)
        return transfer_state._replace(
            weights=transfer_state.weights | weights,
            frozen=transfer_state.frozen | frozen,
        ), computed


@dataclasses.dataclass(frozen=True)
class _ForwardOverlap:
    """Updates a layer during the forward pass of the layer before it.

    Attributes:
      transfers: The groups of leaves.
      start: The prologue's results.
      gradients: The gradients. A group's are fetched with its moments.
      count: The number of the layers' stacks.
    """

    transfers: GroupTransfers
    start: ForwardStart
    gradients: HostGradients
    count: int

    def run(self, stacks: list[Array]) -> tuple[Forward, list[Stored], list[Array]]:
        """Runs the layers forward. `stacks` has the chunked parameters last."""
        transfers, count = self.transfers, self.count
        layered = transfers.optimizer.layered
        transfer_state = InFlight(layered.slots, stacks, None, {}, {})
        transfer_state = transfer_state._replace(
            inputs=self._inputs(transfer_state, 0, 0)
        )
        # The first layer is updated before any layer runs forward.
        for k in range(len(transfers.groups)):
            transfer_state, _ = self._update(k, transfer_state, 0, 1, ())
            transfer_state, _ = transfers.wait(k, transfer_state, ())
        last, carry = layered.length - 1, (self.start.activations, transfer_state)
        carry = over_layers(last, self._turn, carry, prefetches=True, makes_room=True)
        activations, transfer_state = carry
        # Nothing is left to update during the forward pass of the last layer.
        i = jnp.int32(last)
        transfer_state, slices = self._slices(i, transfer_state)
        activations, stacks = (
            activations.after(i, slices, self.start.run),
            transfer_state.stacks,
        )
        forward = self.start.results(activations, stacks[:count])
        return forward, transfer_state.slots, stacks[count:]

    def _turn(
        self,
        i: LayerIndex,
        next_item: LayerIndex | None,
        carry: tuple[Activations, InFlight],
    ) -> tuple[Activations, InFlight]:
        """Runs layer i forward, and updates layer i + 1."""
        (activations, transfer_state), transfers = carry, self.transfers
        transfer_state, slices = self._slices(i, transfer_state)

        def run(
            i: LayerIndex, slices: LayerSlices, x: PyTree
        ) -> tuple[PyTree, PyTree, list[Array]]:
            nonlocal transfer_state
            after = None if next_item is None else next_item + 1

            def between(k: int, values: list[ArrayLike]) -> list[ArrayLike]:
                nonlocal transfer_state
                transfer_state, values = transfers.wait(k, transfer_state, values)
                transfer_state, values = self._update(
                    k + 1, transfer_state, i + 1, after, values
                )
                return values

            args = i, slices, x
            transfer_state, args = self._update(0, transfer_state, i + 1, after, args)
            results = in_segments(self.start.run, args, self._ends, between)
            transfer_state, results = transfers.wait(-1, transfer_state, results)
            return results

        return activations.after(i, slices, run), transfer_state

    @property
    def _ends(self) -> list[float]:
        leaving, groups = self.transfers.moment_bytes, self.transfers.groups
        stacks = self.gradients.stacks
        gradients = [sum(nbytes(stacks[n]) for n in x.positions) for x in groups]
        coming = [x + y for x, y in zip(leaving, gradients, strict=True)]
        return ends_of(leaving, coming, self.transfers.portions.sizes)

    def _slices(
        self, i: LayerIndex, transfer_state: InFlight
    ) -> tuple[InFlight, LayerSlices]:
        """Layer i's parameters, read before the next layer's are written."""
        # The previous turn updated some of them, which it fetched for that.
        new, frozen = (
            transfer_state.weights,
            self.transfers.portions.slices(transfer_state.frozen, i),
        )
        layers = enumerate(transfer_state.stacks[: self.count])
        read = self.transfers.weights.read
        slices = [new[n] if n in new else read(n, x, i) for n, x in layers]
        transfer_state, slices = transfer_state.read_first(slices, self.count)
        return transfer_state._replace(weights={}), (slices, frozen)

    def _inputs(self, transfer_state: InFlight, k: int, i: LayerIndex) -> GroupInputs:
        """Begins to fetch the inputs of the update of group k of layer i."""
        group, parts = self.transfers.groups[k], self.transfers.parts
        stacks, shards = self.gradients.stacks, self.transfers.shards
        return GroupInputs(
            self.transfers.fetch_moments(transfer_state.slots, k, i),
            [read_slice(stacks[n], i, parts, shards[n]) for n in group.positions],
            {
                n: read_slice(transfer_state.stacks[n], i, parts, shards[n])
                for n in group.positions
                if on_host(transfer_state.stacks[n])
            },
        )

    def _update(
        self,
        k: int,
        transfer_state: InFlight,
        i: LayerIndex,
        after: LayerIndex | None,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of layer i, and begins to fetch the next group.

        After the last group that is the first group of layer `after`, if there is one.
        """
        assert (
            transfer_state.inputs is not None
        )  # every turn fetches what the next one updates
        group, parts = self.transfers.groups[k], self.transfers.parts
        _, gradients, loaded = transfer_state.inputs
        weights = [
            loaded.get(n, read_slice(x, i, parts)) if n in group.positions else None
            for n, x in enumerate(transfer_state.stacks)
        ]
        pairs = zip(group.positions, gradients, strict=True)
        clipped = {n: self.gradients.clip_leaf(n, g) for n, g in pairs}
        by = [clipped.get(n) for n in range(len(weights))]
        transfer_state, new, computed = self.transfers.update(
            k, transfer_state, weights, by, i, computed
        )
        pairs = zip(group.positions, new, strict=True)
        updated = {n: x for n, x in pairs if n in loaded}
        transfer_state = transfer_state._replace(
            inputs=None,
            weights=transfer_state.weights | updated,
            frozen=transfer_state.frozen | self.transfers.portions.fetch(k, i),
        )
        last = k + 1 == len(self.transfers.groups)
        layer = after if last else i
        if layer is None:
            return transfer_state, computed
        inputs = self._inputs(transfer_state, 0 if last else k + 1, layer)
        return transfer_state._replace(inputs=inputs), computed
