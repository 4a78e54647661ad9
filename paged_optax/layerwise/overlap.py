"""The schedules that update one layer while another one is computed."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.backend.types import in_shard_map
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import HostGradients, WorkspaceCarry, WorkspaceSink
from paged_optax.layerwise.forward import (
    Activations,
    Forward,
    ForwardStart,
    PrologueGradients,
)
from paged_optax.layerwise.layer_optimizer import LayerLeaves, LayerOptimizer
from paged_optax.layerwise.segments import (
    GroupInputs,
    GroupTransfers,
    InFlight,
    Values,
    after_all,
)
from paged_optax.layerwise.slices import LayerIndex, over_layers, read_slice
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.weights import Vectors, Weights


def can_overlap(optimizer: LayerOptimizer) -> bool:
    """True if XLA overlaps the transfers of an update with a computation."""
    several = optimizer.layered.length > 1 and len(optimizer.groups) > 1
    return GPU_FETCHES_AHEAD and several and not in_shard_map()


# The sink's carry, the gradients by the prologue's output, the transfers, and the
# fetched parameters of the layer that is updated next.
_BackwardCarry = tuple[WorkspaceCarry, PrologueGradients, InFlight, dict[int, Array]]


@dataclasses.dataclass(frozen=True)
class BackwardOverlap:
    """Updates a layer during the backward pass of the layer before it."""

    optimizer: LayerOptimizer
    backward: BackwardPass
    sink: WorkspaceSink

    @functools.cached_property
    def transfers(self) -> GroupTransfers:
        """The groups of leaves."""
        return GroupTransfers(self.optimizer, self.backward.weights, True)

    def run(
        self, start: WorkspaceCarry
    ) -> tuple[WorkspaceCarry, list[Array], PrologueGradients]:
        """Runs the pass, and updates a chunk of each chunked parameter with a layer."""
        backward, transfers = self.backward, self.transfers
        weights = backward.weights
        layered, last = self.optimizer.layered, weights.length - 1
        vectors = weights.vectors(backward.stacks)
        # XLA would fetch the last layer before the loss is computed.
        stacks, dx = after_all((backward.stacks, backward.epilogue.by_output))
        slices = weights.slices(stacks, last)
        offloaded = {n: slices[n] for n, x in enumerate(backward.stacks) if on_host(x)}
        # The same holds of the first moments.
        chunked = [layered.params[n] for n in layered.chunked]
        moments, stacks, dx = after_all((layered.moments, [*stacks, *chunked], dx))
        inputs = self._inputs(moments, 0, last)
        prefetched = weights.prefetch(stacks[: len(backward.stacks)], last - 1)
        state = InFlight(moments, stacks, inputs, prefetched)
        x, dkept = backward.read(last)
        cts = backward.first_gradients(dx)
        results = backward.pull(slices, x, cts, dkept, jnp.int32(last))
        state, (gradients, cts) = transfers.wait(-1, state, results)
        carry, cts, state, offloaded = over_layers(
            last,
            functools.partial(self._turn, vectors),
            (self.sink.store(start, last, gradients), cts, state, offloaded),
            backward=True,
            prefetches=weights.prefetches,
            makes_room=True,
        )
        by = self.sink.read(carry, 0)
        update = functools.partial(self._update, 0, None, None, offloaded, by)
        state = transfers.update_all(state, update)
        return carry._replace(moments=state.moments), state.stacks, cts

    def _turn(
        self,
        vectors: Vectors,
        i: LayerIndex,
        next_item: LayerIndex | None,
        carry: _BackwardCarry,
    ) -> _BackwardCarry:
        """Differentiates layer i, and updates layer i + 1."""
        (inner, cts, state, offloaded), backward = carry, self.backward
        state, slices = self.transfers.read(state, i, vectors)
        loaded = state.weights
        layer, by = i + 1, self.sink.read(inner, i + 1)
        update = functools.partial(self._update, layer, i, next_item, offloaded, by)
        x, dkept = backward.read(i)
        args, sizes = (slices, x, cts, dkept, i), self.transfers.moment_bytes
        state, (gradients, cts) = self.transfers.overlapping(
            backward.pull, args, state, update, sizes
        )
        # Parameters that were fetched for a layer's gradients stay for its update.
        return self.sink.store(inner, i, gradients), cts, state, loaded

    def _inputs(self, moments: Sequence[Stored], k: int, i: LayerIndex) -> GroupInputs:
        return GroupInputs(self.transfers.fetch_moments(moments, k, i), [], {})

    def _update(
        self,
        i: LayerIndex,
        differentiated: LayerIndex | None,
        next_item: LayerIndex | None,
        offloaded: dict[int, Array],
        by: LayerLeaves,
        k: int,
        state: InFlight,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of a layer, and begins to fetch the next group.

        Layer i is updated by its gradients `by`, and layer `differentiated` is computed
        meanwhile, then `next_item`; None: no layer. The parameters of layer i that came
        from the host are `offloaded`, and the other computation has `computed` so far.
        """
        transfers, length = self.transfers, self.optimizer.layered.length
        weights = {
            n: offloaded[n]
            if n in offloaded
            else read_slice(state.stacks[n], i, length)
            for n in self.optimizer.groups[k].positions
        }
        state, _, computed = transfers.update(k, state, weights, by, i, computed)
        last = k + 1 == len(self.optimizer.groups)
        after = 0 if last else k + 1
        layer = differentiated if last else i
        inputs = None if layer is None else self._inputs(state.moments, after, layer)
        state = state._replace(inputs=inputs)
        if next_item is None:
            return state, computed
        fetched = {
            n: transfers.weights.read(n, state.stacks[n], next_item)
            for n in self.optimizer.groups[after].positions
            if on_host(state.stacks[n])
        }
        fetched |= transfers.fetch_frozen(k, next_item)
        return state._replace(weights=state.weights | fetched), computed


