"""Gradients are measured and clipped; a step that is not finite is skipped whole."""

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
from paged_optax.step_skipping import IfFinite
from paged_optax.transform.context import Gate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientStats:
    """What is measured of gradients; stacked if it is that of several micro-batches.

    Attributes:
      square: The square of their norm.
      finite: Whether each of their values is finite, of which the square may overflow;
        None if nobody asks.
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
    def zero(self) -> GradientStats:
        """What is measured of no gradient."""
        finite = jnp.ones((), jnp.bool_) if self.tests_finite else None
        return GradientStats(jnp.zeros((), self.dtype), finite)

    def measure(self, tree: PyTree[Array]) -> GradientStats:
        """Measures a tree."""
        wide = lambda x: x.astype(np.promote_types(x.dtype, self.dtype))
        square = optax.tree.norm(jax.tree.map(wide, tree), squared=True)
        finite = None
        if self.tests_finite:
            each = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
            finite = functools.reduce(jnp.logical_and, each, jnp.ones((), jnp.bool_))
        return GradientStats(square.astype(self.dtype), finite)

    def clipped(
        self, gradients: PyTree[Array], norm: Float[Array, ""]
    ) -> PyTree[Array]:
        """Gradients clipped by their norm."""
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
    """The dtype that micro-batches are added up in."""
    return np.promote_types(dtype, np.float32)


def widest(*trees: PyTree[ArrayOrShape]) -> np.dtype:
    """The widest real dtype of any leaf: float32, or float64."""
    dtypes = [jax.typeof(x).dtype for x in jax.tree.leaves(trees)]
    return jnp.finfo(functools.reduce(np.promote_types, dtypes, np.float32)).dtype


@dataclasses.dataclass(frozen=True)
class Guard:
    """What an `apply_if_finite` around the whole transformation decides.

    It tests all gradients, and one layer's are there at a time. So the step tests them,
    and Optax's own code counts the errors.

    Attributes:
      tx: The transformation inside; without the wrapper, the whole.
      state: The state of `tx`.
      outer: The wrapper's state, or None.
      wrapper: The wrapper, or None.
    """

    tx: optax.GradientTransformation
    state: PyTree
    outer: PyTree = None
    wrapper: IfFinite | None = None

    @classmethod
    def of(cls, tx: optax.GradientTransformation, state: PyTree) -> "Guard":
        """Takes the wrapper off a transformation and its state.

        Raises:
          ValueError: If the state is not the wrapper's.
        """
        wrapper = wrapper_of(tx)
        if wrapper is None:
            return cls(tx, state)
        return cls(wrapper.inner, wrapper.inside(state), state, wrapper)

    def refuse_unknown(self, known: bool) -> None:
        """Refuses to update layers before all gradients are known."""
        if self.wrapper is not None and not known:
            raise ValueError(
                "tx is an apply_if_finite, whose `reduce_and` combines all gradients,"
                " and here each layer is updated before the next one's are there. They"
                " are all known first with a workspace of"
                " GradientWorkspace.allocate(..., host_dtype='float32');"
                " or with max_norm= (and clip='global'), at the price of a second"
                " backward pass."
            )

    def passes(self, measure: GradientStats) -> Gate:
        """Whether the update happens."""
        return True if self.wrapper is None else self._decided(measure)[0]

    def around(self, state: PyTree, measure: GradientStats | None) -> PyTree:
        """The whole state.

        Args:
          state: That of `tx`.
          measure: What is measured of the gradients; None if there are none.
        """
        if self.wrapper is None:
            return state
        outer = self.outer if measure is None else self._decided(measure)[1]
        return outer._replace(inner_state=state)

    def _decided(self, measure: GradientStats) -> tuple[Bool[Array, ""], PyTree]:
        assert self.wrapper is not None and measure.finite is not None
        return self.wrapper.decided(measure.finite, self.outer)


def wrapper_of(tx: optax.GradientTransformation) -> IfFinite | None:
    """The `apply_if_finite` that a transformation is; None if it is none."""
    wrapper = getattr(tx.update, "__self__", None)
    return wrapper if isinstance(wrapper, IfFinite) else None
