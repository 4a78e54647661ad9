"""A step that begins with the update that the step before left.

The norm to clip by is known when all gradients are made. Their update then goes beside
the next forward pass, in its order: Yue, Yin and Qian, `GreedySnake
<https://arxiv.org/abs/2512.17570>`_, 2025.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.ahead import Ahead
from paged_optax.layerwise.backward import Bundle
from paged_optax.layerwise.by_host import ByHost, filled, gathering
from paged_optax.layerwise.loss import mean_of
from paged_optax.layerwise.model import Forward
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace, Pending


class _Begun(NamedTuple):
    """A model whose parameters beside the large ones of the layers are updated.

    Attributes:
      weights: The layers'.
      others: The others.
      leaves: Those of the state; see `Applied.rest`.
    """

    weights: Weights
    others: list[Array]
    leaves: list[Stored]


class Deferred(ByHost):
    """One step, being traced, that leaves its update for the next one."""

    def __call__(
        self, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Applies what is pending, and runs the step but for its update."""
        begun = self._begun(workspace)
        if self.applied.overlaps:
            forward, slots, others = self._beside_forward(begun, batch, workspace)
            rest = self._rest(forward.stacks, others)
            zero = self.norms.zero.square
            one = Bundle(
                self.model, begun.weights, rest, batch, workspace, False, zero, forward
            )
            start = gathering(one.stacks, workspace, None, zero)
            gathered, measured = self._sent(one, 1, start, jnp.int32(0))
        else:
            weights, others, slots = self._alone(begun, workspace)
            rest = self._rest(weights.stacks, others)
            gathered, measured = self._gathered(weights, rest, workspace, batch)
        drest = gathered.drest
        measure = measured.layers + self.norms.measured(drest)
        norm, waits = measure.norm, jnp.asarray(self.guard.passes(measure))
        left = Pending(waits, norm, self.norms.scaled(drest, norm))
        workspace = dataclasses.replace(
            filled(workspace, gathered),
            pending=jax.tree.map(
                lambda new, old: new.astype(old.dtype), left, workspace.pending
            ),
        )
        state = self.applied.state_of(slots, begun.leaves)
        state = self.guard.around(state, measure)
        output = LayerwiseOutput(mean_of(measured.loss), measured.metrics, norm)
        return self._params(gathered.stacks, others), state, workspace, output

    def finish(
        self, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        """Applies what is pending."""
        begun, pending = self._begun(workspace), _pending(workspace)
        weights, others, slots = self._alone(begun, workspace)
        state = self.applied.state_of(slots, begun.leaves)
        state = self.guard.around(state, None)
        pending = pending._replace(waits=jnp.zeros((), jnp.bool_))
        workspace = dataclasses.replace(workspace, pending=pending)
        return self._params(weights.stacks, others), state, workspace

    def _begun(self, workspace: GradientWorkspace) -> _Begun:
        """Updates all but the large parameters of the layers."""
        weights, pending, applied = self._weights(), _pending(workspace), self.applied
        small = [
            None if slabbed else self.norms.scaled(g.astype(x.dtype), pending.norm)
            for g, x, slabbed in zip(
                jax.tree.leaves(workspace.host),
                jax.tree.leaves(workspace.gradients),
                applied.of_layers(applied.slabbed),
                strict=True,
            )
        ]
        weights.stacks, others, leaves = applied.rest(
            weights.stacks,
            small,
            self.parts.others(self.parts.rest),
            self.parts.others(pending.rest),
        )
        return _Begun(weights, others, leaves)

    def _rest(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """The other parameters, by name."""
        whole = self.parts.joined(stacks, others)
        params = jax.tree.unflatten(self.parts.structure, whole)
        return Parts.of(params, self.parts.key).rest

    def _alone(
        self, begun: _Begun, workspace: GradientWorkspace
    ) -> tuple[Weights, list[Array], list[Stored]]:
        """Updates the layers, with nothing beside them."""
        weights, host = begun.weights, jax.tree.leaves(workspace.host)
        norm = _pending(workspace).norm
        weights.stacks, slots, _ = self._updated(
            self.applied, weights, host, workspace, norm
        )
        return weights, begun.others, slots

    def _beside_forward(
        self, begun: _Begun, batch: PyTree, workspace: GradientWorkspace
    ) -> tuple[Forward, list[Stored], list[Array]]:
        """Updates each layer while the layer before runs forward."""
        weights, others, _ = begun
        pending, applied = _pending(workspace), self.applied
        host = jax.tree.leaves(workspace.host)
        entered = self.model.entered(
            weights,
            self._rest(weights.stacks, others),
            batch,
            lambda function, *arguments: function(*arguments),
        )
        dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]

        def clipped(n: int, g: Array) -> Array:
            if n >= len(dtypes):  # of another parameter, and clipped already
                return g
            return self.norms.scaled(g.astype(dtypes[n]), pending.norm)

        joined = lambda others: self.parts.joined(weights.stacks, others)
        gradients = joined(self.parts.others(pending.rest))
        forward, slots, made = Ahead(
            applied,
            [*host, *(gradients[n] for n in applied.early)],
            clipped,
            weights.frozen,
        ).forward(entered, weights.stacks, [joined(others)[n] for n in applied.early])
        early = dict(zip(applied.early, made, strict=True))
        others = [
            early.get(n, x)
            for n, x in enumerate(joined(others))
            if not self.parts.in_layers[n]
        ]
        return forward, slots, others


def _pending(workspace: GradientWorkspace) -> Pending:
    assert isinstance(workspace.pending, Pending)  # or the step would not be deferred
    return workspace.pending
