"""A step whose gradients leave for the host, and come back for the update."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.backward import BackwardPass, write_slabs
from paged_optax.layerwise.backward_update import BackwardUpdate, LayerResults
from paged_optax.layerwise.clipping import GradientStats, sum_dtype
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
from paged_optax.layerwise.slabs import LayerIndex, put, slab, upwards
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


class HostCarry(NamedTuple):
    """What goes from layer to layer where gradients leave for the host.

    Attributes:
      measure: What is measured of the layers' gradients so far.
      host: The gradients of all layers, in host memory.
      workspace: The workspace without these gradients. If a loop carried them twice,
        XLA would copy them.
    """

    measure: GradientStats
    host: list[Array]
    workspace: GradientWorkspace


class BatchCarry(NamedTuple):
    """What goes from micro-batch to micro-batch.

    Attributes:
      stacks: The layers' parameters.
      host: The gradients of all layers, in host memory.
      workspace: The workspace but for them.
      drest: The gradients by all other parameters; None before the only micro-batch.
      weight: The weight of the micro-batches so far; zero if losses have none.
    """

    stacks: list[Array]
    host: list[Array]
    workspace: GradientWorkspace
    drest: Rest | None
    weight: Float[Array, ""]


class BatchMetrics(NamedTuple):
    """Metrics of a micro-batch, or of all.

    Attributes:
      loss: The loss; stacked if it is that of several.
      metrics: What `epilogue` returned beside it, or None.
      layers: What is measured of the layers' gradients, all so far.
    """

    loss: Float[Array, "..."] | WeightedLoss
    metrics: PyTree
    layers: GradientStats


class UpdateCarry(NamedTuple):
    """What goes from layer to layer where gradients come from the host.

    Attributes:
      stacks: The layers' parameters.
      slots: The state's stacks.
      small: The gradients of the small leaves, of all layers.
    """

    stacks: list[Array]
    slots: list[Stored]
    small: list[Array | None]


class HostGradients(BackwardUpdate):
    """One step, being traced, whose gradients go by way of the host."""

    def _layers(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> LayerResults:
        """Updates follow when all gradients are there."""
        totals, metrics = self._gradients(weights, rest, workspace, batch)
        drest, of_rest = totals.drest, self.clipping.measure(totals.drest)
        measure = metrics.layers + of_rest
        # No gradient is fetched for an update before the norm of all is known.
        norm, weights.stacks, host = lax.optimization_barrier(
            (measure.norm, totals.stacks, totals.host)
        )
        optimizer = self.optimizer.only_if(self.guard.passes(measure))
        carry = self._update_in_turn(optimizer, weights, host, workspace, norm)
        limit = norm if self.clipping.clip == "global" else of_rest.norm
        drest = self.clipping.clipped(drest, limit)
        workspace = store_totals(workspace, totals)
        output = LayerwiseOutput(mean_of(metrics.loss), metrics.metrics, norm)
        return LayerResults(*carry, drest, workspace, output, measure)

    def _update_in_turn(
        self,
        optimizer: LayerOptimizer,
        weights: Weights,
        host: Sequence[Array],
        workspace: GradientWorkspace,
        norm: Float[Array, ""],
    ) -> UpdateCarry:
        """Updates the layers, one after the other, by gradients on the host."""

        def body(
            i: LayerIndex, following: LayerIndex | None, carry: UpdateCarry
        ) -> UpdateCarry:
            del following  # moments take longer than weights, and come in their turn
            slabs = [slab(x, i) for x in carry.stacks]
            gradients = [
                slab(g, i).astype(dtype) for g, dtype in zip(host, dtypes, strict=True)
            ]
            by_all = self.clipping.clip == "global"
            limit = norm if by_all else self.clipping.measure(gradients).norm
            gradients = self.clipping.clipped(gradients, limit)
            small = store_small(carry.small, gradients, i)
            slots, new = optimizer.update_layer(carry.slots, slabs, gradients, i)
            return UpdateCarry(write_slabs(carry.stacks, slabs, new, i), slots, small)

        layered = optimizer.layered
        dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]
        small = layered.small_gradients(workspace.gradients)
        start = UpdateCarry(weights.stacks, layered.slots, small)
        return upwards(weights.length, body, start)

    def _gradients(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[BatchCarry, BatchMetrics]:
        """Sends all layers' gradients to the host, one micro-batch's at a time."""
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1

        def one_batch(
            totals: BatchCarry, numbered: tuple[Int[Array, ""], PyTree]
        ) -> tuple[BatchCarry, BatchMetrics]:
            number, batch = numbered
            last = number == count - 1
            backward = BackwardPass(
                self.model,
                weights.with_stacks(totals.stacks),
                rest,
                batch,
                totals.workspace,
                False,
                totals.weight,
                last=last,
            )
            return self._send(backward, count, totals, number)

        zero = self.clipping.zero.square
        if not self.accumulate:
            start = first_carry(weights.stacks, workspace, None, zero)
            return one_batch(start, (jnp.int32(0), batch))
        # One micro-batch after the other: the gradients of a layer add up on the host.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        totals, metrics = lax.scan(
            one_batch,
            first_carry(weights.stacks, workspace, zeros, zero),
            (jnp.arange(count), batch),
        )
        last = jax.tree.map(lambda x: x[-1], metrics.layers)
        return totals, metrics._replace(layers=last)

    def _send(
        self,
        backward: BackwardPass,
        count: int,
        totals: BatchCarry,
        number: Int[Array, ""],
    ) -> tuple[BatchCarry, BatchMetrics]:
        """Adds one micro-batch's gradients, layer by layer, to those on the host."""
        _, host, workspace, drest, before = totals
        divisor, share, weight = count, None, before
        if isinstance(backward.loss, WeightedLoss):
            weight = before + backward.loss.weight
            divisor = 1
            share = over(weight_divisor(before), weight, number == count - 1)

        def visit(
            carry: HostCarry,
            i: LayerIndex,
            slabs: list[Array],
            gradients: PyTree[Array],
        ) -> tuple[HostCarry, list[Array]]:
            workspace = carry.workspace.zero_accumulators().write(gradients)
            # A single micro-batch overwrites: nothing is fetched to be added to.
            new = [
                (g[None] / divisor).astype(old.dtype)
                if count == 1
                else _added_to(slab(old, i), g[None] / divisor, number, share)
                for old, g in zip(
                    carry.host, jax.tree.leaves(workspace.gradients), strict=True
                )
            ]
            host = [put(old, g, i) for old, g in zip(carry.host, new, strict=True)]
            measure = carry.measure + self.clipping.measure(new)
            return HostCarry(measure, host, workspace), slabs

        start = HostCarry(self.clipping.zero, host, workspace)
        (measure, host, workspace), stacks, back = backward.run(visit, start)
        total = jax.tree.map(lambda x: x / divisor, backward.rest_gradients(back))
        if drest is not None:
            drest = drest if share is None else _scaled(drest, share)
            total = jax.tree.map(jnp.add, drest, total)
        totals = BatchCarry(stacks, host, workspace, total, weight)
        return totals, BatchMetrics(backward.loss, backward.metrics, measure)


