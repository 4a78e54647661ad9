"""A paged optimizer beside Optax's: the same numbers, or which values differ."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import Transformation
from paged_optax.cli.machine import typed_shapes
from paged_optax.compiling.jit_step import jit_step
from paged_optax.planning.page_plan import plan
from paged_optax.transform.paged import paged
from paged_optax.transform.planned_moments import Moment

PAGE_BYTES = 8192

_SHAPES = {
    "matrix": (509, 256),
    "narrow": (129, 65),
    "cube": (3, 5, 257),
    "vector": (5000,),
    "scalar": (),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The distance between two pytrees.

    Attributes:
      values: Number of values.
      differing: How many of them have other bits.
      ulps: Most floats that lie between two values.
      error: The worst error relative to the largest value of its leaf.
    """

    values: int
    differing: int
    ulps: int
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A paged optimizer beside the same one of Optax.

    Attributes:
      moments: The paged moments, as `plan` lists them.
      state: How far the states are apart.
      parameters: How far the parameters are apart.
    """

    moments: tuple[Moment, ...]
    state: Difference
    parameters: Difference

    @property
    def error(self) -> float:
        """The worst relative error."""
        return max(self.state.error, self.parameters.error)


def compare(inner: optax.GradientTransformation, steps: int) -> Comparison:
    """Trains twice from the same parameters, on the same gradients.

    One run is Optax's. The other pages several pages a leaf, the last one smaller.

    Args:
      inner: The transformation.
      steps: Steps to train.

    Returns:
      What differs.
    """
    generator = np.random.default_rng(0)
    draw = lambda: {
        key: generator.normal(size=shape).astype(np.float32)
        for key, shape in _SHAPES.items()
    }
    # Magnitudes are 1 to about 2, so that ulps are comparable. Near zero the smallest
    # rounding of an update is a thousand ulps of the parameter.
    start = {key: np.copysign(1 + np.abs(x) / 4, x) for key, x in draw().items()}
    gradients = [draw() for _ in range(steps)]
    tx = paged(inner, page_size=PAGE_BYTES, min_paged_size=0)
    wanted_params, wanted_state = _train(inner, start, gradients)
    params, state = _train(tx, start, gradients)
    return Comparison(
        plan(tx, start).moments,
        difference(state, wanted_state),
        difference(params, wanted_params),
    )


def _train(
    tx: Transformation,
    start: PyTree[ArrayLike],
    gradients: list[PyTree[ArrayLike]],
) -> tuple[PyTree[np.ndarray], PyTree[np.ndarray]]:
    params = jax.tree.map(jnp.array, start)
    state = tx.init(params)

    # Shapes that state where they live, as uncommitted arrays do not: without that,
    # jax 0.10.2 to 0.12.0.1 pair donated buffers with outputs in other memory.
    arguments = typed_shapes((params, state, params))
    update = jit_step(tx.update, *arguments, donate_argnums=(0, 1))
    # A program of its own, so that both runs add alike: within one program XLA
    # multiplies by the learning rate and adds in one rounding where it can fuse them.
    apply = jax.jit(optax.apply_updates, donate_argnums=0)
    for gradient in gradients:
        updates, state = update(jax.tree.map(jnp.array, gradient), state, params)
        params = apply(params, updates)
    return jax.tree.map(np.asarray, (params, state))


def difference(actual: PyTree[np.ndarray], wanted: PyTree[np.ndarray]) -> Difference:
    """The distance between the arrays of two trees.

    Args:
      actual: The one tree.
      wanted: The other tree, which errors are relative to.

    Raises:
      AssertionError: If their shapes or dtypes differ.
    """
    different, ulps, error = 0, 0, 0.0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(f"{x.dtype}{x.shape}, wanted {y.dtype}{y.shape}")
        steps = np.abs(_ordered(x) - _ordered(y))
        different += int(np.count_nonzero(steps))
        ulps = max(ulps, int(steps.max(initial=0)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        if steps.any():
            scale = np.abs(y).max(initial=np.finfo(np.float32).tiny)
            worst = float(np.abs(x - y).max() / scale)
            error = max(error, worst if math.isfinite(worst) else math.inf)
    values = sum(map(np.size, jax.tree.leaves(wanted)))
    return Difference(values, different, ulps, error)


def refuse_not_finite(tree: PyTree[np.ndarray]) -> None:
    """Refuses values that are equal and yet prove nothing.

    Raises:
      ArithmeticError: If a value is NaN or infinite.
    """
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree)):
        raise ArithmeticError("values are not finite")


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, one apart for neighbouring floats."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bits
    lowest = -(1 << (8 * x.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
