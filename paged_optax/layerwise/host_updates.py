"""Steps that write all gradients to host memory, and update the layers by them.

The norm is known after the backward pass. A deferred update then overlaps the next
forward pass, layer by layer: Yue, Yin and Qian, `GreedySnake
<https://arxiv.org/abs/2512.17570>`_, 2025.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import (
    Clipping,
    GradientStats,
    gradient_dtypes,
    scaled,
)
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
from paged_optax.layerwise.overlap import Overlap
from paged_optax.layerwise.sinks import HostGradients, HostSink
from paged_optax.layerwise.slices import (
    LayerIndex,
    Weights,
    over_layers,
    read_slice,
)
from paged_optax.layerwise.sweep import Activations, BackwardPass, ForwardPass
from paged_optax.layerwise.updates import StepResult, TracedStep
from paged_optax.layerwise.workspace import GradientWorkspace, Pending

# The layers' parameters, the state's stacks, and the small leaves' gradients.
_UpdateCarry = tuple[list[Array], list[Stored], list[Array | None]]

# The loss of a micro-batch, its metrics, and the statistics of the layers' gradients.
_Metrics = tuple[Array | WeightedLoss, PyTree, GradientStats]


class _Sums(NamedTuple):
    """Loop carry over micro-batches.

    Attributes:
      workspace: The workspace without `host`: XLA would copy a buffer that a loop
        carries twice.
      by_rest: The gradients of the other parameters; None before the only micro-batch.
      weight: The total weight so far; zero if losses have no weight.
    """

    stacks: list[Array]
    host: list[Array]
    workspace: GradientWorkspace
    by_rest: Rest | None
    weight: Float[Array, ""]


def update_after_norm(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Updates all layers once the norm of the gradients is known."""
    clipping, weights, rest = step.clipping, step.weights(), step.partition.rest
    stacks, workspace, by_rest, (loss, metrics, measure) = _gradients_on_host(
        step, weights, rest, workspace, batch
    )
    rest_measure = clipping.measure(by_rest)
    measure += rest_measure
    # No gradient is fetched for an update before the norm of all is known.
    norm, stacks, host = lax.optimization_barrier(
        (measure.norm, stacks, jax.tree.leaves(workspace.host))
    )
    optimizer = step.optimizer.only_if(step.guard.decided(measure)[0])
    gradients = HostGradients(host, gradient_dtypes(workspace), clipping, norm)
    weights = dataclasses.replace(weights, stacks=stacks)
    updated = _update_layers(optimizer, weights, gradients)
    by_rest = clipping.clipped(
        by_rest, rest_measure.norm if clipping.by_layer else norm
    )
    output = LayerwiseOutput(mean_of(loss), metrics, norm)
    return *step.update_unsliced(*updated, by_rest, measure), workspace, output


def _update_layers(
    optimizer: LayerOptimizer, weights: Weights, gradients: HostGradients
) -> _UpdateCarry:
    """Updates all layers by gradients in host memory."""

    def body(
        i: LayerIndex, next_item: LayerIndex | None, carry: _UpdateCarry
    ) -> _UpdateCarry:
        del next_item  # moments take longer than weights, and are not prefetched
        stacks, moments, small = carry
        slices = [read_slice(x, i) for x in stacks]
        by = gradients.read(i)
        small = store_small(small, by, i)
        moments, new = optimizer.update_layer(moments, slices, by, i)
        stacks = weights.write(stacks, slices, new, i)
        return stacks, moments, small

    layered = optimizer.layered
    start = weights.stacks, layered.moments, layered.small_gradients()
    return over_layers(weights.length, body, start)


def _gradients_on_host(
    step: TracedStep,
    weights: Weights,
    rest: Rest,
    workspace: GradientWorkspace,
    batch: PyTree,
    ran: tuple[ForwardPass, Activations, list[Array]] | None = None,
) -> tuple[list[Array], GradientWorkspace, Rest, _Metrics]:
    """Writes the gradients of one micro-batch after the other to host memory.

    `ran` is the only micro-batch's forward pass, if it has run.

    Returns:
      The stacks, the workspace, the gradients of the other parameters, and metrics.
    """
    clipping, dtypes = step.clipping, gradient_dtypes(workspace)
    count = len(jax.tree.leaves(batch)[0]) if step.accumulate else 1
    on_device = workspace.on_device and step.accumulate

    def one_batch(
        sums: _Sums, numbered: tuple[Int[Array, ""], PyTree]
    ) -> tuple[_Sums, _Metrics]:
        index, batch = numbered
        last, forward = True, ran
        if forward is None:
            last = index == count - 1
            one = dataclasses.replace(weights, stacks=sums.stacks)
            passed = ForwardPass.after_prologue(step.model, one, rest, batch)
            forward = passed, *passed.run()
        backward = BackwardPass.after_epilogue(*forward, dtypes, sums.weight, last)
        loss, weight = backward.epilogue.loss, sums.weight
        divisor, scale = count, None
        if isinstance(loss, WeightedLoss):
            divisor, weight = 1, weight + loss.weight
            scale = over(weight_divisor(sums.weight), weight, index == count - 1)
        sink = HostSink(clipping, index, count == 1, divisor, scale)
        measure, host, workspace = clipping.zero, sums.host, sums.workspace
        if on_device and count > 1:
            host, stacks, cts = backward.run(sink.visit_on_device, host)
        else:
            start = measure, host, workspace
            (measure, host, workspace), stacks, cts = backward.run(sink.visit, start)
        total = jax.tree.map(lambda x: x / divisor, backward.rest_gradients(cts))
        if sums.by_rest is not None:
            earlier = sums.by_rest if scale is None else scaled(sums.by_rest, scale)
            total = jax.tree.map(jnp.add, earlier, total)
        sums = _Sums(stacks, host, workspace, total, weight)
        return sums, (loss, backward.epilogue.metrics, measure)

    host, by_rest = jax.tree.leaves(workspace.host), None
    if step.accumulate:
        by_rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    if on_device:
        host = list(map(jnp.zeros_like, host))
    bare = dataclasses.replace(workspace, host=None, pending=None)
    start = _Sums(weights.stacks, host, bare, by_rest, clipping.zero.square)
    if step.accumulate:
        batches = jnp.arange(count), batch
        sums, (loss, metrics, measure) = lax.scan(one_batch, start, batches)
    else:
        sums, (loss, metrics, measure) = one_batch(start, (jnp.int32(0), batch))
    new = sums.workspace
    if on_device:
        new, measure = _measured(clipping, new, sums.host)
    elif step.accumulate:
        measure = jax.tree.map(lambda x: x[-1], measure)
    host = jax.tree.unflatten(jax.tree.structure(workspace.host), sums.host)
    workspace = dataclasses.replace(workspace, gradients=new.gradients, host=host)
    return sums.stacks, workspace, sums.by_rest or {}, (loss, metrics, measure)


