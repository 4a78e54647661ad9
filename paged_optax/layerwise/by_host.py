"""A step whose gradients leave for the host, and come back for the update."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.streamed import Stored
from paged_optax.layerwise.backward import Bundle, written
from paged_optax.layerwise.model import Rest
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.slices import LayerIndex, put, slab, upwards
from paged_optax.layerwise.sweeps import Sweeps, Swept
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


class Sent(NamedTuple):
    """What goes from layer to layer where gradients leave for the host.

    Attributes:
      square: The square of the norm of the layers' gradients so far.
      host: The gradients of all layers, in host memory.
      workspace: The workspace without these gradients. If a loop carried them twice,
        XLA would copy them.
    """

    square: Float[Array, ""]
    host: list[Array]
    workspace: GradientWorkspace


class Gathered(NamedTuple):
    """What goes from micro-batch to micro-batch.

    Attributes:
      stacks: The layers' parameters.
      host: The gradients of all layers, in host memory.
      workspace: The workspace but for them.
      drest: The gradients by all other parameters; None before the only micro-batch.
    """

    stacks: list[Array]
    host: list[Array]
    workspace: GradientWorkspace
    drest: Rest | None


class Measured(NamedTuple):
    """What is measured of a micro-batch, or of all.

    Attributes:
      loss: The loss.
      metrics: What `epilogue` returned beside it, or None.
      square: The square of the norm of the layers' gradients, all so far.
    """

    loss: Float[Array, ""]
    metrics: PyTree
    square: Float[Array, ""]


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
        stacks, host, _, drest = gathered
        own = self.norms.square(drest)
        norm = jnp.sqrt(measured.square + own)
        norm, stacks, host = lax.optimization_barrier((norm, stacks, host))
        weights.stacks = stacks
        updated = self._updated(weights, host, workspace, norm)
        drest = self.norms.scaled(
            drest, norm if self.norms.clip == "global" else jnp.sqrt(own)
        )
        workspace = filled(workspace, gathered)
        output = LayerwiseOutput(measured.loss, measured.metrics, norm)
        return Swept(*updated, drest, workspace, output)

    def _updated(
        self,
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
            slabs = weights.slabs(carry.stacks, i)
            gradients = self._clipped_from(host, workspace, norm, i)
            small = self.applied.collect(carry.small, gradients, i)
            slots, new = self.applied.layer(carry.slots, slabs, gradients, i)
            return Updated(written(carry.stacks, slabs, new, i), slots, small)

        small = self.applied.collector(workspace.gradients, weights.length)
        start = Updated(weights.stacks, self.applied.slots, small)
        return upwards(weights.length, body, start)

    def _gathered(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[Gathered, Measured]:
        """Sends all layers' gradients to the host, one micro-batch's at a time."""
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1
        one_batch = lambda gathered, given: self._one_batch(
            weights, rest, count, gathered, *given
        )
        if not self.accumulate:
            start = gathering(weights.stacks, workspace, None)
            return one_batch(start, (jnp.int32(0), batch))
        zeros = jax.tree.map(jnp.zeros_like, rest)
        gathered, (losses, metrics, squares) = lax.scan(
            one_batch,
            gathering(weights.stacks, workspace, zeros),
            (jnp.arange(count), batch),
        )
        return gathered, Measured(jnp.mean(losses), metrics, squares[-1])

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
        weights = Weights(jax.tree.unflatten(weights.structure, gathered.stacks))
        one = self._bundle(weights, rest, batch, gathered.workspace, False)
        return self._sent(one, count, gathered, number)

    def _sent(
        self, one: Bundle, count: int, gathered: Gathered, number: Int[Array, ""]
    ) -> tuple[Gathered, Measured]:
        """Adds one micro-batch's gradients, as they are made, to those on the host."""
        _, host, workspace, drest = gathered

        def visit(
            carry: Sent, i: LayerIndex, slabs: list[Array], gradients: PyTree[Array]
        ) -> tuple[Sent, list[Array]]:
            workspace = carry.workspace.zero_accumulators().write(gradients)
            new = _added_to(carry.host, workspace, i, number, count)
            host = [put(old, g, i) for old, g in zip(carry.host, new, strict=True)]
            return Sent(carry.square + self.norms.square(new), host, workspace), slabs

        start = Sent(self.norms.zero, host, workspace)
        (square, host, workspace), stacks, back = one.backward(visit, start)
        made = jax.tree.map(lambda x: x / count, one.rest_gradients(back))
        if drest is not None:
            made = jax.tree.map(jnp.add, drest, made)
        gathered = Gathered(stacks, host, workspace, made)
        return gathered, Measured(one.loss, one.metrics, square)

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
            norm
            if self.norms.clip == "global"
            else jnp.sqrt(self.norms.square(gradients))
        )
        return self.norms.scaled(gradients, here)


def gathering(
    stacks: list[Array], workspace: GradientWorkspace, drest: Rest | None
) -> Gathered:
    """What the first micro-batch begins with."""
    host = jax.tree.leaves(workspace.host)
    bare = dataclasses.replace(workspace, host=None, pending=None)
    return Gathered(stacks, host, bare, drest)


def filled(workspace: GradientWorkspace, gathered: Gathered) -> GradientWorkspace:
    """The workspace, with the gradients of all micro-batches on the host."""
    host = jax.tree.unflatten(jax.tree.structure(workspace.host), gathered.host)
    return dataclasses.replace(
        workspace, gradients=gathered.workspace.gradients, host=host
    )


def _added_to(
    host: Sequence[Array],
    workspace: GradientWorkspace,
    i: LayerIndex,
    number: Int[Array, ""],
    count: int,
) -> list[Array]:
    """Layer i's part of the mean gradients, with one more micro-batch's in it."""
    new: list[Array] = []
    for old, g in zip(host, jax.tree.leaves(workspace.gradients), strict=True):
        g = g[None] / count
        if count > 1:
            before = slab(old, i).astype(g.dtype)
            g = g + jnp.where(number == 0, jnp.zeros_like(g), before)
        new.append(g.astype(old.dtype))
    return new
