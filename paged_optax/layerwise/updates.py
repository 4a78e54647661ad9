"""One step while it is traced, and the step that updates during the backward pass."""

import dataclasses
from collections.abc import Sequence

import jax
from jax import Array, lax
from jaxtyping import Float, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import Clipping, GradientStats, gradient_dtypes
from paged_optax.layerwise.forward import ModelFunctions, Rest
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.loss import LayerwiseOutput, mean_of
from paged_optax.layerwise.overlap import Overlap
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.sinks import WorkspaceCarry, WorkspaceSink
from paged_optax.layerwise.slices import Weights, host_like, is_sliced, on_device
from paged_optax.layerwise.step_arguments import known_shards
from paged_optax.layerwise.sweep import BackwardPass, ForwardPass
from paged_optax.layerwise.workspace import GradientWorkspace
from paged_optax.step_skipping import IfFinite
from paged_optax.transform.context import Gate

#: The new parameters, state and workspace, and the metrics.
StepResult = tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]


@dataclasses.dataclass(frozen=True)
class Guard:
    """Skips a step whose gradients are not finite, for `apply_if_finite`.

    The wrapper needs all gradients, and one layer's gradients exist at a time. The step
    tests them instead, and Optax's own code counts the errors.

    Attributes:
      wrapper: The wrapper, or None.
      outer: Its state.
    """

    wrapper: IfFinite | None
    outer: PyTree

    def decided(self, measure: GradientStats) -> tuple[Gate, PyTree]:
        """Returns whether the update happens, and the wrapper's next state."""
        if self.wrapper is None:
            return True, self.outer
        assert measure.finite is not None
        return self.wrapper.decided(measure.finite, self.outer)

    def around(self, state: PyTree, measure: GradientStats | None) -> PyTree:
        """Builds the wrapper's state."""
        if self.wrapper is None:
            return state
        outer = self.outer if measure is None else self.decided(measure)[1]
        return outer._replace(inner_state=state)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The parts of a step that do not depend on when layers are updated.

    Attributes:
      guard: An `apply_if_finite` around the transformation.
      accumulate: If true, a batch has several micro-batches.
      overlaps: If true, a layer is updated while another one is computed.
    """

    model: ModelFunctions
    optimizer: LayerOptimizer
    clipping: Clipping
    guard: Guard
    accumulate: bool
    overlaps: bool = False

    @property
    def partition(self) -> Partition:
        """All parameters."""
        return self.optimizer.layered.partition

    def weights(self) -> Weights:
        """The layers' parameters, placed so that layers can be sliced."""
        # Rows of matrices that live on the host are no whole tiles on a TPU.
        place = lambda x: x if is_sliced(x) else on_device(x)
        frozen, layered = self.model.frozen, self.optimizer.layered
        trees = self.partition.layers, frozen.layers if frozen else None
        shards = layered.of_layers(layered.shards)
        shards += known_shards((), trees[1], moments=False)
        trees = jax.tree.map(place, trees)
        layers, fixed = map(jax.tree.leaves, trees)
        structure = jax.tree.structure(trees)
        return Weights(layers, fixed, structure, layered.length, shards)

    def params(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """All parameters, in the memory that they came from."""
        partition = self.partition
        stacks = host_like(list(stacks), jax.tree.leaves(partition.layers))
        leaves = partition.combine(stacks, others)
        return jax.tree.unflatten(partition.structure, leaves)

    def update_unsliced(
        self,
        stacks: list[Array],
        moments: list[Stored],
        small: list[Array | None],
        by_rest: Rest,
        measure: GradientStats,
    ) -> tuple[PyTree, PyTree]:
        """Updates all but the layers' matrices."""
        optimizer = self.optimizer.only_if(self.guard.decided(measure)[0])
        layered = optimizer.layered
        count = len(stacks) - len(layered.chunked)
        others = layered.others_with(layered.params, stacks[count:])
        stacks, others, leaves = optimizer.update_unsliced(
            stacks[:count], small, others, self.partition.others(by_rest)
        )
        state = self.guard.around(layered.new_state(moments, leaves), measure)
        return self.params(stacks, others), state


def update_during_backward(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Updates each layer as soon as its gradients are computed."""
    clipping, partition, optimizer = step.clipping, step.partition, step.optimizer
    weights, measure = step.weights(), clipping.zero
    forward = ForwardPass.after_prologue(
        step.model, weights, partition.rest, batch, step.accumulate
    )
    activations, stacks = forward.run()
    no_weight = measure.square  # of earlier micro-batches
    backward = BackwardPass.after_epilogue(
        forward, activations, stacks, gradient_dtypes(workspace), no_weight
    )
    norm: Float[Array, ""] | None = None
    by_rest = backward.epilogue.by_rest
    # The gradients of all layers exist at no time: a first pass finds their norm.
    if clipping.needed_first:
        measure, norm, by_rest, backward = _measured_first(clipping, backward)
        optimizer = optimizer.only_if(step.guard.decided(measure)[0])
    layered = optimizer.layered
    # Chunked leaves are outside the layers, whose places the stacks fill.
    leaves = partition.combine(weights.stacks, partition.others(by_rest))
    chunked = [leaves[n] for n in layered.chunked]
    sink = WorkspaceSink(optimizer, clipping, norm, chunked)
    small = layered.small_gradients()
    start = WorkspaceCarry(clipping.zero, layered.moments, workspace, small)
    if step.overlaps:
        overlap = Overlap(optimizer, weights)
        carry, stacks, cts = overlap.backward(backward, sink, start)
    else:
        carry, stacks, cts = backward.run(sink.visit, start)
    limit = norm
    if limit is None:
        by_rest = backward.rest_gradients(cts)
        rest_measure = clipping.measure(by_rest)
        # XLA copies gradients that an update overwrites before they are measured.
        rest_measure, by_rest = lax.optimization_barrier((rest_measure, by_rest))
        measure, limit = carry.measure + rest_measure, rest_measure.norm
    by_rest = clipping.clipped(by_rest, limit)
    loss, metrics = backward.epilogue.loss, backward.epilogue.metrics
    output = LayerwiseOutput(mean_of(loss), metrics, measure.norm)
    new = step.update_unsliced(stacks, carry.moments, carry.small, by_rest, measure)
    return *new, carry.workspace, output


def _measured_first(
    clipping: Clipping, backward: BackwardPass
) -> tuple[GradientStats, Float[Array, ""], Rest, BackwardPass]:
    """Measures all gradients in a backward pass that updates nothing."""
    add = lambda measure, i, slices, gradients: (
        measure + clipping.measure(gradients),
        slices,
    )
    measure, stacks, cts = backward.run(add, clipping.zero)
    by_rest = backward.rest_gradients(cts)
    measure = measure + clipping.measure(by_rest)
    # XLA would merge the second pass with the first.
    norm, stacks, by_rest, inputs = lax.optimization_barrier(
        (measure.norm, stacks, by_rest, backward.inputs)
    )
    second = dataclasses.replace(backward, stacks=stacks, inputs=inputs)
    return measure, norm, by_rest, second
