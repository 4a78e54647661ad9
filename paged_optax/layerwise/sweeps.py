"""The sweeps over the layers that make one step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_optax.backend.memory import DEVICE, HOST, on_host
from paged_optax.layerwise.backward import Bundle, written
from paged_optax.layerwise.model import Model
from paged_optax.layerwise.norms import Norms
from paged_optax.layerwise.one_layer import Applied
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.slices import (
    goes_in_slabs,
    put,
    slab,
    upwards,
)
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """One step, being traced."""

    model: Model
    parts: Parts
    applied: Applied
    norms: Norms
    accumulate: bool

    def __call__(
        self, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, Any, GradientWorkspace, LayerwiseOutput]:
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
        stacks, others, state = self.applied.rest(
            stacks, slabs, small, parts.others(parts.rest), parts.others(drest)
        )
        stacks = [
            jax.device_put(x, HOST) if moves else x
            for x, moves in zip(stacks, home, strict=True)
        ]
        params = jax.tree.unflatten(parts.structure, parts.joined(stacks, others))
        return params, state, workspace, output

    def _at_once(
        self, weights: Weights, rest: Any, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, ...]:
        """Each layer's update follows its gradients."""
        one = self._bundle(weights, rest, batch, workspace, self.accumulate)
        norm = drest = None
        if self.norms.needed_first:
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

        def visit(carry: Any, i: Any, slabs: list[Any], gradients: Any) -> Any:
            square, slots, workspace, small = carry
            own = self.norms.square(gradients)
            found = jnp.sqrt(own) if norm is None else norm
            workspace = workspace.zero_accumulators().write(
                self.norms.scaled(gradients, found)
            )
            gradients = [x[None] for x in jax.tree.leaves(workspace.gradients)]
            small = self.applied.collect(small, gradients, i)
            slots, new = self.applied.layer(slots, slabs, gradients, i)
            return (square + own, slots, workspace, small), new

        start = (
            self.norms.zero,
            self.applied.slots,
            workspace,
            self.applied.collector(workspace.gradients, weights.length),
        )
        (square, slots, workspace, small), stacks, back = one.backward(visit, start)
        if norm is None:
            drest = one.rest_gradients(back)
            own = self.norms.square(drest)
            norm = jnp.sqrt(square + own)
            drest = self.norms.scaled(drest, jnp.sqrt(own))
        else:
            drest = self.norms.scaled(drest, norm)
        output = LayerwiseOutput(one.loss, one.metrics, norm)
        return stacks, slots, small, drest, workspace, output

    def _from_host(
        self, weights: Weights, rest: Any, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, ...]:
        """Gradients leave for the host; updates follow when all are there."""
        host, structure = jax.tree.flatten(workspace.host)
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1

        def one_batch(carry: Any, given: Any) -> Any:
            stacks, host, workspace, drest = carry
            number, batch = given
            weights_now = Weights(jax.tree.unflatten(weights.structure, stacks))
            one = self._bundle(weights_now, rest, batch, workspace, False)

            def visit(carry: Any, i: Any, slabs: list[Any], gradients: Any) -> Any:
                square, host, workspace = carry
                workspace = workspace.zero_accumulators().write(gradients)
                new = []
                for old, g in zip(
                    host, jax.tree.leaves(workspace.gradients), strict=True
                ):
                    g = g[None] / count
                    if count > 1:
                        before = slab(old, i).astype(g.dtype)
                        g = g + jnp.where(number == 0, jnp.zeros_like(g), before)
                    new.append(g.astype(old.dtype))
                host = [put(old, g, i) for old, g in zip(host, new, strict=True)]
                return (square + self.norms.square(new), host, workspace), slabs

            start = (self.norms.zero, host, workspace)
            (square, host, workspace), stacks, back = one.backward(visit, start)
            made = jax.tree.map(lambda x: x / count, one.rest_gradients(back))
            if drest is not None:
                made = jax.tree.map(jnp.add, drest, made)
            return (stacks, host, workspace, made), (one.loss, one.metrics, square)

        if self.accumulate:
            zeros = jax.tree.map(jnp.zeros_like, rest)
            (stacks, host, workspace, drest), (losses, metrics, squares) = lax.scan(
                one_batch,
                (weights.stacks, host, workspace, zeros),
                (jnp.arange(count), batch),
            )
            loss, square = jnp.mean(losses), squares[-1]
        else:
            (stacks, host, workspace, drest), (loss, metrics, square) = one_batch(
                (weights.stacks, host, workspace, None), (jnp.int32(0), batch)
            )
        own = self.norms.square(drest)
        norm = jnp.sqrt(square + own)
        norm, stacks, host = lax.optimization_barrier((norm, stacks, host))

        def body(i: Any, following: Any, carry: Any) -> Any:
            del following  # the moments take longer than the weights, and come alone
            stacks, slots, small = carry
            slabs = weights.slabs(stacks, i)
            gradients = [
                slab(g, i).astype(x.dtype)
                for g, x in zip(host, jax.tree.leaves(workspace.gradients), strict=True)
            ]
            here = (
                norm
                if self.norms.clip == "global"
                else jnp.sqrt(self.norms.square(gradients))
            )
            gradients = self.norms.scaled(gradients, here)
            small = self.applied.collect(small, gradients, i)
            slots, new = self.applied.layer(slots, slabs, gradients, i)
            stacks = written(stacks, slabs, new, i)
            return stacks, slots, small

        small = self.applied.collector(workspace.gradients, weights.length)
        stacks, slots, small = upwards(
            weights.length, body, (stacks, self.applied.slots, small)
        )
        drest = self.norms.scaled(
            drest, norm if self.norms.clip == "global" else jnp.sqrt(own)
        )
        workspace = dataclasses.replace(
            workspace, host=jax.tree.unflatten(structure, host)
        )
        output = LayerwiseOutput(loss, metrics, norm)
        return stacks, slots, small, drest, workspace, output

    def _bundle(
        self,
        weights: Weights,
        rest: Any,
        batch: Any,
        workspace: GradientWorkspace,
        several: bool,
    ) -> "Bundle":
        return Bundle(self.model, weights, rest, batch, workspace, several)
