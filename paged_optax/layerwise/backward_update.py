"""A step that updates each layer as its gradients are computed."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import Array, lax
from jaxtyping import Float, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.backward import BackwardPass
from paged_optax.layerwise.clipping import Clipping, GradientStats, Guard
from paged_optax.layerwise.forward import ModelFunctions, PrologueGradients, Rest
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.loss import LayerwiseOutput, mean_of
from paged_optax.layerwise.overlapped_update import BackwardOverlap
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.slabs import LayerIndex, goes_in_slabs, slab
from paged_optax.layerwise.weights import Weights, host_like, on_device
from paged_optax.layerwise.workspace import GradientWorkspace


class LayerResults(NamedTuple):
    """What differentiating and updating the layers leaves for the update of the rest.

    Attributes:
      stacks: The layers' parameters, the larger ones updated; then those in chunks.
      slots: The state's stacks, updated.
      small: The gradients of the small ones, of all layers.
      drest: The gradients by all other parameters, clipped.
      workspace: The workspace.
      output: The metrics of the step.
      measure: What is measured of all gradients.
    """

    stacks: list[Array]
    slots: list[Stored]
    small: list[Array | None]
    drest: Rest
    workspace: GradientWorkspace
    output: LayerwiseOutput
    measure: GradientStats


class LayerCarry(NamedTuple):
    """What goes from layer to layer where each one's update follows its gradients.

    Attributes:
      measure: What is measured of the layers' gradients so far.
      slots: The state's stacks.
      workspace: The workspace.
      small: The gradients of the small leaves, of all layers.
    """

    measure: GradientStats
    slots: list[Stored]
    workspace: GradientWorkspace
    small: list[Array | None]


@dataclasses.dataclass(frozen=True)
class LayerGradients:
    """One layer's gradients after the other, clipped.

    Attributes:
      clipping: How they are clipped.
      norm: The norm that they are clipped by; None: a layer's, by its own.
      chunked: The gradients of the parameters that are updated in chunks.
      length: How many chunks.
    """

    clipping: Clipping
    norm: Float[Array, ""] | None
    chunked: Sequence[Array]
    length: int

    def store(
        self, carry: LayerCarry, i: LayerIndex, gradients: PyTree[Array]
    ) -> LayerCarry:
        """Measures layer i's gradients, and writes them to the workspace."""
        measure = self.clipping.measure(gradients)
        norm = measure.norm if self.norm is None else self.norm
        workspace = carry.workspace.zero_accumulators().write(
            self.clipping.clipped(gradients, norm)
        )
        small = store_small(carry.small, _slabs(workspace), i)
        return LayerCarry(carry.measure + measure, carry.slots, workspace, small)

    def read(self, carry: LayerCarry, i: LayerIndex) -> list[Array]:
        """Those that layer i is updated by, and chunk i of the chunked ones."""
        chunks = [slab(x, i, self.length) for x in self.chunked]
        return _slabs(carry.workspace) + chunks


def _slabs(workspace: GradientWorkspace) -> list[Array]:
    return [x[None] for x in jax.tree.leaves(workspace.gradients)]


