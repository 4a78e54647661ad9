"""The update that applies the previous step's gradients.

The norm is known after the backward pass. The update then overlaps the next forward
pass, layer by layer: Yue, Yin and Qian, `GreedySnake
<https://arxiv.org/abs/2512.17570>`_, 2025.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.forward import Rest
from paged_optax.layerwise.host_updates import (
    UpdateCarry,
    host_gradients,
    send_to_host,
    update_layers,
)
from paged_optax.layerwise.loss import LayerwiseOutput, mean_of
from paged_optax.layerwise.overlap import forward_overlapped
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.sinks import BatchCarry, HostGradients, gradient_dtypes
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.updates import StepResult, TracedStep
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace, Pending


def update_next_step(
    step: TracedStep, workspace: GradientWorkspace, batch: PyTree
) -> StepResult:
    """Applies the pending update, then computes gradients for the next step."""
    # The prologue needs the updated rest.
    weights, others, leaves = _update_rest(step, workspace)
    partition, layered = step.partition, step.optimizer.layered
    if step.overlaps:
        start = step.model.start(
            *(weights, _rest(step, weights.stacks, others), batch),
            lambda function, *args: function(*args),
        )
        by = partition.combine(
            weights.stacks, partition.others(_pending(workspace).rest)
        )
        params = partition.combine(weights.stacks, others)
        forward, slots, new = forward_overlapped(
            step.optimizer,
            start,
            weights,
            _host_gradients(step, workspace, [by[n] for n in layered.chunked]),
            [params[n] for n in layered.chunked],
        )
        others = layered.others_with(params, new)
        rest = _rest(step, forward.stacks, others)
        zero = step.clipping.zero.square
        layers = BackwardPass.create(
            *(step.model, weights, rest, batch, gradient_dtypes(workspace), zero),
            forward=forward,
        )
        first = BatchCarry.first(layers.stacks, workspace, None, zero)
        totals, metrics = send_to_host(step, layers, 1, first, jnp.int32(0))
    else:
        weights.stacks, slots, _ = _update_pending(step, weights, workspace)
        rest = _rest(step, weights.stacks, others)
        totals, metrics = host_gradients(step, weights, rest, workspace, batch)
    measure = metrics.layers + step.clipping.measure(totals.by_rest)
    norm, waits = measure.norm, jnp.asarray(step.guard.passes(measure))
    pending = Pending(waits, norm, step.clipping.clipped(totals.by_rest, norm))
    workspace = dataclasses.replace(
        totals.stored_in(workspace),
        pending=jax.tree.map(
            lambda new, old: new.astype(old.dtype), pending, workspace.pending
        ),
    )
    state = step.guard.around(layered.new_state(slots, leaves), measure)
    output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
    return step.params(totals.stacks, others), state, workspace, output


def finish_update(
    step: TracedStep, workspace: GradientWorkspace
) -> tuple[PyTree, PyTree, GradientWorkspace]:
    """Applies the pending update."""
    weights, others, leaves = _update_rest(step, workspace)
    stacks, slots, _ = _update_pending(step, weights, workspace)
    state = step.optimizer.layered.new_state(slots, leaves)
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
) -> UpdateCarry:
    small = step.optimizer.layered.small_gradients(workspace.gradients)
    gradients = _host_gradients(step, workspace)
    return update_layers(step.optimizer, weights, gradients, small)


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
