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
        others = [layered.params[n] for n in layered.chunked]
        transfers = GroupTransfers(self.optimizer, layers.weights, True)
        overlap = _BackwardOverlap(transfers, layers, sink)
        carry, flight, back = overlap.run(start, others)
        return carry._replace(slots=flight.slots), flight.stacks, back

    def forward(
        self,
        start: ForwardStart,
        weights: Weights,
        gradients: HostGradients,
        others: Sequence[Array],
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Runs each layer forward while the layer after it is updated.

        Returns:
          The result of the forward pass, the state's stacks, and the new `others`.
        """
        transfers = GroupTransfers(self.optimizer, weights, False)
        overlap = _ForwardOverlap(transfers, start, gradients, len(weights.stacks))
        return overlap.run([*weights.stacks, *others])


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
        self, start: WorkspaceCarry, others: Sequence[Array]
    ) -> tuple[WorkspaceCarry, InFlight, PrologueGradients]:
        """Runs the pass, and updates a chunk of each of `others` with each layer."""
        layers, weights = self.layers, self.layers.weights
        last = weights.length - 1
        vectors = weights.vectors(layers.stacks)
        # XLA would fetch the last layer before the loss is computed.
        stacks, dx = after_all((layers.stacks, layers.epilogue.by_output))
        slices = weights.slices(stacks, last)
        hosted = {n: x for n, x in enumerate(slices[0]) if on_host(layers.stacks[n])}
        # The same holds of the first moments.
        slots, stacks, dx = after_all(
            (self.transfers.optimizer.layered.slots, [*stacks, *others], dx)
        )
        inputs = self._inputs(slots, 0, last)
        prefetched = weights.prefetch(stacks, last - 1)
        flight = InFlight(slots, stacks, inputs, *prefetched)
        x, dkept = layers.read(last)
        back = layers.first_gradients(dx)
        gradients, back = layers.pull(slices, x, back, dkept, jnp.int32(last))
        flight, (gradients, back) = self.transfers.wait(-1, flight, (gradients, back))
        carry = self.sink.store(start, last, gradients), back, flight, hosted
        carry, back, flight, hosted = over_layers(
            last,
            functools.partial(self._turn, vectors),
            carry,
            backward=True,
            prefetches=weights.prefetches,
            makes_room=True,
        )
        update = functools.partial(
            self._update, 0, None, None, hosted, self.sink.read(carry, 0)
        )
        for k in range(len(self.transfers.groups)):
            flight, _ = update(k, flight, ())
            flight, _ = self.transfers.wait(k, flight, ())
        return carry, flight, back

    def _turn(
        self,
        vectors: Vectors,
        i: LayerIndex,
        following: LayerIndex | None,
        carry: _BackwardCarry,
    ) -> _BackwardCarry:
        """Differentiates layer i, and updates layer i + 1."""
        (inner, back, flight, hosted), layers = carry, self.layers
        transfers, count = self.transfers, len(layers.stacks)
        fetched = flight.weights
        frozen = transfers.portions.slices(flight.frozen, i)
        prefetched = Prefetched(fetched, dict(enumerate(frozen)))
        slices, frozen = layers.weights.slices(
            flight.stacks[:count], i, prefetched, vectors
        )
        flight, slices = flight.read_first(slices, count)
        update = functools.partial(
            *(self._update, i + 1, i, following, hosted),
            self.sink.read(inner, i + 1),
        )

        def between(k: int, computed: list[ArrayLike]) -> list[ArrayLike]:
            nonlocal flight
            flight, computed = transfers.wait(k, flight, computed)
            flight, computed = update(k + 1, flight, computed)
            return computed

        x, dkept = layers.read(i)
        arguments = (slices, frozen), x, back, dkept, i
        flight, arguments = update(0, flight, arguments)
        sizes = transfers.moment_bytes
        ends = ends_of(sizes, sizes, transfers.portions.sizes)
        results = in_segments(layers.pull, arguments, ends, between)
        flight, (gradients, back) = transfers.wait(-1, flight, results)
        # Parameters that were fetched for a layer's gradients stay for its update.
        return self.sink.store(inner, i, gradients), back, flight, fetched

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
        following: LayerIndex | None,
        hosted: dict[int, Array],
        by: Sequence[Array],
        k: int,
        flight: InFlight,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of a layer, and begins to fetch the next group.

        Args:
          i: The layer that is updated.
          differentiated: The layer that is differentiated meanwhile, if any.
          following: The layer that is differentiated next, if any.
          hosted: The parameters of layer i that came from the host, by position.
          by: The gradients of layer i.
          k: The group.
          flight: The transfers.
          computed: The values of the other computation at this point.
        """
        transfers = self.transfers
        weights = [
            hosted[n] if n in hosted else read_slice(x, i, transfers.parts)
            for n, x in enumerate(flight.stacks)
        ]
        flight, _, computed = transfers.update(k, flight, weights, by, i, computed)
        last = k + 1 == len(transfers.groups)
        after = 0 if last else k + 1
        inputs = self._inputs(flight.slots, after, differentiated if last else i)
        flight = flight._replace(inputs=inputs)
        if following is None:
            return flight, computed
        weights = {
            n: self.layers.weights.read(n, flight.stacks[n], following)
            for n in transfers.groups[after].positions
            if on_host(flight.stacks[n])
        }
        frozen = transfers.portions.fetch(k, following)
        return flight._replace(
            weights=flight.weights | weights, frozen=flight.frozen | frozen
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
        flight = InFlight(layered.slots, stacks, None, {}, {})
        flight = flight._replace(inputs=self._inputs(flight, 0, 0))
        # The first layer is updated before any layer runs forward.
        for k in range(len(transfers.groups)):
            flight, _ = self._update(k, flight, 0, 1, ())
            flight, _ = transfers.wait(k, flight, ())
        last, carry = layered.length - 1, (self.start.activations, flight)
        carry = over_layers(last, self._turn, carry, prefetches=True, makes_room=True)
        activations, flight = carry
        # Nothing is left to update during the forward pass of the last layer.
        i = jnp.int32(last)
        flight, slices = self._slices(i, flight)
        activations, stacks = (
            activations.after(i, slices, self.start.run),
            flight.stacks,
        )
        forward = self.start.results(activations, stacks[:count])
        return forward, flight.slots, stacks[count:]

    def _turn(
        self,
        i: LayerIndex,
        following: LayerIndex | None,
        carry: tuple[Activations, InFlight],
    ) -> tuple[Activations, InFlight]:
        """Runs layer i forward, and updates layer i + 1."""
        (activations, flight), transfers = carry, self.transfers
        flight, slices = self._slices(i, flight)

        def run(
            i: LayerIndex, slices: LayerSlices, x: PyTree
        ) -> tuple[PyTree, PyTree, list[Array]]:
            nonlocal flight
            after = None if following is None else following + 1

            def between(k: int, values: list[ArrayLike]) -> list[ArrayLike]:
                nonlocal flight
                flight, values = transfers.wait(k, flight, values)
                flight, values = self._update(k + 1, flight, i + 1, after, values)
                return values

            arguments = i, slices, x
            flight, arguments = self._update(0, flight, i + 1, after, arguments)
            results = in_segments(self.start.run, arguments, self._ends, between)
            flight, results = transfers.wait(-1, flight, results)
            return results

        return activations.after(i, slices, run), flight

    @property
    def _ends(self) -> list[float]:
        leaving, groups = self.transfers.moment_bytes, self.transfers.groups
        stacks = self.gradients.stacks
        gradients = [sum(nbytes(stacks[n]) for n in x.positions) for x in groups]
        coming = [x + y for x, y in zip(leaving, gradients, strict=True)]
        return ends_of(leaving, coming, self.transfers.portions.sizes)

    def _slices(self, i: LayerIndex, flight: InFlight) -> tuple[InFlight, LayerSlices]:
        """Layer i's parameters, read before the next layer's are written."""
        # The previous turn updated some of them, which it fetched for that.
        new, frozen = flight.weights, self.transfers.portions.slices(flight.frozen, i)
        layers = enumerate(flight.stacks[: self.count])
        read = self.transfers.weights.read
        slices = [new[n] if n in new else read(n, x, i) for n, x in layers]
        flight, slices = flight.read_first(slices, self.count)
        return flight._replace(weights={}), (slices, frozen)

    def _inputs(self, flight: InFlight, k: int, i: LayerIndex) -> GroupInputs:
        """Begins to fetch the inputs of the update of group k of layer i."""
        group, parts = self.transfers.groups[k], self.transfers.parts
        stacks, shards = self.gradients.stacks, self.transfers.shards
        return GroupInputs(
            self.transfers.fetch_moments(flight.slots, k, i),
            [read_slice(stacks[n], i, parts, shards[n]) for n in group.positions],
            {
                n: read_slice(flight.stacks[n], i, parts, shards[n])
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
        """Updates group k of layer i, and begins to fetch the next group.

        After the last group that is the first group of layer `after`, if there is one.
        """
        assert flight.inputs is not None  # every turn fetches what the next one updates
        group, parts = self.transfers.groups[k], self.transfers.parts
        _, gradients, fetched = flight.inputs
        weights = [
            fetched.get(n, read_slice(x, i, parts)) if n in group.positions else None
            for n, x in enumerate(flight.stacks)
        ]
        pairs = zip(group.positions, gradients, strict=True)
        clipped = {n: self.gradients.clip_leaf(n, g) for n, g in pairs}
        by = [clipped.get(n) for n in range(len(weights))]
        flight, new, computed = self.transfers.update(
            k, flight, weights, by, i, computed
        )
        pairs = zip(group.positions, new, strict=True)
        updated = {n: x for n, x in pairs if n in fetched}
        flight = flight._replace(
            inputs=None,
            weights=flight.weights | updated,
            frozen=flight.frozen | self.transfers.portions.fetch(k, i),
        )
        last = k + 1 == len(self.transfers.groups)
        layer = after if last else i
        if layer is None:
            return flight, computed
        inputs = self._inputs(flight, 0 if last else k + 1, layer)
        return flight._replace(inputs=inputs), computed
