"""A step whose sweeps over the layers update each one as its gradients are made."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import Array, lax
from jaxtyping import Float, PyTree

from paged_optax.backend.memory import DEVICE, on_host
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.backward import Bundle
from paged_optax.layerwise.beside import Beside
from paged_optax.layerwise.guard import Guard
from paged_optax.layerwise.hosted import returned
from paged_optax.layerwise.layer_update import Applied
from paged_optax.layerwise.loss import mean_of
from paged_optax.layerwise.model import Model, Rest
from paged_optax.layerwise.norms import Measure, Norms
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.slices import (
    LayerIndex,
    goes_in_slabs,
    slab,
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
      measure: What is measured of all gradients.
    """

    stacks: list[Array]
    slots: list[Stored]
    small: list[Array | None]
    drest: Rest
    workspace: GradientWorkspace
    output: LayerwiseOutput
    measure: Measure


class Visited(NamedTuple):
    """What goes from layer to layer where each one's update follows its gradients.

    Attributes:
      measure: What is measured of the layers' gradients so far.
      slots: The state's stacks.
      workspace: The workspace.
      small: The collected gradients of the small leaves.
    """

    measure: Measure
    slots: list[Stored]
    workspace: GradientWorkspace
    small: list[Array | None]


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """One step, being traced."""

    model: Model
    parts: Parts
    applied: Applied
    norms: Norms
    accumulate: bool
    guard: Guard

    def __call__(
        self, workspace: GradientWorkspace, batch: PyTree
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Runs the step."""
        parts = self.parts
        weights = self._weights()
        stacks, slots, small, drest, workspace, output, measure = self._swept(
            weights, parts.rest, workspace, batch
        )
        applied = self.applied.only_if(self.guard.passes(measure))
        count = len(weights.stacks)
        early = dict(zip(self.applied.early, stacks[count:], strict=True))
        others = [
            early.get(n, x)
            for n, x in enumerate(self.applied.params)
            if not parts.in_layers[n]
        ]
        stacks, others, leaves = applied.rest(
            stacks[:count], small, others, parts.others(drest)
        )
        state = self.guard.around(applied.state_of(slots, leaves), measure)
        return self._params(stacks, others), state, workspace, output

    def _weights(self) -> Weights:
        """The layers' parameters, where layers can be taken out of them.

        Rows of matrices that live on the host are no whole tiles on a TPU.
        """
        place = lambda x: (
            x if goes_in_slabs(x) or not on_host(x) else jax.device_put(x, DEVICE)
        )
        frozen = self.model.frozen
        both = self.parts.layers, frozen.layers if frozen else None
        return Weights(*jax.tree.map(place, both))

    def _params(self, stacks: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """All parameters, each where it came from."""
        stacks = returned(list(stacks), jax.tree.leaves(self.parts.layers))
        parts = self.parts
        return jax.tree.unflatten(parts.structure, parts.joined(stacks, others))

    def _swept(
        self, weights: Weights, rest: Rest, workspace: GradientWorkspace, batch: PyTree
    ) -> Swept:
        """Each layer's update follows its gradients."""
        zero, several = self.norms.zero, self.accumulate
        one = Bundle(self.model, weights, rest, batch, workspace, several, zero.square)
        drest: Rest | None = None
        norm: Float[Array, ""] | None = None
        measure, applied = zero, self.applied
        if self.norms.needed_first:
            measure, norm, drest = self._measured_first(one)
            applied = applied.only_if(self.guard.passes(measure))

        def gradients_made(
            carry: Visited, i: LayerIndex, gradients: PyTree[Array]
        ) -> Visited:
            own = self.norms.measured(gradients)
            found = own.norm if norm is None else norm
            workspace = carry.workspace.zero_accumulators().write(
                self.norms.scaled(gradients, found)
            )
            made = [x[None] for x in jax.tree.leaves(workspace.gradients)]
            small = self.applied.collect(carry.small, made, i)
            return Visited(carry.measure + own, carry.slots, workspace, small)

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
            slots, new = applied.layer(carry.slots, slabs, gradients_of(carry, i), i)
            return carry._replace(slots=slots), new

        others = [self.applied.params[n] for n in early]
        start = Visited(
            zero,
            [] if self.applied.overlaps else self.applied.slots,
            workspace,
            self.applied.collector(workspace.gradients, length),
        )
        if self.applied.overlaps:
            (found, _, workspace, small), flow, back = one.beside(
                Beside(self.applied, weights.frozen),
                gradients_made,
                gradients_of,
                start,
                others,
            )
            slots, stacks = flow.slots, flow.stacks
        else:
            (found, slots, workspace, small), stacks, back = one.backward(visit, start)
        limit = norm
        if limit is None or drest is None:
            drest = one.rest_gradients(back)
            # Measured before the update overwrites them, or XLA copies them.
            own, drest = lax.optimization_barrier((self.norms.measured(drest), drest))
            measure, limit = found + own, own.norm
        clipped = self.norms.scaled(drest, limit)
        output = LayerwiseOutput(mean_of(one.loss), one.metrics, measure.norm)
        return Swept(stacks, slots, small, clipped, workspace, output, measure)

    def _measured_first(self, one: Bundle) -> tuple[Measure, Float[Array, ""], Rest]:
        """What is measured of all gradients, by a pass of its own.

        Returns:
          The measure; its norm, behind which the second pass is; and the gradients of
          the rest.
        """
        add = lambda measure, i, slabs, gradients: (
            measure + self.norms.measured(gradients),
            slabs,
        )
        measure, stacks, back = one.backward(add, self.norms.zero)
        drest = one.rest_gradients(back)
        measure = measure + self.norms.measured(drest)
        # The second pass is not to be taken for a part of the first.
        norm, stacks, drest, one.inputs = lax.optimization_barrier(
            (measure.norm, stacks, drest, one.inputs)
        )
        one.stacks = stacks
        return measure, norm, drest
