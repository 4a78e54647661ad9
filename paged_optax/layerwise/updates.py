"""One step while it is traced: when the layers are updated, and by which gradients."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import Clipping, GradientStats, Guard
from paged_optax.layerwise.forward import ModelFunctions, Rest
from paged_optax.layerwise.in_turn import InTurn
from paged_optax.layerwise.loss import (
    LayerwiseOutput,
    WeightedLoss,
    mean_of,
    over,
    weight_divisor,
)
from paged_optax.layerwise.overlap import Overlapped
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.sinks import (
    BatchCarry,
    BatchMetrics,
    HostGradients,
    HostSink,
    WorkspaceCarry,
    WorkspaceSink,
    gradient_dtypes,
    scaled,
)
from paged_optax.layerwise.slices import is_sliced
from paged_optax.layerwise.step_arguments import known_shards
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.weights import Weights, host_like, on_device
from paged_optax.layerwise.workspace import GradientWorkspace

#: The new parameters, state and workspace, and the metrics.
StepResult = tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The parts of a step that do not depend on when layers are updated.

    Attributes:
      model: The model's functions.
      partition: The parameters.
      schedule: Updates layers.
      clipping: How gradients are measured and clipped.
      guard: An `apply_if_finite` around the transformation.
      accumulate: If true, a batch has several micro-batches.
    """

    model: ModelFunctions
    partition: Partition
    schedule: InTurn | Overlapped
    clipping: Clipping
    guard: Guard
    accumulate: bool

    @property
    def in_turn(self) -> InTurn:
        """The schedule for updates that overlap nothing."""
        return InTurn(self.schedule.optimizer)

    def weights(self) -> Weights:
        """The layers' parameters, placed so that layers can be sliced."""
        # Rows of matrices that live on the host are no whole tiles on a TPU.
        place = lambda x: x if is_sliced(x) else on_device(x)
        frozen, layered = self.model.frozen, self.schedule.optimizer.layered
        both = self.partition.layers, frozen.layers if frozen else None
        shards = layered.of_layers(layered.shards)
        fixed_shards = known_shards((), both[1], moments=False)
        layers, fixed = jax.tree.map(place, both)
        return Weights(layers, fixed, shards, fixed_shards)

    def params(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """All parameters, in the memory that they came from."""
        partition = self.partition
        stacks = host_like(list(stacks), jax.tree.leaves(partition.layers))
        leaves = partition.combine(stacks, others)
        return jax.tree.unflatten(partition.structure, leaves)

    def update_rest(
        self,
        stacks: list[Array],
        slots: list[Stored],
        small: list[Array | None],
        by_rest: Rest,
        measure: GradientStats,
    ) -> tuple[PyTree, PyTree]:
        """Updates all but the layers' matrices."""
        optimizer = self.schedule.optimizer.only_if(self.guard.passes(measure))
        layered = optimizer.layered
        count = len(stacks) - len(layered.chunked)
        others = layered.others_with(layered.params, stacks[count:])
        stacks, others, leaves = optimizer.update_rest(
            stacks[:count], small, others, self.partition.others(by_rest)
        )
        state = self.guard.around(layered.new_state(slots, leaves), measure)
        return self.params(stacks, others), state


@dataclasses.dataclass(frozen=True)
class UpdateAtOnce:
    """Updates each layer as soon as its gradients are computed."""

    step: TracedStep

    def __call__(self, workspace: GradientWorkspace, batch: PyTree) -> StepResult:
        """Runs the step."""
        step, clipping = self.step, self.step.clipping
        weights, zero = step.weights(), clipping.zero
        layers = BackwardPass.create(
            *(
                step.model,
                weights,
                step.partition.rest,
                batch,
                gradient_dtypes(workspace),
            ),
            zero.square,
            several=step.accumulate,
        )
        norm: Float[Array, ""] | None = None
        measure, schedule, by_rest = zero, step.schedule, layers.epilogue.by_rest
        # The gradients of all layers exist at no time: a first pass finds their norm.
        if clipping.needed_first:
            measure, norm, by_rest, layers = self._measured_first(layers)
            schedule = step.in_turn.only_if(step.guard.passes(measure))
        layered = step.schedule.optimizer.layered
        sink = self._sink(weights, by_rest, norm)
        small = layered.small_gradients(workspace.gradients)
        start = WorkspaceCarry(clipping.zero, [], workspace, small)
        carry, stacks, back = schedule.backward(layers, sink, start)
        limit = norm
        if limit is None:
            by_rest = layers.rest_gradients(back)
            rest_measure = clipping.measure(by_rest)
            # XLA copies gradients that an update overwrites before they are measured.
            rest_measure, by_rest = lax.optimization_barrier((rest_measure, by_rest))
            measure, limit = carry.measure + rest_measure, rest_measure.norm
        by_rest = clipping.clipped(by_rest, limit)
        loss, metrics = layers.epilogue.loss, layers.epilogue.metrics
        output = LayerwiseOutput(mean_of(loss), metrics, measure.norm)
        params, state = step.update_rest(
            stacks, carry.slots, carry.small, by_rest, measure
        )
        return params, state, carry.workspace, output

    def _sink(
        self, weights: Weights, by_rest: Rest, norm: Float[Array, ""] | None
    ) -> WorkspaceSink:
        partition, clipping = self.step.partition, self.step.clipping
        leaves = partition.combine(weights.stacks, partition.others(by_rest))
        chunked = [leaves[n] for n in self.step.schedule.optimizer.layered.chunked]
        if norm is not None:
            chunked = clipping.clipped(chunked, norm)
        return WorkspaceSink(clipping, norm, chunked, weights.length)

    def _measured_first(
        self, layers: BackwardPass
    ) -> tuple[GradientStats, Float[Array, ""], Rest, BackwardPass]:
        """Measures all gradients in a backward pass that updates nothing."""
        clipping = self.step.clipping
        add = lambda measure, i, slices, gradients: (
            measure + clipping.measure(gradients),
            slices,
        )
        measure, stacks, back = layers.run(add, clipping.zero)
        by_rest = layers.rest_gradients(back)
        measure = measure + clipping.measure(by_rest)
        # XLA would merge the second pass with the first.
        norm, stacks, by_rest, inputs = lax.optimization_barrier(
            (measure.norm, stacks, by_rest, layers.inputs)
        )
        second = dataclasses.replace(layers, stacks=stacks, inputs=inputs)
        return measure, norm, by_rest, second


@dataclasses.dataclass(frozen=True)
class UpdateAfterNorm:
    """Writes all gradients to host memory, and updates the layers by them."""

    step: TracedStep

    def __call__(self, workspace: GradientWorkspace, batch: PyTree) -> StepResult:
        """Runs the step."""
        step, clipping = self.step, self.step.clipping
        weights = step.weights()
        totals, metrics = self.gradients(weights, step.partition.rest, workspace, batch)
        by_rest, rest_measure = totals.by_rest, clipping.measure(totals.by_rest)
        measure = metrics.layers + rest_measure
        # No gradient is fetched for an update before the norm of all is known.
        norm, weights.stacks, host = lax.optimization_barrier(
            (measure.norm, totals.stacks, totals.host)
        )
        schedule = step.in_turn.only_if(step.guard.passes(measure))
        gradients = HostGradients(host, gradient_dtypes(workspace), clipping, norm)
        small = schedule.optimizer.layered.small_gradients(workspace.gradients)
        stacks, slots, small = schedule.update(weights, gradients, small)
        limit = norm if clipping.clip == "global" else rest_measure.norm
        by_rest = clipping.clipped(by_rest, limit)
        workspace = totals.stored_in(workspace)
        output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
        params, state = step.update_rest(stacks, slots, small, by_rest, measure)
        return params, state, workspace, output

    def gradients(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[BatchCarry, BatchMetrics]:
        """Writes the gradients of one micro-batch after the other to host memory."""
        step, zero = self.step, self.step.clipping.zero.square
        count = len(jax.tree.leaves(batch)[0]) if step.accumulate else 1

        def one_batch(
            totals: BatchCarry, numbered: tuple[Int[Array, ""], PyTree]
        ) -> tuple[BatchCarry, BatchMetrics]:
            index, batch = numbered
            stacks = weights.with_stacks(totals.stacks)
            layers = BackwardPass.create(
                *(step.model, stacks, rest, batch, gradient_dtypes(totals.workspace)),
                totals.weight,
                last=index == count - 1,
            )
            return self.send(layers, count, totals, index)

        if not step.accumulate:
            start = BatchCarry.first(weights.stacks, workspace, None, zero)
            return one_batch(start, (jnp.int32(0), batch))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        totals, metrics = lax.scan(
            one_batch,
            BatchCarry.first(weights.stacks, workspace, zeros, zero),
            (jnp.arange(count), batch),
        )
        last = jax.tree.map(lambda x: x[-1], metrics.layers)
        return totals, metrics._replace(layers=last)

    def send(
        self,
        layers: BackwardPass,
        count: int,
        totals: BatchCarry,
        index: Int[Array, ""],
    ) -> tuple[BatchCarry, BatchMetrics]:
        """Adds one micro-batch's gradients, layer by layer, to the host's."""
        clipping, loss = self.step.clipping, layers.epilogue.loss
        _, host, workspace, by_rest, weight = totals
        divisor, share = count, None
        if isinstance(loss, WeightedLoss):
            divisor, before, weight = 1, weight, weight + loss.weight
            share = over(weight_divisor(before), weight, index == count - 1)
        sink = HostSink(clipping, count, index, divisor, share)
        start = clipping.zero, host, workspace
        (measure, host, workspace), stacks, back = layers.run(sink.store, start)
        total = jax.tree.map(lambda x: x / divisor, layers.rest_gradients(back))
        if by_rest is not None:
            by_rest = by_rest if share is None else scaled(by_rest, share)
            total = jax.tree.map(jnp.add, by_rest, total)
        totals = BatchCarry(stacks, host, workspace, total, weight)
        return totals, BatchMetrics(loss, layers.epilogue.metrics, measure)
