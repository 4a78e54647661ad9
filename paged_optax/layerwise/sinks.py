"""Where a backward pass puts a layer's gradients.

`WorkspaceSink` updates the layer by them at once. `HostSink` adds them to the gradients
of all layers, which `HostGradients` reads for later updates.
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
from paged_optax.layerwise.clipping import Clipping, GradientStats, scaled, sum_dtype
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layered_state import store_small
from paged_optax.layerwise.slices import LayerIndex, read_slice, write_slice
from paged_optax.layerwise.workspace import GradientWorkspace


class WorkspaceCarry(NamedTuple):
    """Loop carry of a backward pass; `small` has all layers' small gradients."""

    measure: GradientStats
    moments: list[Stored]
    workspace: GradientWorkspace
    small: list[Array | None]


@dataclasses.dataclass(frozen=True)
class WorkspaceSink:
    """Updates each layer by its clipped gradients in the workspace.

    `norm` is that of all gradients; None if layers are clipped by their own, or not at
    all. `chunked` has the gradients of the
    parameters that are updated in chunks.
    """

    optimizer: LayerOptimizer
    clipping: Clipping
    norm: Float[Array, ""] | None
    chunked: Sequence[Array]

    def visit(
        self,
        carry: WorkspaceCarry,
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[WorkspaceCarry, list[Array]]:
        """Stores layer i's gradients, and updates the layer by them."""
        carry = self.store(carry, i, gradients)
        by = self.read(carry, i)
        moments, new = self.optimizer.update_layer(carry.moments, slices, by, i)
        return carry._replace(moments=moments), new

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
        return WorkspaceCarry(carry.measure + measure, carry.moments, workspace, small)

    def read(self, carry: WorkspaceCarry, i: LayerIndex) -> list[Array]:
        """Reads layer i's gradients, and chunk i of the chunked ones."""
        length = self.optimizer.layered.length
        chunks = [read_slice(x, i, length) for x in self.chunked]
        return _slices(carry.workspace) + chunks


def _slices(workspace: GradientWorkspace) -> list[Array]:
    return [x[None] for x in jax.tree.leaves(workspace.gradients)]


# The statistics so far, the gradients of all layers, and the workspace without them.
_HostCarry = tuple[GradientStats, list[Array], GradientWorkspace]


@dataclasses.dataclass(frozen=True)
class HostSink:
    """Adds one micro-batch's gradients, layer by layer, to those of all layers.

    If there is one micro-batch `only`, it overwrites them. `scale` is the factor of
    earlier sums.
    """

    clipping: Clipping
    index: Int[Array, ""]
    only: bool
    divisor: int
    scale: Float[Array, ""] | None

    def add(self, earlier: Array, g: Array) -> Array:
        """Adds a gradient to an earlier sum, in float32 or wider."""
        if self.scale is None and earlier.dtype == g.dtype:
            return earlier + g
        wide = sum_dtype(np.promote_types(earlier.dtype, g.dtype))
        before = earlier.astype(wide)
        before = before if self.scale is None else scaled(before, self.scale)
        return (g.astype(wide) + before).astype(earlier.dtype)

    def visit(
        self,
        carry: _HostCarry,
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[_HostCarry, list[Array]]:
        """Measures the sums too, and leaves a layer's gradients in the workspace."""
        measure, stacks, workspace = carry
        workspace = workspace.zero_accumulators().write(gradients)

        def summed(stack: Array, g: Array) -> Array:
            if self.only:
                return (g[None] / self.divisor).astype(stack.dtype)
            old = read_slice(stack, i)
            # At the first micro-batch it still is the sum of the previous step.
            old = jnp.where(self.index == 0, jnp.zeros_like(old), old)
            return self.add(old, g[None] / self.divisor)

        new = list(map(summed, stacks, jax.tree.leaves(workspace.gradients)))
        stacks = [write_slice(old, g, i) for old, g in zip(stacks, new, strict=True)]
        return (measure + self.clipping.measure(new), stacks, workspace), slices

    def visit_on_device(
        self,
        stacks: list[Array],
        i: LayerIndex,
        slices: list[Array],
        gradients: PyTree[Array],
    ) -> tuple[list[Array], list[Array]]:
        """Adds to stacks in device memory, which begin with zeros."""
        # Nothing else reads a gradient, and the sum has its shape: XLA:GPU then adds in
        # the kernel of the product. A layer of Llama-3-8B takes 0.2 ms less for each
        # micro-batch (H200, by `tests/helpers/step_model.py`).
        new = [
            self.add(read_slice(old, i)[0], g / self.divisor)
            for old, g in zip(stacks, jax.tree.leaves(gradients), strict=True)
        ]
        pairs = zip(stacks, new, strict=True)
        return [write_slice(old, g[None], i) for old, g in pairs], slices


@dataclasses.dataclass(frozen=True)
class HostGradients:
    """The gradients of all layers in host memory, clipped when they are read.

    `dtypes` has the dtypes to update by. Parameters outside the layers have none.
    """

    stacks: Sequence[Array]
    dtypes: Sequence[np.dtype]
    clipping: Clipping
    norm: Float[Array, ""]

    def read(self, i: LayerIndex) -> list[Array]:
        """Fetches layer i's gradients."""
        pairs = zip(self.stacks, self.dtypes, strict=True)
        gradients = [read_slice(g, i).astype(dtype) for g, dtype in pairs]
        clipping = self.clipping
        norm = clipping.measure(gradients).norm if clipping.by_layer else self.norm
        return clipping.clipped(gradients, norm)

    def clip_leaf(self, n: int, g: Array) -> Array:
        """Clips a gradient of leaf n; outside the layers it is clipped already."""
        if n >= len(self.dtypes):
            return g
        return self.clipping.clipped(g.astype(self.dtypes[n]), self.norm)