def _measured(
    clipping: Clipping, workspace: GradientWorkspace, stacks: Sequence[Array]
) -> tuple[GradientWorkspace, GradientStats]:
    """Measures sums in device memory, and writes the first layer's to the workspace."""
    slices = lambda i: [read_slice(x, i) for x in stacks]
    add = lambda i, _, measure: measure + clipping.measure(slices(i))
    measure = over_layers(stacks[0].shape[0], add, clipping.zero, backward=True)
    first = jax.tree.structure(workspace.gradients).unflatten([x[0] for x in stacks])
    return workspace.zero_accumulators().write(first), measure


def update_next_step(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Applies the pending update, then computes gradients for the next step."""
    # The prologue needs the updated rest.
    weights, others, leaves = _update_unsliced(step, workspace)
    partition, layered = step.partition, step.optimizer.layered
    ran = None
    if step.overlaps:
        forward = ForwardPass.after_prologue(
            step.model, weights, partition.rest_of(others), batch
        )
        pending = partition.others(workspace.pending.rest)
        by = partition.combine(weights.stacks, pending)
        params = partition.combine(weights.stacks, others)
        gradients = _host_gradients(step, workspace, [by[n] for n in layered.chunked])
        overlap = Overlap(step.optimizer, weights, gradients)
        chunked = [params[n] for n in layered.chunked]
        activations, stacks, moments, chunked = overlap.forward(forward, chunked)
        others = layered.others_with(params, chunked)
        rest = partition.rest_of(others)
        ran = dataclasses.replace(forward, rest=rest), activations, stacks
    else:
        gradients = _host_gradients(step, workspace)
        stacks, moments, _ = _update_layers(step.optimizer, weights, gradients)
        rest = partition.rest_of(others)
    stacks, new, by_rest, (loss, metrics, measure) = _gradients_on_host(
        step, dataclasses.replace(weights, stacks=stacks), rest, workspace, batch, ran
    )
    measure += step.clipping.measure(by_rest)
    norm, waits = measure.norm, jnp.asarray(step.guard.decided(measure)[0])
    pending = Pending(waits, norm, step.clipping.clipped(by_rest, norm))
    cast = lambda new, old: new.astype(old.dtype)
    pending = jax.tree.map(cast, pending, workspace.pending)
    workspace = dataclasses.replace(new, pending=pending)
    state = step.guard.around(layered.new_state(moments, leaves), measure)
    output = LayerwiseOutput(mean_of(loss), metrics, norm)
    return step.params(stacks, others), state, workspace, output


def finish_update(
    step: TracedStep, workspace: GradientWorkspace
) -> tuple[PyTree, PyTree, GradientWorkspace]:
    """Applies the pending update."""
    weights, others, leaves = _update_unsliced(step, workspace)
    gradients = _host_gradients(step, workspace)
    stacks, moments, _ = _update_layers(step.optimizer, weights, gradients)
    state = step.optimizer.layered.new_state(moments, leaves)
    pending = workspace.pending._replace(waits=jnp.zeros((), jnp.bool_))
    workspace = dataclasses.replace(workspace, pending=pending)
    return step.params(stacks, others), step.guard.around(state, None), workspace


def _update_unsliced(
    step: TracedStep, workspace: GradientWorkspace
) -> tuple[Weights, list[Array], list[Stored]]:
    """Updates all but the layers' matrices."""
    weights, pending = step.weights(), workspace.pending
    partition, layered = step.partition, step.optimizer.layered
    small = [
        None if sliced else step.clipping.clipped(g.astype(x.dtype), pending.norm)
        for g, x, sliced in zip(
            jax.tree.leaves(workspace.host),
            jax.tree.leaves(workspace.gradients),
            layered.of_layers(layered.sliced),
            strict=True,
        )
    ]
    stacks, others, leaves = step.optimizer.update_unsliced(
        weights.stacks,
        small,
        partition.others(partition.rest),
        partition.others(pending.rest),
    )
    return dataclasses.replace(weights, stacks=stacks), others, leaves


def _host_gradients(
    step: TracedStep, workspace: GradientWorkspace, chunked: Sequence[Array] = ()
) -> HostGradients:
    stacks, dtypes = jax.tree.leaves(workspace.host), gradient_dtypes(workspace)
    norm = workspace.pending.norm
    return HostGradients([*stacks, *chunked], dtypes, step.clipping, norm)
