"""Steps that write all gradients to host memory, and update the layers by them."""

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import GradientStats
from paged_optax.layerwise.forward import Rest
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.loss import (
    LayerwiseOutput,
    WeightedLoss,
    mean_of,
    over,
    weight_divisor,
)
from paged_optax.layerwise.sinks import (
    BatchCarry,
    HostGradients,
    HostSink,
    gradient_dtypes,
    scaled,
)
from paged_optax.layerwise.slices import (
    LayerIndex,
    over_layers,
    read_slice,
)
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.updates import StepResult, TracedStep
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace

#: The layers' parameters, the state's stacks, and the small leaves' gradients.
UpdateCarry = tuple[list[Array], list[Stored], list[Array | None]]


class BatchMetrics(NamedTuple):
    """Metrics of a micro-batch, or stacked metrics of all."""

    loss: Float[Array, "..."] | WeightedLoss
    metrics: PyTree
    layers: GradientStats


def update_after_norm(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Updates all layers once the norm of the gradients is known."""
    clipping, weights = step.clipping, step.weights()
    rest = step.partition.rest
    totals, metrics = host_gradients(step, weights, rest, workspace, batch)
    by_rest, rest_measure = totals.by_rest, clipping.measure(totals.by_rest)
    measure = metrics.layers + rest_measure
    # No gradient is fetched for an update before the norm of all is known.
    norm, weights.stacks, host = lax.optimization_barrier(
        (measure.norm, totals.stacks, totals.host)
    )
    optimizer = step.optimizer.only_if(step.guard.passes(measure))
    gradients = HostGradients(host, gradient_dtypes(workspace), clipping, norm)
    small = optimizer.layered.small_gradients(workspace.gradients)
    updated = update_layers(optimizer, weights, gradients, small)
    limit = norm if clipping.clip == "global" else rest_measure.norm
    by_rest = clipping.clipped(by_rest, limit)
    workspace = totals.stored_in(workspace)
    output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
    return *step.update_rest(*updated, by_rest, measure), workspace, output


def update_layers(
    optimizer: LayerOptimizer,
    weights: Weights,
    gradients: HostGradients,
    small: list[Array | None],
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
        slots, new = optimizer.update_layer(slots, slices, by, i)
        stacks = weights.write(stacks, slices, new, i)
        return stacks, slots, small

    start = weights.stacks, optimizer.layered.slots, small
    return over_layers(weights.length, body, start)


def host_gradients(
    step: TracedStep,
    weights: Weights,
    rest: Rest,
    workspace: GradientWorkspace,
    batch: PyTree,
) -> tuple[BatchCarry, BatchMetrics]:
    """Writes the gradients of one micro-batch after the other to host memory."""
    zero, dtypes = step.clipping.zero.square, gradient_dtypes(workspace)
    count = len(jax.tree.leaves(batch)[0]) if step.accumulate else 1

    def one_batch(
        totals: BatchCarry, numbered: tuple[Int[Array, ""], PyTree]
    ) -> tuple[BatchCarry, BatchMetrics]:
        index, batch = numbered
        one = copy.copy(weights)
        one.stacks = totals.stacks
        layers = BackwardPass.create(
            *(step.model, one, rest, batch, dtypes, totals.weight),
            last=index == count - 1,
        )
        return send_to_host(step, layers, count, totals, index)

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


def send_to_host(
    step: TracedStep,
    layers: BackwardPass,
    count: int,
    totals: BatchCarry,
    index: Int[Array, ""],
) -> tuple[BatchCarry, BatchMetrics]:
    """Adds one micro-batch's gradients, layer by layer, to the host's."""
    clipping, loss = step.clipping, layers.epilogue.loss
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
