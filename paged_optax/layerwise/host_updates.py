"""Steps that write all gradients to host memory, and update the layers by them.

The norm is known after the backward pass. A deferred update then overlaps the next
forward pass, layer by layer: Yue, Yin and Qian, `GreedySnake
<https://arxiv.org/abs/2512.17570>`_, 2025.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import (
    Clipping,
    GradientStats,
    HostGradients,
    gradient_dtypes,
    scaled,
    sum_dtype,
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
from paged_optax.layerwise.overlap import ForwardOverlap
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.slices import (
    LayerIndex,
    over_layers,
    read_slice,
    write_slice,
)
from paged_optax.layerwise.sweep import BackwardPass, for_one
from paged_optax.layerwise.updates import StepResult, TracedStep
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace, Pending

#: Loop carry of a backward pass: the statistics so far, the gradients of all layers,
#: and the workspace without them.
_HostCarry = tuple[GradientStats, list[Array], GradientWorkspace]

#: The layers' parameters, the state's stacks, and the small leaves' gradients.
_UpdateCarry = tuple[list[Array], list[Stored], list[Array | None]]


class _BatchCarry(NamedTuple):
    """Loop carry over micro-batches.

    Attributes:
      host: The gradients of all layers, in host memory.
      workspace: The workspace without `host`.
      by_rest: The gradients of the other parameters; None before the only micro-batch.
      weight: The total weight so far; zero if losses have no weight.
    """

    stacks: list[Array]
    host: list[Array]
    workspace: GradientWorkspace
    by_rest: Rest | None
    weight: Float[Array, ""]

    @classmethod
    def first(
        cls,
        stacks: list[Array],
        workspace: GradientWorkspace,
        by_rest: Rest | None,
        weight: Float[Array, ""],
    ) -> "_BatchCarry":
        """The carry before the first micro-batch."""
        host = jax.tree.leaves(workspace.host)
        # XLA would copy a buffer that a loop carries twice.
        bare = dataclasses.replace(workspace, host=None, pending=None)
        return cls(stacks, host, bare, by_rest, weight)

    def stored_in(self, workspace: GradientWorkspace) -> GradientWorkspace:
        """The workspace with the gradients of all micro-batches."""
        host = jax.tree.unflatten(jax.tree.structure(workspace.host), self.host)
        return dataclasses.replace(
            workspace, gradients=self.workspace.gradients, host=host
        )


class _BatchMetrics(NamedTuple):
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
    totals, metrics = _gradients_on_host(step, weights, rest, workspace, batch)
    by_rest, rest_measure = totals.by_rest, clipping.measure(totals.by_rest)
    measure = metrics.layers + rest_measure
    # No gradient is fetched for an update before the norm of all is known.
    norm, weights.stacks, host = lax.optimization_barrier(
        (measure.norm, totals.stacks, totals.host)
    )
    optimizer = step.optimizer.only_if(step.guard.passes(measure))
    gradients = HostGradients(host, gradient_dtypes(workspace), clipping, norm)
    small = optimizer.layered.small_gradients()
    updated = _update_layers(optimizer, weights, gradients, small)
    limit = rest_measure.norm if clipping.by_layer else norm
    by_rest = clipping.clipped(by_rest, limit)
    workspace = totals.stored_in(workspace)
    output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
    return *step.update_rest(*updated, by_rest, measure), workspace, output


def _update_layers(
    optimizer: LayerOptimizer,
    weights: Weights,
    gradients: HostGradients,
    small: list[Array | None],
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

    start = weights.stacks, optimizer.layered.moments, small
    return over_layers(weights.length, body, start)


def _gradients_on_host(
    step: TracedStep,
    weights: Weights,
    rest: Rest,
    workspace: GradientWorkspace,
    batch: PyTree,
) -> tuple[_BatchCarry, _BatchMetrics]:
    """Writes the gradients of one micro-batch after the other to host memory."""
    zero, dtypes = step.clipping.zero.square, gradient_dtypes(workspace)
    count = len(jax.tree.leaves(batch)[0]) if step.accumulate else 1

    def one_batch(
        totals: _BatchCarry, numbered: tuple[Int[Array, ""], PyTree]
    ) -> tuple[_BatchCarry, _BatchMetrics]:
        index, batch = numbered
        one = copy.copy(weights)
        one.stacks = totals.stacks
        backward = BackwardPass.after_forward(
            *(step.model, one, rest, batch, dtypes, totals.weight),
            last=index == count - 1,
        )
        return _send_to_host(step, backward, count, totals, index)

    if not step.accumulate:
        start = _BatchCarry.first(weights.stacks, workspace, None, zero)
        return one_batch(start, (jnp.int32(0), batch))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    if workspace.on_device:
        host = jax.tree.map(jnp.zeros_like, workspace.host)
        workspace = dataclasses.replace(workspace, host=host)
    totals, metrics = lax.scan(
        one_batch,
        _BatchCarry.first(weights.stacks, workspace, zeros, zero),
        (jnp.arange(count), batch),
    )
    if workspace.on_device:
        totals, measure = _measured(step.clipping, totals)
    else:
        measure = jax.tree.map(lambda x: x[-1], metrics.layers)
    return totals, metrics._replace(layers=measure)


def _measured(
    clipping: Clipping, totals: _BatchCarry
) -> tuple[_BatchCarry, GradientStats]:
    """Measures sums in device memory, and writes the first layer's to the workspace."""
    slices = lambda i: [read_slice(x, i) for x in totals.host]
    add = lambda i, _, measure: measure + clipping.measure(slices(i))
    length = totals.host[0].shape[0]
    measure = over_layers(length, add, clipping.zero, backward=True)
    gradients = jax.tree.structure(totals.workspace.gradients)
    first = gradients.unflatten([x[0] for x in totals.host])
    workspace = totals.workspace.zero_accumulators().write(first)
    return totals._replace(workspace=workspace), measure