@dataclasses.dataclass(frozen=True)
class BackwardUpdate:
    """One step, being traced."""

    model: ModelFunctions
    partition: Partition
    optimizer: LayerOptimizer
    clipping: Clipping
    accumulate: bool
    guard: Guard

    def __call__(
        self, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Runs the step."""
        partition, layered = self.partition, self.optimizer.layered
        weights = self._weights()
        stacks, slots, small, drest, workspace, output, measure = self._layers(
            weights, partition.rest, workspace, batch
        )
        optimizer = self.optimizer.only_if(self.guard.passes(measure))
        count = len(weights.stacks)
        others = layered.others_with(layered.params, stacks[count:])
        stacks, others, leaves = optimizer.update_rest(
            stacks[:count], small, others, partition.others(drest)
        )
        state = self.guard.around(layered.new_state(slots, leaves), measure)
        return self._params(stacks, others), state, workspace, output

    def _weights(self) -> Weights:
        """The layers' parameters, where layers can be taken out of them."""
        # Rows of matrices that live on the host are no whole tiles on a TPU.
        place = lambda x: x if goes_in_slabs(x) else on_device(x)
        frozen = self.model.frozen
        both = self.partition.layers, frozen.layers if frozen else None
        return Weights(*jax.tree.map(place, both))

    def _params(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """All parameters, each where it came from."""
        partition = self.partition
        stacks = host_like(list(stacks), jax.tree.leaves(partition.layers))
        leaves = partition.combine(stacks, others)
        return jax.tree.unflatten(partition.structure, leaves)

    def _layers(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> LayerResults:
        """Differentiates and updates the layers, from the last to the first."""
        zero, several = self.clipping.zero, self.accumulate
        backward = BackwardPass(
            self.model, weights, rest, batch, workspace, several, zero.square
        )
        drest: Rest | None = None
        norm: Float[Array, ""] | None = None
        measure, optimizer = zero, self.optimizer
        # Gradients of all layers are nowhere at once: a pass of its own finds the norm.
        if self.clipping.needed_first:
            measure, norm, drest = self._measured_first(backward)
            optimizer = optimizer.only_if(self.guard.passes(measure))
        known = backward.drest if drest is None else drest
        gradients = self._layer_gradients(weights, known, norm)
        carry, stacks, back = self._backward(backward, optimizer, gradients, workspace)
        limit = norm
        if limit is None or drest is None:
            drest = backward.rest_gradients(back)
            of_rest = self.clipping.measure(drest)
            # Measured before the update overwrites them, or XLA copies them.
            of_rest, drest = lax.optimization_barrier((of_rest, drest))
            measure, limit = carry.measure + of_rest, of_rest.norm
        clipped = self.clipping.clipped(drest, limit)
        output = LayerwiseOutput(mean_of(backward.loss), backward.metrics, measure.norm)
        _, slots, workspace, small = carry
        return LayerResults(stacks, slots, small, clipped, workspace, output, measure)

    def _layer_gradients(
        self, weights: Weights, drest: Rest, norm: Float[Array, ""] | None
    ) -> LayerGradients:
        others = self.partition.others(drest)
        leaves = self.partition.combine(weights.stacks, others)
        chunked = [leaves[n] for n in self.optimizer.layered.chunked]
        if norm is not None:
            chunked = self.clipping.clipped(chunked, norm)
        return LayerGradients(self.clipping, norm, chunked, weights.length)

    def _backward(
        self,
        backward: BackwardPass,
        optimizer: LayerOptimizer,
        gradients: LayerGradients,
        workspace: GradientWorkspace,
    ) -> tuple[LayerCarry, list[Array], PrologueGradients]:
        """Updates each layer by its gradients, in turn or beside the next one's."""
        layered, overlaps = self.optimizer.layered, self.optimizer.overlaps
        slots = [] if overlaps else layered.slots
        small = layered.small_gradients(workspace.gradients)
        start = LayerCarry(self.clipping.zero, slots, workspace, small)
        if overlaps:
            others = [layered.params[n] for n in layered.chunked]
            overlap = BackwardOverlap(self.optimizer, backward.weights.frozen)
            carry, flight, back = backward.overlapped(
                overlap, gradients.store, gradients.read, start, others
            )
            return carry._replace(slots=flight.slots), flight.stacks, back

        def visit(
            carry: LayerCarry,
            i: LayerIndex,
            slabs: list[Array],
            layer_gradients: PyTree[Array],
        ) -> tuple[LayerCarry, list[Array]]:
            carry = gradients.store(carry, i, layer_gradients)
            slots, new = optimizer.update_layer(
                carry.slots, slabs, gradients.read(carry, i), i
            )
            return carry._replace(slots=slots), new

        return backward.run(visit, start)

    def _measured_first(
        self, backward: BackwardPass
    ) -> tuple[GradientStats, Float[Array, ""], Rest]:
        """Measures all gradients by a pass of its own.

        Returns:
          The measure; its norm, behind which the second pass is; and the gradients of
          the rest.
        """
        add = lambda measure, i, slabs, gradients: (
            measure + self.clipping.measure(gradients),
            slabs,
        )
        measure, stacks, back = backward.run(add, self.clipping.zero)
        drest = backward.rest_gradients(back)
        measure = measure + self.clipping.measure(drest)
        # The second pass is not to be taken for a part of the first.
        norm, stacks, drest, backward.inputs = lax.optimization_barrier(
            (measure.norm, stacks, drest, backward.inputs)
        )
        backward.stacks = stacks
        return measure, norm, drest
