"""A step whose gradients leave for the host, and come back for the update."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.backward import Bundle, written
from paged_optax.layerwise.layer_update import Applied
from paged_optax.layerwise.loss import WeightedLoss, divisor, mean_of, over
from paged_optax.layerwise.model import Rest
from paged_optax.layerwise.norms import Measure
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.slices import LayerIndex, put, slab, upwards
from paged_optax.layerwise.sweeps import Sweeps, Swept
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


class Sent(NamedTuple):
    """What goes from layer to layer where gradients leave for the host.

    Attributes:
      measure: What is measured of the layers' gradients so far.
      host: The gradients of all layers, in host memory.
      workspace: The workspace without these gradients. If a loop carried them twice,
        XLA would copy them.
    """

    measure: Measure
    host: list[Array]
    workspace: GradientWorkspace


class Gathered(NamedTuple):
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


class Measured(NamedTuple):
    """What is measured of a micro-batch, or of all.

    Attributes:
      loss: The loss; stacked if it is that of several.
      metrics: What `epilogue` returned beside it, or None.
      layers: What is measured of the layers' gradients, all so far.
    """

    loss: Float[Array, "..."] | WeightedLoss
    metrics: PyTree
    layers: Measure


class Updated(NamedTuple):
    """What goes from layer to layer where gradients come from the host.

    Attributes:
      stacks: The layers' parameters.
      slots: The state's stacks.
      small: The collected gradients of the small leaves.
    """

    stacks: list[Array]
    slots: list[Stored]
    small: list[Array | None]


class ByHost(Sweeps):
    """One step, being traced, whose gradients go by way of the host."""

    def _swept(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> Swept:
        """Updates follow when all gradients are there."""
        gathered, measured = self._gathered(weights, rest, workspace, batch)
        drest, own = gathered.drest, self.norms.measured(gathered.drest)
        measure = measured.layers + own
        held = measure.norm, gathered.stacks, gathered.host
        norm, weights.stacks, host = lax.optimization_barrier(held)
        applied = self.applied.only_if(self.guard.passes(measure))
        updated = self._updated(applied, weights, host, workspace, norm)
        drest = self.norms.scaled(
            drest, norm if self.norms.clip == "global" else own.norm
        )
        workspace = filled(workspace, gathered)
        output = LayerwiseOutput(mean_of(measured.loss), measured.metrics, norm)
        return Swept(*updated, drest, workspace, output, measure)

    def _updated(
        self,
        applied: Applied,
        weights: Weights,
        host: Sequence[Array],
        workspace: GradientWorkspace,
        norm: Float[Array, ""],
    ) -> Updated:
        """Updates the layers, one after the other, by gradients on the host."""

        def body(
            i: LayerIndex, following: LayerIndex | None, carry: Updated
        ) -> Updated:
            del following  # the moments take longer than the weights, and come alone
            slabs = [slab(x, i) for x in carry.stacks]
            gradients = self._clipped_from(host, workspace, norm, i)
            small = applied.collect(carry.small, gradients, i)
            slots, new = applied.layer(carry.slots, slabs, gradients, i)
            return Updated(written(carry.stacks, slabs, new, i), slots, small)

        small = applied.collector(workspace.gradients, weights.length)
        start = Updated(weights.stacks, applied.slots, small)
        return upwards(weights.length, body, start)

    def _gathered(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[Gathered, Measured]:
        """Sends all layers' gradients to the host, one micro-batch's at a time."""
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1
        one_batch = lambda gathered, given: self._one_batch(
            weights, rest, count, gathered, *given
        )
        zero = self.norms.zero.square
        if not self.accumulate:
            start = gathering(weights.stacks, workspace, None, zero)
            return one_batch(start, (jnp.int32(0), batch))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        gathered, measured = lax.scan(
            one_batch,
            gathering(weights.stacks, workspace, zeros, zero),
            (jnp.arange(count), batch),
        )
        last = jax.tree.map(lambda x: x[-1], measured.layers)
        return gathered, measured._replace(layers=last)

    def _one_batch(
        self,
        weights: Weights,
        rest: Rest,
        count: int,
        gathered: Gathered,
        number: Int[Array, ""],
        batch: PyTree,
    ) -> tuple[Gathered, Measured]:
        """Adds one micro-batch's gradients to those on the host."""
        weights = weights.holding(gathered.stacks)
        bare, before = gathered.workspace, gathered.weight
        last = number == count - 1
        one = Bundle(self.model, weights, rest, batch, bare, False, before, last=last)
        return self._sent(one, count, gathered, number)

    def _sent(
        self, one: Bundle, count: int, gathered: Gathered, number: Int[Array, ""]
    ) -> tuple[Gathered, Measured]:
        """Adds one micro-batch's gradients, as they are made, to those on the host."""
        _, host, workspace, drest, before = gathered
        parts, share, weight = count, None, before
        if isinstance(one.loss, WeightedLoss):
            weight = before + one.loss.weight
            parts, share = 1, over(divisor(before), weight, number == count - 1)

        def visit(
            carry: Sent, i: LayerIndex, slabs: list[Array], gradients: PyTree[Array]
        ) -> tuple[Sent, list[Array]]:
            workspace = carry.workspace.zero_accumulators().write(gradients)
            new = [
                (g[None] / parts).astype(old.dtype)
                if count == 1
                else _added_to(slab(old, i), g[None] / parts, number, share)
                for old, g in zip(
                    carry.host, jax.tree.leaves(workspace.gradients), strict=True
                )
            ]
            host = [put(old, g, i) for old, g in zip(carry.host, new, strict=True)]
            measure = carry.measure + self.norms.measured(new)
            return Sent(measure, host, workspace), slabs

        start = Sent(self.norms.zero, host, workspace)
        (measure, host, workspace), stacks, back = one.backward(visit, start)
        made = jax.tree.map(lambda x: x / parts, one.rest_gradients(back))
        if drest is not None:
            drest = drest if share is None else _scaled(drest, share)
            made = jax.tree.map(jnp.add, drest, made)
        gathered = Gathered(stacks, host, workspace, made, weight)
        return gathered, Measured(one.loss, one.metrics, measure)

    def _clipped_from(
        self,
        host: Sequence[Array],
        workspace: GradientWorkspace,
        norm: Float[Array, ""],
        i: LayerIndex,
    ) -> list[Array]:
        """Layer i's gradients, fetched from the host and clipped."""
        gradients = [
            slab(g, i).astype(x.dtype)
            for g, x in zip(host, jax.tree.leaves(workspace.gradients), strict=True)
        ]
        here = (
            norm if self.norms.clip == "global" else self.norms.measured(gradients).norm
        )
        return self.norms.scaled(gradients, here)


def gathering(
    stacks: list[Array],
    workspace: GradientWorkspace,
    drest: Rest | None,
    weight: Float[Array, ""],
) -> Gathered:
    """What the first micro-batch begins with."""
    host = jax.tree.leaves(workspace.host)
    bare = dataclasses.replace(workspace, host=None, pending=None)
    return Gathered(stacks, host, bare, drest, weight)


def filled(workspace: GradientWorkspace, gathered: Gathered) -> GradientWorkspace:
    """The workspace, with the gradients of all micro-batches on the host."""
    host = jax.tree.unflatten(jax.tree.structure(workspace.host), gathered.host)
    return dataclasses.replace(
        workspace, gradients=gathered.workspace.gradients, host=host
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
    before = old.astype(g.dtype)
    before = before if share is None else _scaled(before, share)
    return (g + jnp.where(number == 0, jnp.zeros_like(g), before)).astype(old.dtype)


def _scaled(tree: PyTree[Array], by: Float[Array, ""]) -> PyTree[Array]:
    return jax.tree.map(lambda x: x * by.astype(x.dtype), tree)
