"""The sweeps over the layers that make one step."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from paged_optax.backend.memory import DEVICE, HOST, on_host
from paged_optax.engine.streamed import Stored
from paged_optax.layerwise.backward import Bundle, written
from paged_optax.layerwise.beside import Beside
from paged_optax.layerwise.layer_update import Applied
from paged_optax.layerwise.model import Model, Rest
from paged_optax.layerwise.norms import Norms
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.slices import (
    LayerIndex,
    goes_in_slabs,
    put,
    slab,
    upwards,
)
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


class Swept(NamedTuple):
    """What a sweep over the layers leaves for the update of the rest.

    Attributes:
      stacks: The layers' parameters, the larger ones updated.
      slots: The state's stacks, updated.
      small: The collected gradients of the small ones.
      drest: The gradients by all other parameters, clipped.
      workspace: The workspace.
      output: What the step says of itself.
    """

    stacks: list[Array]
    slots: list[Stored]
    small: list[Array | None]
    drest: Rest
    workspace: GradientWorkspace
    output: LayerwiseOutput


class Visited(NamedTuple):
    """What goes from layer to layer where each one's update follows its gradients.

    Attributes:
      square: The square of the norm of the layers' gradients so far.
      slots: The state's stacks.
      workspace: The workspace.
      small: The collected gradients of the small leaves.
    """

    square: Float[Array, ""]
    slots: list[Stored]
    workspace: GradientWorkspace
    small: list[Array | None]


class Sent(NamedTuple):
    """What goes from layer to layer where gradients leave for the host.

    Attributes:
      square: The square of the norm of the layers' gradients so far.
      host: The gradients of all layers, in host memory.
      workspace: The workspace.
    """

    square: Float[Array, ""]
    host: list[Array]
    workspace: GradientWorkspace


class Gathered(NamedTuple):
    """What goes from micro-batch to micro-batch.

    Attributes:
      stacks: The layers' parameters.
      host: The gradients of all layers, in host memory.
      workspace: The workspace.
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


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """One step, being traced."""

    model: Model
    parts: Parts
    applied: Applied
    norms: Norms
    accumulate: bool

    def __call__(
        self, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Runs the step."""
        parts = self.parts
        weights = Weights(parts.layers)
        # Rows of matrices that live on the host are no whole tiles on a TPU.
        home = [on_host(x) and not goes_in_slabs(x) for x in weights.stacks]
        weights.stacks = [
            jax.device_put(x, DEVICE) if moves else x
            for x, moves in zip(weights.stacks, home, strict=True)
        ]
        sweep = self._from_host if workspace.host is not None else self._at_once
        stacks, slabs, small, drest, workspace, output = sweep(
            weights, parts.rest, workspace, batch
        )
        count = len(weights.stacks)
        early = dict(zip(self.applied.early, stacks[count:], strict=True))
        others = [
            early.get(n, x)
            for n, x in enumerate(self.applied.params)
            if not parts.in_layers[n]
        ]
        stacks, others, state = self.applied.rest(
            stacks[:count], slabs, small, others, parts.others(drest)
        )
        stacks = [
            jax.device_put(x, HOST) if moves else x
            for x, moves in zip(stacks, home, strict=True)
        ]
        params = jax.tree.unflatten(parts.structure, parts.joined(stacks, others))
        return params, state, workspace, output

    def _at_once(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> Swept:
        """Each layer's update follows its gradients."""
        one = self._bundle(weights, rest, batch, workspace, self.accumulate)
        drest: Rest | None = None
        norm: Float[Array, ""] | None = None
        if self.norms.needed_first:
            norm, drest = self._norm_first(one)

        def gradients_made(
            carry: Visited, i: LayerIndex, gradients: PyTree[Array]
        ) -> Visited:
            own = self.norms.square(gradients)
            found = jnp.sqrt(own) if norm is None else norm
            workspace = carry.workspace.zero_accumulators().write(
                self.norms.scaled(gradients, found)
            )
            made = [x[None] for x in jax.tree.leaves(workspace.gradients)]
            small = self.applied.collect(carry.small, made, i)
            return Visited(carry.square + own, carry.slots, workspace, small)

        length, early = weights.length, self.applied.early
        known = self.parts.others(drest if drest is not None else one.drest)
        whole = [self.parts.joined(weights.stacks, known)[n] for n in early]
        whole = self.norms.scaled(whole, norm) if norm is not None else whole

        def gradients_of(carry: Visited, i: LayerIndex) -> list[Array]:
            made = [x[None] for x in jax.tree.leaves(carry.workspace.gradients)]
            return made + [slab(x, i, length) for x in whole]

        def visit(
            carry: Visited, i: LayerIndex, slabs: list[Array], gradients: PyTree[Array]
        ) -> tuple[Visited, list[Array]]:
            carry = gradients_made(carry, i, gradients)
            slots, new = self.applied.layer(
                carry.slots, slabs, gradients_of(carry, i), i
            )
            return carry._replace(slots=slots), new

        others = [self.applied.params[n] for n in early]
        start = Visited(
            self.norms.zero,
            [] if self.applied.overlaps else self.applied.slots,
            workspace,
            self.applied.collector(workspace.gradients, length),
        )
        if self.applied.overlaps:
            (square, _, workspace, small), flow, back = one.beside(
                Beside(self.applied), gradients_made, gradients_of, start, others
            )
            slots, stacks = flow.slots, flow.stacks
        else:
            (square, slots, workspace, small), stacks, back = one.backward(visit, start)
        if norm is None or drest is None:
            drest = one.rest_gradients(back)
            # Measured before the update overwrites them, or XLA copies them.
            own, drest = lax.optimization_barrier((self.norms.square(drest), drest))
            norm = jnp.sqrt(square + own)
            clipped = self.norms.scaled(drest, jnp.sqrt(own))
        else:
            clipped = self.norms.scaled(drest, norm)
        output = LayerwiseOutput(one.loss, one.metrics, norm)
        return Swept(stacks, slots, small, clipped, workspace, output)

    def _norm_first(self, one: Bundle) -> tuple[Float[Array, ""], Rest]:
        """The norm of all gradients, and those of the rest, by a pass of its own."""
        add = lambda square, i, slabs, gradients: (
            square + self.norms.square(gradients),
            slabs,
        )
        square, stacks, back = one.backward(add, self.norms.zero)
        drest = one.rest_gradients(back)
        norm = jnp.sqrt(square + self.norms.square(drest))
        # The second pass is not to be taken for a part of the first.
        norm, stacks, drest, one.inputs = lax.optimization_barrier(
            (norm, stacks, drest, one.inputs)
        )
        one.stacks = stacks
        return norm, drest

    def _from_host(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> Swept:
        """Gradients leave for the host; updates follow when all are there."""
        gathered, measured = self._gathered(weights, rest, workspace, batch)
        stacks, host, workspace, drest = gathered
        own = self.norms.square(drest)
        norm = jnp.sqrt(measured.square + own)
        norm, stacks, host = lax.optimization_barrier((norm, stacks, host))

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
        stacks, slots, small = upwards(
            weights.length, body, Updated(stacks, self.applied.slots, small)
        )
        drest = self.norms.scaled(
            drest, norm if self.norms.clip == "global" else jnp.sqrt(own)
        )
        workspace = dataclasses.replace(
            workspace,
            host=jax.tree.unflatten(jax.tree.structure(workspace.host), host),
        )
        output = LayerwiseOutput(measured.loss, measured.metrics, norm)
        return Swept(stacks, slots, small, drest, workspace, output)

    def _gathered(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[Gathered, Measured]:
        """Sends all layers' gradients to the host, one micro-batch's at a time."""
        host = jax.tree.leaves(workspace.host)
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1
        one_batch = lambda gathered, given: self._one_batch(
            weights, rest, count, gathered, *given
        )
        if not self.accumulate:
            return one_batch(
                Gathered(weights.stacks, host, workspace, None), (jnp.int32(0), batch)
            )
        zeros = jax.tree.map(jnp.zeros_like, rest)
        gathered, (losses, metrics, squares) = lax.scan(
            one_batch,
            Gathered(weights.stacks, host, workspace, zeros),
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
        stacks, host, workspace, drest = gathered
        weights = Weights(jax.tree.unflatten(weights.structure, stacks))
        one = self._bundle(weights, rest, batch, workspace, False)

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

    def _bundle(
        self,
        weights: Weights,
        rest: Rest,
        batch: PyTree,
        workspace: GradientWorkspace,
        several: bool,
    ) -> Bundle:
        return Bundle(self.model, weights, rest, batch, workspace, several)


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
