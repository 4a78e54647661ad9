"""The schedule that alternates the computation and the update of layers."""

import dataclasses

from jax import Array
from jaxtyping import PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.forward import PrologueGradients
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.sinks import HostGradients, WorkspaceCarry, WorkspaceSink
from paged_optax.layerwise.slices import (
    LayerIndex,
    over_layers,
    read_slice,
    write_slices,
)
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.weights import Weights
from paged_optax.transform.context import Gate

#: The layers' parameters, the state's stacks, and the small leaves' gradients.
UpdateCarry = tuple[list[Array], list[Stored], list[Array | None]]


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Updates a layer between the computations of two layers."""

    optimizer: LayerOptimizer

    def only_if(self, enabled: Gate) -> "InTurn":
        """The same schedule, with updates that depend on `enabled`."""
        return InTurn(self.optimizer.only_if(enabled))

    def backward(
        self, layers: BackwardPass, sink: WorkspaceSink, start: WorkspaceCarry
    ) -> tuple[WorkspaceCarry, list[Array], PrologueGradients]:
        """Computes each layer's gradients, and updates the layer by them."""

        def visit(
            carry: WorkspaceCarry,
            i: LayerIndex,
            slices: list[Array],
            gradients: PyTree[Array],
        ) -> tuple[WorkspaceCarry, list[Array]]:
            carry = sink.store(carry, i, gradients)
            by = sink.read(carry, i)
            slots, new = self.optimizer.update_layer(carry.slots, slices, by, i)
            return carry._replace(slots=slots), new

        start = start._replace(slots=self.optimizer.layered.slots)
        return layers.run(visit, start)

    def update(
        self, weights: Weights, gradients: HostGradients, small: list[Array | None]
    ) -> UpdateCarry:
        """Updates all layers by gradients in host memory."""

        def body(
            i: LayerIndex, next_item: LayerIndex | None, carry: UpdateCarry
        ) -> UpdateCarry:
            del next_item  # moments take longer than weights, and are not prefetched
            stacks, slots, small = carry
            slices = [read_slice(x, i) for x in stacks]
            by = gradients.read(i)
            small = store_small(small, by, i)
            slots, new = self.optimizer.update_layer(slots, slices, by, i)
            stacks = write_slices(stacks, slices, new, i, weights.shards)
            return stacks, slots, small

        start = weights.stacks, self.optimizer.layered.slots, small
        return over_layers(weights.length, body, start)
