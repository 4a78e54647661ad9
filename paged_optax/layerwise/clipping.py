"""Gradient statistics, and clipping."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.layerwise.workspace import GradientWorkspace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientStats:
    """Gradient statistics; stacked over micro-batches when accumulating.

    Attributes:
      square: The square of the norm. It may overflow though all values are finite.
      finite: True if all values are finite; None if not computed.
    """

    square: Float[Array, "..."]
    finite: Bool[Array, "..."] | None

    def __add__(self, other: "GradientStats") -> "GradientStats":
        both = self.finite, other.finite
        finite = None if both[0] is None or both[1] is None else both[0] & both[1]
        return GradientStats(self.square + other.square, finite)

    @property
    def norm(self) -> Float[Array, "..."]:
        """The norm."""
        return jnp.sqrt(self.square)


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Measures and clips gradients.

    Attributes:
      max_norm: The largest norm after clipping, or None.
      clip: `"global"` or `"layer"`; see `layerwise_step`.
      dtype: The dtype of the sum of squares. Squares overflow float32 at a norm of
        2e19, and float16 at a norm of 256.
      tests_finite: If true, statistics include `finite`.
    """

    max_norm: float | int | None
    clip: str
    dtype: np.dtype
    tests_finite: bool = False

    @property
    def needed_first(self) -> bool:
        """True if the norm of all gradients is needed before the first update."""
        return self.max_norm is not None and self.clip == "global"

    @property
    def by_layer(self) -> bool:
        """True if each layer is clipped by its own norm."""
        return self.max_norm is not None and self.clip == "layer"

    @property
    def zero(self) -> GradientStats:
        """The statistics of an empty tree."""
        finite = jnp.ones((), jnp.bool_) if self.tests_finite else None
        return GradientStats(jnp.zeros((), self.dtype), finite)

    def measure(self, tree: PyTree[Array]) -> GradientStats:
        """Measures a tree."""
        wide = lambda x: x.astype(np.promote_types(x.dtype, self.dtype))
        square = optax.tree.norm(jax.tree.map(wide, tree), squared=True)
        finite = None
        if self.tests_finite:
            item = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
            finite = functools.reduce(jnp.logical_and, item, jnp.ones((), jnp.bool_))
        return GradientStats(square.astype(self.dtype), finite)

    def clipped(
        self, gradients: PyTree[Array], norm: Float[Array, ""]
    ) -> PyTree[Array]:
        """Scales gradients down to `max_norm`, given their norm."""
        limit = self.max_norm
        if limit is None:
            return gradients

        def scaled(g: Array) -> Array:
            # Optax's formula, so that float32 agrees to the last bit. In float16 a norm
            # above 65,504 would be infinite, and all gradients zero.
            wide = np.promote_types(g.dtype, norm.dtype)
            clipped = g.astype(wide) / norm.astype(wide) * float(limit)
            return jnp.where(norm < float(limit), g, clipped.astype(g.dtype))

        return jax.tree.map(scaled, gradients)


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of sums over micro-batches."""
    return np.promote_types(dtype, np.float32)


def scaled(tree: PyTree[Array], by: Float[Array, ""]) -> PyTree[Array]:
    """Multiplies a tree by a number, in float32 or wider."""

    def multiply(x: Array) -> Array:
        wide = sum_dtype(x.dtype)  # the inverse of a small weight overflows float16
        return (x.astype(wide) * by.astype(wide)).astype(x.dtype)

    return jax.tree.map(multiply, tree)


def gradient_dtypes(workspace: GradientWorkspace) -> list[np.dtype]:
    """The dtypes of a layer's gradients."""
    return [x.dtype for x in jax.tree.leaves(workspace.gradients)]
