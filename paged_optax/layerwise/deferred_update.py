"""A step that begins with the update that the step before left.

The norm to clip by is known when all gradients are computed. Their update then goes
beside the next forward pass, in its order: Yue, Yin and Qian, `GreedySnake
<https://arxiv.org/abs/2512.17570>`_, 2025.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.backward import BackwardPass
from paged_optax.layerwise.forward import Forward
from paged_optax.layerwise.host_gradients import (
    HostGradients,
    first_carry,
    store_totals,
)
from paged_optax.layerwise.loss import LayerwiseOutput, mean_of
from paged_optax.layerwise.overlapped_update import ForwardOverlap
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace, Pending


class UpdatedRest(NamedTuple):
    """A model of which all but the large parameters of the layers are updated.

    Attributes:
      weights: The layers'.
      others: The others.
      state: The leaves of the state; see `LayerOptimizer.update_rest`.
    """

    weights: Weights
    others: list[Array]
    state: list[Stored]


class DeferredUpdate(HostGradients):
    """One step, being traced, that leaves its update for the next one."""

    def __call__(
        self, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Applies what is pending, and runs the step but for its update."""
        # First, for the prologue needs the rest before any layer runs.
        updated = self._update_rest(workspace)
        if self.optimizer.overlaps:
            forward, slots, others = self._forward(updated, batch, workspace)
            rest = self._rest(forward.stacks, others)
            zero = self.clipping.zero.square
            backward = BackwardPass(
                self.model,
                updated.weights,
                rest,
                batch,
                workspace,
                False,
                zero,
                forward,
            )
            start = first_carry(backward.stacks, workspace, None, zero)
            totals, metrics = self._send(backward, 1, start, jnp.int32(0))
        else:
            weights, others, slots = self._update_layers(updated, workspace)
            rest = self._rest(weights.stacks, others)
            totals, metrics = self._gradients(weights, rest, workspace, batch)
        drest = totals.drest
        measure = metrics.layers + self.clipping.measure(drest)
        norm, waits = measure.norm, jnp.asarray(self.guard.passes(measure))
        pending = Pending(waits, norm, self.clipping.clipped(drest, norm))
        workspace = dataclasses.replace(
            store_totals(workspace, totals),
            pending=jax.tree.map(
                lambda new, old: new.astype(old.dtype), pending, workspace.pending
            ),
        )
        state = self.optimizer.layered.new_state(slots, updated.state)
        state = self.guard.around(state, measure)
        output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
        return self._params(totals.stacks, others), state, workspace, output

    def finish(
        self, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        """Applies what is pending."""
        updated, pending = self._update_rest(workspace), _pending(workspace)
        weights, others, slots = self._update_layers(updated, workspace)
        state = self.optimizer.layered.new_state(slots, updated.state)
        state = self.guard.around(state, None)
        pending = pending._replace(waits=jnp.zeros((), jnp.bool_))
        workspace = dataclasses.replace(workspace, pending=pending)
        return self._params(weights.stacks, others), state, workspace

    def _update_rest(self, workspace: GradientWorkspace) -> UpdatedRest:
        """Updates all but the large parameters of the layers."""
        weights, pending = self._weights(), _pending(workspace)
        partition, layered = self.partition, self.optimizer.layered
        small = [
            None if slabbed else self.clipping.clipped(g.astype(x.dtype), pending.norm)
            for g, x, slabbed in zip(
                jax.tree.leaves(workspace.host),
                jax.tree.leaves(workspace.gradients),
                layered.of_layers(layered.slabbed),
                strict=True,
            )
        ]
        weights.stacks, others, state = self.optimizer.update_rest(
            weights.stacks,
            small,
            partition.others(partition.rest),
            partition.others(pending.rest),
        )
        return UpdatedRest(weights, others, state)

    def _rest(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """The other parameters, by name."""
        leaves = self.partition.combine(stacks, others)
        params = jax.tree.unflatten(self.partition.structure, leaves)
        return Partition.of(params, self.partition.key).rest

    def _update_layers(
        self, updated: UpdatedRest, workspace: GradientWorkspace
    ) -> tuple[Weights, list[Array], list[Stored]]:
        """Updates the layers while nothing else is computed."""
        weights, host = updated.weights, jax.tree.leaves(workspace.host)
        norm = _pending(workspace).norm
        weights.stacks, slots, _ = self._update_in_turn(
            self.optimizer, weights, host, workspace, norm
        )
        return weights, updated.others, slots

    def _forward(
        self, updated: UpdatedRest, batch: PyTree, workspace: GradientWorkspace
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Updates each layer while the layer before runs forward."""
        weights, others, _ = updated
        pending, partition = _pending(workspace), self.partition
        host = jax.tree.leaves(workspace.host)
        start = self.model.start(
            weights,
            self._rest(weights.stacks, others),
            batch,
            lambda function, *arguments: function(*arguments),
        )
        dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]

        def clipped(n: int, g: Array) -> Array:
            if n >= len(dtypes):  # of another parameter, and clipped already
                return g
            return self.clipping.clipped(g.astype(dtypes[n]), pending.norm)

        layered = self.optimizer.layered
        gradients = partition.combine(weights.stacks, partition.others(pending.rest))
        params = partition.combine(weights.stacks, others)
        overlap = ForwardOverlap(
            self.optimizer,
            weights.frozen,
            [*host, *(gradients[n] for n in layered.chunked)],
            clipped,
        )
        forward, slots, new = overlap.forward(
            start, weights.stacks, [params[n] for n in layered.chunked]
        )
        return forward, slots, layered.others_with(params, new)


def _pending(workspace: GradientWorkspace) -> Pending:
    assert isinstance(workspace.pending, Pending)  # or the step would not be deferred
    return workspace.pending