@dataclasses.dataclass(frozen=True)
class ForwardOverlap:
    """Updates a layer during the forward pass of the layer before it.

    Attributes:
      gradients: The gradients. A group's are fetched with its moments.
    """

    optimizer: LayerOptimizer
    start: ForwardStart
    weights: Weights
    gradients: HostGradients

    @functools.cached_property
    def transfers(self) -> GroupTransfers:
        """The groups of leaves."""
        return GroupTransfers(self.optimizer, self.weights, False)

    def run(
        self, chunked: Sequence[Array]
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Runs the layers forward, and returns the state's stacks and `chunked` too."""
        transfers, trained = self.transfers, self.weights.stacks
        layered = self.optimizer.layered
        state = InFlight(layered.moments, [*trained, *chunked], None, {})
        state = state._replace(inputs=self._inputs(state, 0, 0))
        # The first layer is updated before any layer runs forward.
        state = transfers.update_all(state, functools.partial(self._update, 0, 1))
        last, carry = layered.length - 1, (self.start.activations, state)
        carry = over_layers(last, self._turn, carry, prefetches=True, makes_room=True)
        activations, state = carry
        # Nothing is left to update during the forward pass of the last layer.
        i = jnp.int32(last)
        state, slices = transfers.read(state, i, {})
        activations = activations.after(i, slices, self.start.run)
        count = len(trained)
        forward = self.start.results(activations, state.stacks[:count])
        return forward, state.moments, state.stacks[count:]

    def _turn(
        self,
        i: LayerIndex,
        next_item: LayerIndex | None,
        carry: tuple[Activations, InFlight],
    ) -> tuple[Activations, InFlight]:
        """Runs layer i forward, and updates layer i + 1."""
        activations, state = carry
        # The previous turn updated some of its parameters, which it fetched for that.
        state, slices = self.transfers.read(state, i, {})
        state = state._replace(weights={})

        def run(
            i: LayerIndex, slices: list[Array], x: PyTree
        ) -> tuple[PyTree, PyTree, list[Array]]:
            nonlocal state
            after = None if next_item is None else next_item + 1
            update = lambda *args: self._update(i + 1, after, *args)
            state, results = self.transfers.overlapping(
                self.start.run, (i, slices, x), state, update, self._coming
            )
            return results

        return activations.after(i, slices, run), state

    @property
    def _coming(self) -> list[int]:
        """The bytes of each group's moments and gradients."""
        stacks = self.gradients.stacks
        return [
            moments + sum(nbytes(stacks[n]) for n in group.positions)
            for moments, group in zip(
                self.transfers.moment_bytes, self.optimizer.groups, strict=True
            )
        ]

    def _inputs(self, state: InFlight, k: int, i: LayerIndex) -> GroupInputs:
        """Begins to fetch the inputs of the update of group k of layer i."""
        positions, length = (
            self.optimizer.groups[k].positions,
            self.optimizer.layered.length,
        )
        read = lambda n, x: read_slice(x, i, length, self.transfers.shards[n])
        return GroupInputs(
            self.transfers.fetch_moments(state.moments, k, i),
            [read(n, self.gradients.stacks[n]) for n in positions],
            {n: read(n, x) for n in positions if on_host(x := state.stacks[n])},
        )

    def _update(
        self,
        i: LayerIndex,
        after: LayerIndex | None,
        k: int,
        state: InFlight,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of layer i, and begins to fetch the next group.

        After the last group that is the first group of layer `after`, if there is one.
        """
        assert state.inputs is not None  # every turn fetches for the next update
        group, length = self.optimizer.groups[k], self.optimizer.layered.length
        _, gradients, loaded = state.inputs
        weights = {
            n: loaded[n] if n in loaded else read_slice(state.stacks[n], i, length)
            for n in group.positions
        }
        pairs = zip(group.positions, gradients, strict=True)
        by = {n: self.gradients.clip_leaf(n, g) for n, g in pairs}
        state, new, computed = self.transfers.update(k, state, weights, by, i, computed)
        pairs = zip(group.positions, new, strict=True)
        updated = {n: x for n, x in pairs if n in loaded}
        updated |= self.transfers.fetch_frozen(k, i)
        state = state._replace(inputs=None, weights=state.weights | updated)
        last = k + 1 == len(self.optimizer.groups)
        layer = after if last else i
        if layer is not None:
            inputs = self._inputs(state, 0 if last else k + 1, layer)
            state = state._replace(inputs=inputs)
        return state, computed
