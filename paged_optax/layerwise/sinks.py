"""Sinks of the layers' gradients: the workspace, or host memory for all layers.

A sink receives each layer's gradients during the backward pass, and measures them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, PyTree

from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.clipping import Clipping, GradientStats
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.slices import LayerIndex, read_slice
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


def gradient_dtypes(workspace: GradientWorkspace) -> list[np.dtype]:
    """The dtypes of a layer's gradients."""
    return [x.dtype for x in jax.tree.leaves(workspace.gradients)]
