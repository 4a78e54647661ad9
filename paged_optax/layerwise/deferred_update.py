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
from paged_optax.layerwise.loss import LayerwiseOutput, mean_of
from paged_optax.layerwise.overlap import Overlapped
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.sinks import BatchCarry, HostGradients, gradient_dtypes
from paged_optax.layerwise.sweep import BackwardPass
from paged_optax.layerwise.updates import StepResult, TracedStep, UpdateAfterNorm
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace, Pending


@dataclasses.dataclass(frozen=True)
class UpdateNextStep:
    """Applies the previous step's gradients, and leaves its own to the next step."""

    step: TracedStep

    def __call__(self, workspace: GradientWorkspace, batch: PyTree) -> StepResult:
        """Applies the pending update, then computes this step's gradients."""
        step, host = self.step, UpdateAfterNorm(self.step)
        # The prologue needs the updated rest.
        weights, others, leaves = self._update_rest(workspace)
        if isinstance(step.schedule, Overlapped):
            start = step.model.start(
                *(weights, self._rest(weights.stacks, others), batch),
                lambda function, *args: function(*args),
            )
            layered = step.schedule.optimizer.layered
            pending, partition = _pending(workspace), step.partition
            by = partition.combine(weights.stacks, partition.others(pending.rest))
            params = partition.combine(weights.stacks, others)
            forward, slots, new = step.schedule.forward(
                start,
                weights,
                self._host_gradients(workspace, [by[n] for n in layered.chunked]),
                [params[n] for n in layered.chunked],
            )
            others = layered.others_with(params, new)
            rest = self._rest(forward.stacks, others)
            zero = step.clipping.zero.square
            layers = BackwardPass.create(
                *(step.model, weights, rest, batch, gradient_dtypes(workspace), zero),
                forward=forward,
            )
            first = BatchCarry.first(layers.stacks, workspace, None, zero)
            totals, metrics = host.send(layers, 1, first, jnp.int32(0))
        else:
            weights.stacks, slots, _ = self._update_layers(weights, workspace)
            rest = self._rest(weights.stacks, others)
            totals, metrics = host.gradients(weights, rest, workspace, batch)
        measure = metrics.layers + step.clipping.measure(totals.by_rest)
        norm, waits = measure.norm, jnp.asarray(step.guard.passes(measure))
        pending = Pending(waits, norm, step.clipping.clipped(totals.by_rest, norm))
        workspace = dataclasses.replace(
            totals.stored_in(workspace),
            pending=jax.tree.map(
                lambda new, old: new.astype(old.dtype), pending, workspace.pending
            ),
        )
        state = step.schedule.optimizer.layered.new_state(slots, leaves)
        state = step.guard.around(state, measure)
        output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
        return step.params(totals.stacks, others), state, workspace, output

    def finish(
        self, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        """Applies the pending update."""
        step = self.step
        weights, others, leaves = self._update_rest(workspace)
        stacks, slots, _ = self._update_layers(weights, workspace)
        state = step.schedule.optimizer.layered.new_state(slots, leaves)
        state = step.guard.around(state, None)
        pending = _pending(workspace)._replace(waits=jnp.zeros((), jnp.bool_))
        workspace = dataclasses.replace(workspace, pending=pending)
        return step.params(stacks, others), state, workspace

    def _update_rest(
        self, workspace: GradientWorkspace
    ) -> tuple[Weights, list[Array], list[Stored]]:
        """Updates all but the layers' matrices."""
        step, weights, pending = self.step, self.step.weights(), _pending(workspace)
        partition, layered = step.partition, step.schedule.optimizer.layered
        small = [
            None if sliced else step.clipping.clipped(g.astype(x.dtype), pending.norm)
            for g, x, sliced in zip(
                jax.tree.leaves(workspace.host),
                jax.tree.leaves(workspace.gradients),
                layered.of_layers(layered.sliced),
                strict=True,
            )
        ]
        weights.stacks, others, leaves = step.schedule.optimizer.update_rest(
            weights.stacks,
            small,
            partition.others(partition.rest),
            partition.others(pending.rest),
        )
        return weights, others, leaves

    def _update_layers(
        self, weights: Weights, workspace: GradientWorkspace
    ) -> tuple[list[Array], list[Stored], list[Array | None]]:
        layered = self.step.schedule.optimizer.layered
        small = layered.small_gradients(workspace.gradients)
        gradients = self._host_gradients(workspace)
        return self.step.in_turn.update(weights, gradients, small)

    def _host_gradients(
        self, workspace: GradientWorkspace, chunked: Sequence[Array] = ()
    ) -> HostGradients:
        stacks = [*jax.tree.leaves(workspace.host), *chunked]
        norm = _pending(workspace).norm
        return HostGradients(
            stacks, gradient_dtypes(workspace), self.step.clipping, norm
        )

    def _rest(self, stacks: Sequence[Array], others: Sequence[Array]) -> Rest:
        """The parameters outside the layers, by name."""
        partition = self.step.partition
        leaves = partition.combine(stacks, others)
        params = jax.tree.unflatten(partition.structure, leaves)
        return Partition.create(params, partition.key).rest


def _pending(workspace: GradientWorkspace) -> Pending:
    assert isinstance(workspace.pending, Pending)  # or the step would not be deferred
    return workspace.pending