def _send_to_host(
    step: TracedStep,
    backward: BackwardPass,
    count: int,
    totals: _BatchCarry,
    index: Int[Array, ""],
) -> tuple[_BatchCarry, _BatchMetrics]:
    """Adds one micro-batch's gradients, layer by layer, to those of all layers.

    In device memory the sums of several micro-batches are not measured.
    """
    clipping, loss = step.clipping, backward.epilogue.loss
    _, host, workspace, by_rest, weight = totals
    divisor, scale = count, None
    if isinstance(loss, WeightedLoss):
        divisor, before, weight = 1, weight, weight + loss.weight
        scale = over(weight_divisor(before), weight, index == count - 1)

    def added(old: Array, g: Array) -> Array:
        if scale is None and old.dtype == g.dtype:
            return old + g
        wide = sum_dtype(np.promote_types(old.dtype, g.dtype))
        before = old.astype(wide)
        before = before if scale is None else scaled(before, scale)
        return (g.astype(wide) + before).astype(old.dtype)

    def earlier(stack: Array, i: LayerIndex) -> Array:
        old = read_slice(stack, i)
        # At the first micro-batch it still is the sum of the previous step.
        return jnp.where(index == 0, jnp.zeros_like(old), old)

    def visit(
        carry: _HostCarry,
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[_HostCarry, list[Array]]:
        measure, stacks, workspace = carry
        workspace = workspace.zero_accumulators().write(gradients)
        # A single micro-batch overwrites, and fetches no earlier sum.
        new = [
            (g[None] / divisor).astype(old.dtype)
            if count == 1
            else added(earlier(old, i), g[None] / divisor)
            for old, g in zip(stacks, jax.tree.leaves(workspace.gradients), strict=True)
        ]
        stacks = [write_slice(old, g, i) for old, g in zip(stacks, new, strict=True)]
        return (measure + clipping.measure(new), stacks, workspace), slices

    def visit_on_device(
        stacks: list[Array],
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[list[Array], list[Array]]:
        # Nothing else reads a gradient, and the sum has its shape: XLA:GPU then adds in
        # the kernel of the product. A layer of Llama-3-8B takes 0.2 ms less for each
        # micro-batch (H200, by `tests/helpers/step_model.py`).
        new = [
            added(read_slice(old, i)[0], g / divisor)
            for old, g in zip(stacks, jax.tree.leaves(gradients), strict=True)
        ]
        pairs = zip(stacks, new, strict=True)
        return [write_slice(old, g[None], i) for old, g in pairs], slices

    if count > 1 and workspace.on_device:
        measure = clipping.zero
        host, stacks, cts = backward.run(visit_on_device, host)
    else:
        start = clipping.zero, host, workspace
        (measure, host, workspace), stacks, cts = backward.run(visit, start)
    total = jax.tree.map(lambda x: x / divisor, backward.rest_gradients(cts))
    if by_rest is not None:
        by_rest = by_rest if scale is None else scaled(by_rest, scale)
        total = jax.tree.map(jnp.add, by_rest, total)
    totals = _BatchCarry(stacks, host, workspace, total, weight)
    return totals, _BatchMetrics(loss, backward.epilogue.metrics, measure)


def update_next_step(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Applies the pending update, then computes gradients for the next step."""
    # The prologue needs the updated rest.
    weights, others, leaves = _update_rest(step, workspace)
    partition, layered = step.partition, step.optimizer.layered
    if step.overlaps:
        rest = _rest(step, weights.stacks, others)
        start = step.model.start(weights, rest, batch, for_one)
        by = partition.combine(
            weights.stacks, partition.others(_pending(workspace).rest)
        )
        params = partition.combine(weights.stacks, others)
        gradients = _host_gradients(step, workspace, [by[n] for n in layered.chunked])
        overlap = ForwardOverlap(step.optimizer, start, weights, gradients)
        forward, moments, new = overlap.run([params[n] for n in layered.chunked])
        others = layered.others_with(params, new)
        rest = _rest(step, forward[-1], others)
        zero = step.clipping.zero.square
        backward = BackwardPass.after_forward(
            *(step.model, weights, rest, batch, gradient_dtypes(workspace), zero),
            forward=forward,
        )
        first = _BatchCarry.first(backward.stacks, workspace, None, zero)
        totals, metrics = _send_to_host(step, backward, 1, first, jnp.int32(0))
    else:
        weights.stacks, moments, _ = _update_pending(step, weights, workspace)
        rest = _rest(step, weights.stacks, others)
        totals, metrics = _gradients_on_host(step, weights, rest, workspace, batch)
    measure = metrics.layers + step.clipping.measure(totals.by_rest)
    norm, waits = measure.norm, jnp.asarray(step.guard.passes(measure))
    pending = Pending(waits, norm, step.clipping.clipped(totals.by_rest, norm))
    workspace = dataclasses.replace(
        totals.stored_in(workspace),
        pending=jax.tree.map(
            lambda new, old: new.astype(old.dtype), pending, workspace.pending
        ),
    )
    state = step.guard.around(layered.new_state(moments, leaves), measure)
    output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
    return step.params(totals.stacks, others), state, workspace, output


def finish_update(
    step: TracedStep, workspace: GradientWorkspace
) -> tuple[PyTree, PyTree, GradientWorkspace]:
    """Applies the pending update."""
    weights, others, leaves = _update_rest(step, workspace)
    stacks, moments, _ = _update_pending(step, weights, workspace)
    state = step.optimizer.layered.new_state(moments, leaves)
    pending = _pending(workspace)._replace(waits=jnp.zeros((), jnp.bool_))
    workspace = dataclasses.replace(workspace, pending=pending)
    return step.params(stacks, others), step.guard.around(state, None), workspace


def _update_rest(
    step: TracedStep, workspace: GradientWorkspace
) -> tuple[Weights, list[Array], list[Stored]]:
    """Updates all but the layers' matrices."""
    weights, pending = step.weights(), _pending(workspace)
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
    weights.stacks, others, leaves = step.optimizer.update_rest(
        weights.stacks,
        small,
        partition.others(partition.rest),
        partition.others(pending.rest),
    )
    return weights, others, leaves


def _update_pending(
    step: TracedStep, weights: Weights, workspace: GradientWorkspace
) -> _UpdateCarry:
    small = step.optimizer.layered.small_gradients()
    gradients = _host_gradients(step, workspace)
    return _update_layers(step.optimizer, weights, gradients, small)


def _host_gradients(
    step: TracedStep, workspace: GradientWorkspace, chunked: Sequence[Array] = ()
) -> HostGradients:
    stacks, dtypes = jax.tree.leaves(workspace.host), gradient_dtypes(workspace)
    norm = _pending(workspace).norm
    return HostGradients([*stacks, *chunked], dtypes, step.clipping, norm)


def _rest(step: TracedStep, stacks: Sequence[Array], others: Sequence[Array]) -> Rest:
    """The parameters outside the layers, by name."""
    partition = step.partition
    leaves = partition.combine(stacks, others)
    params = jax.tree.unflatten(partition.structure, leaves)
    return Partition.create(params, partition.key).rest


def _pending(workspace: GradientWorkspace) -> Pending:
    assert isinstance(workspace.pending, Pending)  # or the step would not be deferred
    return workspace.pending
