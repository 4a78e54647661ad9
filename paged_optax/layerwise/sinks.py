"""Sinks of the layers' gradients: the workspace, or host memory for all layers.

A sink receives each layer's gradients during the backward pass, and measures them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import Clipping, GradientStats, sum_dtype
from paged_optax.layerwise.forward import Rest
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.layerwise.workspace import GradientWorkspace


class WorkspaceCarry(NamedTuple):
    """Loop carry of a backward pass that updates each layer.

    Attributes:
      measure: The statistics of the layers' gradients so far.
      slots: The state's stacks.
      workspace: The workspace.
      small: The gradients of the small leaves, of all layers.
    """

    measure: GradientStats
    slots: list[Stored]
    workspace: GradientWorkspace
    small: list[Array | None]


@dataclasses.dataclass(frozen=True)
class WorkspaceSink:
    """Holds one layer's clipped gradients in the workspace.

    Attributes:
      clipping: How gradients are clipped.
      norm: The norm to clip by; None clips a layer by its own norm.
      chunked: The gradients of the parameters that are updated in chunks.
      length: The number of chunks.
    """

    clipping: Clipping
    norm: Float[Array, ""] | None
    chunked: Sequence[Array]
    length: int

    def store(
        self, carry: WorkspaceCarry, i: LayerIndex, gradients: PyTree[Array]
    ) -> WorkspaceCarry:
        """Measures and clips layer i's gradients, and writes them to the workspace."""
        measure = self.clipping.measure(gradients)
        norm = measure.norm if self.norm is None else self.norm
        workspace = carry.workspace.zero_accumulators().write(
            self.clipping.clipped(gradients, norm)
        )
        small = store_small(carry.small, _slices(workspace), i)
        return WorkspaceCarry(carry.measure + measure, carry.slots, workspace, small)

    def read(self, carry: WorkspaceCarry, i: LayerIndex) -> list[Array]:
        """Reads layer i's gradients, and chunk i of the chunked ones."""
        chunks = [read_slice(x, i, self.length) for x in self.chunked]
        return _slices(carry.workspace) + chunks


def _slices(workspace: GradientWorkspace) -> list[Array]:
    return [x[None] for x in jax.tree.leaves(workspace.gradients)]


#: Loop carry of a backward pass that writes gradients to host memory: the statistics so
#: far, the gradients of all layers, and the workspace without them.
HostCarry = tuple[GradientStats, list[Array], GradientWorkspace]


@dataclasses.dataclass(frozen=True)
class HostSink:
    """Adds a micro-batch's gradients to the sums in host memory.

    Attributes:
      clipping: How gradients are measured.
      count: The number of micro-batches.
      number: The number of this micro-batch.
      divisor: The divisor of the gradients.
      share: The factor of the preceding micro-batches' sum, for a weighted mean.
    """

    clipping: Clipping
    count: int
    number: Int[Array, ""]
    divisor: int
    share: Float[Array, ""] | None

    def store(
        self,
        carry: HostCarry,
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[HostCarry, list[Array]]:
        """Writes layer i's gradients. The layer's parameters stay as they are."""
        measure, stacks, workspace = carry
        workspace = workspace.zero_accumulators().write(gradients)
        # A single micro-batch overwrites, and fetches no earlier sum.
        new = [
            (g[None] / self.divisor).astype(old.dtype)
            if self.count == 1
            else self._added(read_slice(old, i), g[None] / self.divisor)
            for old, g in zip(stacks, jax.tree.leaves(workspace.gradients), strict=True)
        ]
        stacks = [write_slice(old, g, i) for old, g in zip(stacks, new, strict=True)]
        return (measure + self.clipping.measure(new), stacks, workspace), slices

    def _added(self, old: Array, g: Array) -> Array:
        wide = sum_dtype(np.promote_types(old.dtype, g.dtype))
        before = old.astype(wide)
        before = before if self.share is None else scaled(before, self.share)
        # At the first micro-batch `old` still is the sum of the previous step.
        before = jnp.where(self.number == 0, jnp.zeros_like(before), before)
        return (g.astype(wide) + before).astype(old.dtype)


@dataclasses.dataclass(frozen=True)
class HostGradients:
    """The gradients of all layers in host memory, clipped when they are read.

    Attributes:
      stacks: The gradients, stacked.
      dtypes: The dtypes to update by; parameters outside the layers have none.
      clipping: How gradients are clipped.
      norm: The global norm.
    """

    stacks: Sequence[Array]
    dtypes: Sequence[np.dtype]
    clipping: Clipping
    norm: Float[Array, ""]

    def read(self, i: LayerIndex) -> list[Array]:
        """Fetches layer i's gradients."""
        pairs = zip(self.stacks, self.dtypes, strict=True)
        gradients = [read_slice(g, i).astype(dtype) for g, dtype in pairs]
        by_all = self.clipping.clip == "global"
        norm = self.norm if by_all else self.clipping.measure(gradients).norm
        return self.clipping.clipped(gradients, norm)

    def clip_leaf(self, n: int, g: Array) -> Array:
        """Clips a gradient of leaf n; outside the layers it is clipped already."""
        if n >= len(self.dtypes):
            return g
        return self.clipping.clipped(g.astype(self.dtypes[n]), self.norm)


def scaled(tree: PyTree[Array], by: Float[Array, ""]) -> PyTree[Array]:
    """Multiplies a tree by a number, in float32 or wider."""

    def multiply(x: Array) -> Array:
        wide = sum_dtype(x.dtype)  # the inverse of a small weight overflows float16
        return (x.astype(wide) * by.astype(wide)).astype(x.dtype)

    return jax.tree.map(multiply, tree)


class BatchCarry(NamedTuple):
    """Loop carry over micro-batches.

    Attributes:
      stacks: The layers' parameters.
      host: The gradients of all layers, in host memory.
      workspace: The workspace without `host`.
      by_rest: The gradients of the other parameters; None before the only micro-batch.
      weight: The total weight so far; zero if losses have no weight.
    """

    stacks: list[Array]
    host: list[Array]
    workspace: GradientWorkspace
    by_rest: Rest | None
    weight: Float[Array, ""]

    @classmethod
    def first(
        cls,
        stacks: list[Array],
        workspace: GradientWorkspace,
        by_rest: Rest | None,
        weight: Float[Array, ""],
    ) -> "BatchCarry":
        """The carry before the first micro-batch."""
        host = jax.tree.leaves(workspace.host)
        # XLA would copy a buffer that a loop carries twice.
        bare = dataclasses.replace(workspace, host=None, pending=None)
        return cls(stacks, host, bare, by_rest, weight)

    def stored_in(self, workspace: GradientWorkspace) -> GradientWorkspace:
        """The workspace with the gradients of all micro-batches."""
        host = jax.tree.unflatten(jax.tree.structure(workspace.host), self.host)
        return dataclasses.replace(
            workspace, gradients=self.workspace.gradients, host=host
        )


def gradient_dtypes(workspace: GradientWorkspace) -> list[np.dtype]:
    """The dtypes of a layer's gradients."""
    return [x.dtype for x in jax.tree.leaves(workspace.gradients)]
