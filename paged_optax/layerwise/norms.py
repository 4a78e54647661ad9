"""How gradients are measured and clipped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.types import ArrayOrShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measure:
    """What is measured of gradients; stacked if it is that of several micro-batches.

    Attributes:
      square: The square of their norm.
      finite: Whether each of their values is finite, of which the square may overflow;
        None if nobody asks.
    """

    square: Float[Array, "..."]
    finite: Bool[Array, "..."] | None

    def __add__(self, other: "Measure") -> "Measure":
        both = self.finite, other.finite
        finite = None if both[0] is None or both[1] is None else both[0] & both[1]
        return Measure(self.square + other.square, finite)

    @property
    def norm(self) -> Float[Array, "..."]:
        """The norm."""
        return jnp.sqrt(self.square)


@dataclasses.dataclass(frozen=True)
class Norms:
    """How gradients are measured and clipped.

    Attributes:
      max_norm: The norm they are scaled down to, or None.
      clip: The norm of what.
      dtype: The dtype in which squares are added up. They overflow float32 at a norm
        of 2e19, and float16 at a norm of 256.
      tests_finite: Whether it is asked if all gradients are finite.
    """

    max_norm: float | int | None
    clip: str
    dtype: np.dtype
    tests_finite: bool = False

    @property
    def needed_first(self) -> bool:
        """Whether all gradients are needed before the first may be used."""
        return self.max_norm is not None and self.clip == "global"

    @property
    def by_layer(self) -> bool:
        """Whether each layer is clipped by its own norm, and the rest by its own."""
        return self.max_norm is not None and self.clip == "layer"

    @property
    def zero(self) -> Measure:
        """What is measured of no gradient."""
        finite = jnp.ones((), jnp.bool_) if self.tests_finite else None
        return Measure(jnp.zeros((), self.dtype), finite)

    def measured(self, tree: PyTree[Array]) -> Measure:
        """What is measured of a tree."""
        wide = lambda x: x.astype(np.promote_types(x.dtype, self.dtype))
        found = optax.tree.norm(jax.tree.map(wide, tree), squared=True)
        finite = None
        if self.tests_finite:
            each = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
            finite = functools.reduce(jnp.logical_and, each, jnp.ones((), jnp.bool_))
        return Measure(found.astype(self.dtype), finite)

    def scaled(self, gradients: PyTree[Array], norm: Float[Array, ""]) -> PyTree[Array]:
        """Optax's own formula, so that numbers agree to the last bit."""
        limit = self.max_norm
        if limit is None:
            return gradients
        return jax.tree.map(
            lambda g: jnp.where(norm < limit, g, g / norm.astype(g.dtype) * limit),
            gradients,
        )


def widened(dtype: DTypeLike) -> np.dtype:
    """The dtype that micro-batches are added up in."""
    return np.promote_types(dtype, np.float32)


def widest(*trees: PyTree[ArrayOrShape]) -> np.dtype:
    """The widest real dtype of any leaf: float32, or float64."""
    dtypes = [jax.typeof(x).dtype for x in jax.tree.leaves(trees)]
    return jnp.finfo(functools.reduce(np.promote_types, dtypes, np.float32)).dtype