def first_carry(
    stacks: list[Array],
    workspace: GradientWorkspace,
    drest: Rest | None,
    weight: Float[Array, ""],
) -> BatchCarry:
    """What the first micro-batch begins with."""
    host = jax.tree.leaves(workspace.host)
    # If a loop carried them twice, XLA would copy them.
    bare = dataclasses.replace(workspace, host=None, pending=None)
    return BatchCarry(stacks, host, bare, drest, weight)


def store_totals(workspace: GradientWorkspace, totals: BatchCarry) -> GradientWorkspace:
    """The workspace, with the gradients of all micro-batches on the host."""
    host = jax.tree.unflatten(jax.tree.structure(workspace.host), totals.host)
    return dataclasses.replace(
        workspace, gradients=totals.workspace.gradients, host=host
    )


def _added_to(
    old: Array, g: Array, number: Int[Array, ""], share: Float[Array, ""] | None
) -> Array:
    """One more micro-batch's part of a mean gradient, added to those before it.

    Args:
      old: The sum of those before, in the dtype of what is returned.
      g: The part.
      number: The micro-batch's number.
      share: What the others are scaled by, if the mean is a weighted one.
    """
    wide = sum_dtype(np.promote_types(old.dtype, g.dtype))
    before = old.astype(wide)
    before = before if share is None else _scaled(before, share)
    # At the first micro-batch `old` still is the sum of the step before.
    before = jnp.where(number == 0, jnp.zeros_like(before), before)
    return (g.astype(wide) + before).astype(old.dtype)


def _scaled(tree: PyTree[Array], by: Float[Array, ""]) -> PyTree[Array]:
    def scaled(x: Array) -> Array:
        wide = sum_dtype(x.dtype)  # of a small weight float16 has no inverse
        return (x.astype(wide) * by.astype(wide)).astype(x.dtype)

    return jax.tree.map(scaled, tree)
