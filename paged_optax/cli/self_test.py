"""Compares a paged optimizer with its Optax counterpart."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import Transformation
from paged_optax.compiling.jit_step import jit_step
from paged_optax.planning.page_plan import plan
from paged_optax.transform.paged import paged
from paged_optax.transform.planned_moments import Moment

_SHAPES = (509, 256), (129, 65), (3, 5, 257), (5000,), ()


@dataclasses.dataclass(frozen=True)
class Difference:
    """Distance between two pytrees."""

    values: int
    differing: int  # values with different bits
    ulps: int  # largest number of floats between two values
    error: float  # largest error relative to the largest value of the leaf

    def __str__(self) -> str:
        if self.differing == 0:
            return "Optax's bit for bit"
        differing = f"{self.differing} of {self.values} values differ"
        return f"within {self.ulps} ulp ({differing})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Distance of a paged optimizer from its Optax counterpart."""

    moments: tuple[Moment, ...]  # as in `plan`
    state: Difference
    parameters: Difference

    @property
    def error(self) -> float:
        """Largest relative error."""
        return max(self.state.error, self.parameters.error)


def compare_with_optax(
    inner: optax.GradientTransformation, steps: int, device_budget: int = 0
) -> Comparison:
    """Trains with Optax and paged, from the same parameters on the same gradients.

    Leaves have several pages and a smaller last page.
    """
    generator = np.random.default_rng(0)
    draw = lambda: [generator.normal(size=x).astype(np.float32) for x in _SHAPES]
    # Magnitudes of 1 to about 2 make ulps comparable.
    start = [np.copysign(1 + np.abs(x) / 4, x) for x in draw()]
    gradients = [draw() for _ in range(steps)]
    tx = paged(inner, page_size=8192, min_paged_size=0, device_budget=device_budget)
    optax_params, optax_state = _train(inner, start, gradients)
    params, state = _train(tx, start, gradients)
    return Comparison(
        plan(tx, start).moments,
        difference(state, optax_state),
        difference(params, optax_params),
    )


def _train(
    tx: Transformation, start: PyTree[ArrayLike], gradients: list[PyTree[ArrayLike]]
) -> tuple[PyTree[np.ndarray], PyTree[np.ndarray]]:
    params = jax.tree.map(jnp.array, start)
    state = tx.init(params)
    update = jit_step(tx.update, params, state, params, donate_argnums=(0, 1))
    # In one program with the update XLA may fuse the sum into one rounding.
    apply = jax.jit(optax.apply_updates, donate_argnums=0)
    for gradient in gradients:
        updates, state = update(jax.tree.map(jnp.array, gradient), state, params)
        params = apply(params, updates)
    return jax.tree.map(np.asarray, (params, state))


def difference(actual: PyTree[np.ndarray], expected: PyTree[np.ndarray]) -> Difference:
    """Distance between two pytrees of arrays."""
    differing, ulps, error = 0, 0, 0.0
    compared = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for x, y in compared:
        steps = np.abs(_ordered(x) - _ordered(y))
        differing += int(np.count_nonzero(steps))
        ulps = max(ulps, int(steps.max(initial=0)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        if steps.any():
            scale = np.abs(y).max(initial=np.finfo(np.float32).tiny)
            worst = float(np.abs(x - y).max() / scale)
            error = max(error, worst if math.isfinite(worst) else math.inf)
    values = sum(map(np.size, jax.tree.leaves(expected)))
    return Difference(values, differing, ulps, error)


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats; neighboring floats differ by one."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bits
    # Bit patterns of negative floats are in the reverse order.
    lowest = -(1 << (8 * x.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
