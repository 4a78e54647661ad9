"""Updates one layer while another one is computed.

A layer's leaves are in groups. Another layer's computation, its backward or its forward
pass, runs in as many segments. During each segment the new moments of one group travel
to the host, and the next group's travel to the device. No stack is then read and
written at the same time, which would make XLA copy it. Between two segments a group is
updated. The backward pass of layer 6, with two groups:

    computes   update 0 of 7   half of layer 6   update 1 of 7   rest of layer 6
    to host                    moments 0 of 7                    moments 1 of 7
    to device                  moments 1 of 7                    moments 0 of 6
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.backend.types import in_shard_map
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.dependencies import Saved
from paged_optax.layerwise.layer_optimizer import LayerLeaves, LayerOptimizer
from paged_optax.layerwise.layered_state import group_leaves
from paged_optax.layerwise.segments import Values, ends_of, in_segments
from paged_optax.layerwise.sinks import HostGradients, WorkspaceCarry, WorkspaceSink
from paged_optax.layerwise.slices import (
    LayerIndex,
    Prefetched,
    Vectors,
    Weights,
    over_layers,
    read_moment,
    read_slice,
    write_moment,
    write_slice,
)
from paged_optax.layerwise.sweep import (
    Activations,
    BackwardPass,
    Cotangents,
    ForwardPass,
)


def can_overlap(optimizer: LayerOptimizer) -> bool:
    """True if XLA overlaps the transfers of an update with a computation."""
    several = optimizer.layered.length > 1 and len(optimizer.groups) > 1
    return GPU_FETCHES_AHEAD and several and not in_shard_map()


class GroupInputs(NamedTuple):
    """Host arrays that a group's update fetches; the weights by position."""

    moments: list[Stored]
    gradients: list[Array]
    weights: dict[int, Array]


class InFlight(NamedTuple):
    """Buffers in flight between host and device.

    Attributes:
      stacks: The parameters of the layers, and the chunked parameters.
      inputs: The inputs of the next group's update; None after the last group.
      weights: The parameters of the layer that is computed next. In a forward pass they
        are the parameters that were just updated, and otherwise come from the host.
    """

    moments: list[Stored]
    stacks: list[Array]
    inputs: GroupInputs | None
    weights: Prefetched


#: `update(k, state, values)` updates group k before other computations use `values`.
UpdateGroup = Callable[[int, InFlight, Values], tuple[InFlight, Values]]

# The sink's carry, the gradients by the prologue's output, the transfers, and the
# fetched parameters of the layer that is updated next.
_BackwardCarry = tuple[WorkspaceCarry, Cotangents, InFlight, dict[int, Array]]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Updates a layer during the backward or the forward pass of the layer before it.

    Attributes:
      host: The gradients for an update during the forward pass. A group's are fetched
        with its moments. None during the backward pass.
    """

    optimizer: LayerOptimizer
    weights: Weights
    host: HostGradients | None = None

    def backward(
        self, backward: BackwardPass, sink: WorkspaceSink, start: WorkspaceCarry
    ) -> tuple[WorkspaceCarry, list[Array], Cotangents]:
        """Runs the backward pass, and updates layer i + 1 during that of layer i.

        With a layer a chunk of each chunked parameter is updated.
        """
        weights, layered = self.weights, self.optimizer.layered
        last, vectors = weights.length - 1, weights.vectors(backward.stacks)
        # XLA would fetch the last layer before the loss is computed.
        values = backward.stacks, backward.epilogue.by_output
        stacks, dx = lax.optimization_barrier(values)
        slices = weights.slices(stacks, last)
        loaded = {n: slices[n] for n, x in enumerate(backward.stacks) if on_host(x)}
        # The same holds of the first moments.
        chunked = [layered.params[n] for n in layered.chunked]
        values = layered.moments, [*stacks, *chunked], dx
        moments, stacks, dx = lax.optimization_barrier(values)
        state = InFlight(moments, stacks, None, {})
        state = state._replace(inputs=self._inputs(state, 0, last))
        prefetched = weights.prefetch(stacks[: len(backward.stacks)], last - 1)
        state = state._replace(weights=prefetched)
        inputs, cts = backward.read(last), backward.first_gradients(dx)
        results = backward.pull(slices, *inputs, cts, jnp.int32(last))
        state, (gradients, cts) = self._wait(-1, state, results)

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: _BackwardCarry
        ) -> _BackwardCarry:
            """Differentiates layer i, and updates layer i + 1."""
            inner, cts, state, loaded = carry
            state, slices = self._read(state, i, vectors)
            fetched, layer, by = state.weights, i + 1, sink.read(inner, i + 1)
            update = functools.partial(self._update, layer, i, next_item, loaded, by)
            args = slices, *backward.read(i), cts, i
            state, results = self._overlapping(backward.pull, args, state, update)
            gradients, cts = results
            # Parameters that were fetched for a layer's gradients stay for its update.
            return sink.store(inner, i, gradients), cts, state, fetched

        carry, cts, state, loaded = over_layers(
            last,
            body,
            (sink.store(start, last, gradients), cts, state, loaded),
            backward=True,
            prefetches=weights.prefetches,
            makes_room=True,
        )
        by = sink.read(carry, 0)
        update = functools.partial(self._update, 0, None, None, loaded, by)
        state = self._update_all(state, update)
        return carry._replace(moments=state.moments), state.stacks, cts

    def forward(
        self, forward: ForwardPass, chunked: Sequence[Array]
    ) -> tuple[Activations, list[Array], list[Stored], list[Array]]:
        """Runs the layers forward, and returns the state's stacks and `chunked` too."""
        trained, layered = self.weights.stacks, self.optimizer.layered
        activations, last = forward.start(), layered.length - 1
        state = InFlight(layered.moments, [*trained, *chunked], None, {})
        state = state._replace(inputs=self._inputs(state, 0, 0))
        # The first layer is updated before any layer runs forward.
        update = functools.partial(self._update, 0, 1, None, {}, [])
        state = self._update_all(state, update)

        def body(
            i: LayerIndex,
            next_item: LayerIndex | None,
            carry: tuple[Activations, InFlight],
        ) -> tuple[Activations, InFlight]:
            """Runs layer i forward, and updates layer i + 1."""
            activations, state = carry
            # The previous turn updated some of its parameters, which it fetched for it.
            state, slices = self._read(state, i, {})
            state = state._replace(weights={})

            def run(
                i: LayerIndex, slices: list[Array], x: PyTree
            ) -> tuple[PyTree, PyTree, Saved | None]:
                nonlocal state
                after = None if next_item is None else next_item + 1
                update = lambda *args: self._update(i + 1, after, None, {}, [], *args)
                args = i, slices, x
                state, results = self._overlapping(forward.layer, args, state, update)
                return results

            return activations.after(i, slices, run), state

        carry = activations, state
        carry = over_layers(last, body, carry, prefetches=True, makes_room=True)
        activations, state = carry
        # Nothing is left to update during the forward pass of the last layer.
        i = jnp.int32(last)
        state, slices = self._read(state, i, {})
        activations = activations.after(i, slices, forward.layer)
        stacks, chunked = state.stacks[: len(trained)], state.stacks[len(trained) :]
        return activations, stacks, state.moments, chunked

    @functools.cached_property
    def _shards(self) -> list[Shards | None]:
        """The division of each of the layers' parameters, and of the chunked ones."""
        trained = self.weights.shards[: len(self.weights.stacks)]
        return [*trained, *[None] * len(self.optimizer.layered.chunked)]

    @functools.cached_property
    def _portions(self) -> list[dict[int, Array]]:
        """Frozen stacks in host memory, in as many portions as there are groups."""
        frozen = enumerate(self.weights.frozen, len(self.weights.stacks))
        offloaded = {n: x for n, x in frozen if on_host(x)}
        travel = {n: nbytes(x) for n, x in offloaded.items()}
        groups = group_leaves(travel, maximum=len(self.optimizer.groups))
        portions = [{n: offloaded[n] for n in group.positions} for group in groups]
        return portions + [{}] * (len(self.optimizer.groups) - len(groups))

    def _inputs(self, state: InFlight, k: int, i: LayerIndex) -> GroupInputs:
        """Begins to fetch the inputs of the update of group k of layer i."""
        group, layered = self.optimizer.groups[k], self.optimizer.layered
        length, shards = layered.length, layered.sliced_shards
        read = lambda n, x: read_slice(x, i, length, self._shards[n])
        moments = [
            read_moment(state.moments[n], i, length, shards[n])
            for n in group.moment_positions
        ]
        if self.host is None:
            return GroupInputs(moments, [], {})
        gradients = [read(n, self.host.stacks[n]) for n in group.positions]
        offloaded = [n for n in group.positions if on_host(state.stacks[n])]
        return GroupInputs(
            moments, gradients, {n: read(n, state.stacks[n]) for n in offloaded}
        )

    def _read(
        self, state: InFlight, i: LayerIndex, vectors: Vectors
    ) -> tuple[InFlight, list[Array]]:
        """Reads layer i before the next layer's parameters are written."""
        count = len(self.weights.stacks)
        layers = state.stacks[:count]
        slices = self.weights.slices(layers, i, state.weights, vectors)
        read = {n: x for n, x in enumerate(layers) if n not in state.weights}
        # XLA would copy a stack that is written before it is read.
        slices[:count], read = lax.optimization_barrier((slices[:count], read))
        stacks = [read.get(n, x) for n, x in enumerate(state.stacks)]
        trained = {n: x for n, x in state.weights.items() if n < count}
        return state._replace(stacks=stacks, weights=trained), slices

    def _overlapping(
        self,
        function: Callable[..., Values],
        args: Sequence[PyTree[ArrayLike]],
        state: InFlight,
        update: UpdateGroup[PyTree],
    ) -> tuple[InFlight, Values]:
        """Calls a function in segments, and updates a group before each."""

        def between(k: int, computed: list[ArrayLike]) -> list[ArrayLike]:
            nonlocal state
            state, computed = self._wait(k, state, computed)
            state, computed = update(k + 1, state, computed)
            return computed

        groups, moments = self.optimizer.groups, self.optimizer.layered.moments
        host = self.host.stacks if self.host else {}
        leaving = [
            sum(nbytes(x) for n in group.moment_positions if on_host(x := moments[n]))
            for group in groups
        ]
        coming = [
            size + sum(nbytes(host[n]) for n in group.positions if self.host)
            for size, group in zip(leaving, groups, strict=True)
        ]
        portions = [nbytes(list(x.values())) for x in self._portions]
        state, args = update(0, state, args)
        ends = ends_of(leaving, coming, portions)
        results = in_segments(function, args, ends, between)
        return self._wait(-1, state, results)

    def _update_all(self, state: InFlight, update: UpdateGroup[PyTree]) -> InFlight:
        """Updates all groups while nothing else is computed."""
        for k in range(len(self.optimizer.groups)):
            state, _ = update(k, state, ())
            state, _ = self._wait(k, state, ())
        return state

    def _update(
        self,
        i: LayerIndex,
        after: LayerIndex | None,
        next_item: LayerIndex | None,
        loaded: dict[int, Array],
        by: LayerLeaves,
        k: int,
        state: InFlight,
        computed: Values,
    ) -> tuple[InFlight, Values]:
        """Updates group k of layer i, and begins to fetch the next group.

        After the last group that is the first group of layer `after`, if there is one.
        The other computation has `computed` so far. A backward pass updates by `by`,
        has the parameters `loaded` from the host, and fetches layer `next_item`.
        """
        assert state.inputs is not None  # every turn fetches for the next update
        groups, layered = self.optimizer.groups, self.optimizer.layered
        group, length = groups[k], layered.length
        if self.host is not None:
            loaded = state.inputs.weights
        weights = {
            n: loaded[n] if n in loaded else read_slice(state.stacks[n], i, length)
            for n in group.positions
        }
        if self.host is not None:
            pairs = zip(group.positions, state.inputs.gradients, strict=True)
            by = {n: self.host.clip_leaf(n, g) for n, g in pairs}
        fetched = state.inputs.moments
        new = self.optimizer.update_group(group, fetched, weights, by, i)
        # The other computation continues after the update, during the transfers.
        (updated, leaves), computed = lax.optimization_barrier((new, computed))
        moments, stacks = list(state.moments), list(state.stacks)
        for n, moment in zip(group.moment_positions, updated, strict=True):
            shards = layered.sliced_shards[n]
            moments[n] = write_moment(moments[n], moment, i, length, shards)
        for n, leaf in zip(group.positions, leaves, strict=True):
            stacks[n] = write_slice(stacks[n], leaf, i, shards=self._shards[n])
        state = InFlight(moments, stacks, None, state.weights)
        fetch = lambda positions, stacks, i: {
            n: self.weights.read(n, x, i) for n in positions if on_host(x := stacks[n])
        }
        ready = dict[int, Array]()
        if self.host is not None:
            pairs = zip(group.positions, leaves, strict=True)
            ready = {n: x for n, x in pairs if n in loaded}
            ready |= fetch(self._portions[k], self._portions[k], i)
        following = (k + 1) % len(groups)
        layer = after if following == 0 else i
        if layer is not None:
            state = state._replace(inputs=self._inputs(state, following, layer))
        if next_item is not None:
            ready = fetch(groups[following].positions, stacks, next_item)
            ready |= fetch(self._portions[k], self._portions[k], next_item)
        return state._replace(weights=state.weights | ready), computed

    def _wait(
        self, k: int, state: InFlight, computed: Values
    ) -> tuple[InFlight, Values]:
        """Waits for segment k, and for the transfers during it."""
        every = self.optimizer.groups
        groups = every[k], every[(k + 1) % len(every)]
        # The barrier has the buffers of these transfers alone. Others may move.
        moments = {
            n: state.moments[n] for group in groups for n in group.moment_positions
        }
        positions = [n for group in groups for n in group.positions]
        stacks = {n: x for n in positions if on_host(x := state.stacks[n])}
        first = len(self.weights.stacks) if self.host else 0
        weights = {n: x for n, x in state.weights.items() if n >= first}
        moving = (moments, stacks, state.inputs, weights), computed
        moving, computed = lax.optimization_barrier(moving)
        moments, stacks, inputs, weights = moving
        replace = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        moments, stacks = replace(state.moments, moments), replace(state.stacks, stacks)
        return InFlight(moments, stacks, inputs, state.weights | weights), computed
