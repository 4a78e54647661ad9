"""Whether paged optimizers compute Optax's numbers on this backend.

Every transformation runs twice from the same parameters, on the same gradients:
as Optax has it, and paged with several pages a leaf, the last one smaller.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax

import paged_optax as po

SECTION = "numbers"
PAGE_BYTES = 8192

_SHAPES = {
    "matrix": (509, 256),
    "narrow": (129, 65),
    "cube": (3, 5, 257),
    "vector": (5000,),
    "scalar": (),
}

# Relative to a leaf's largest value. Rows that went to a wrong place are wrong by
# about 1; one compiler's fused multiply-add is another's two roundings.
_ELEMENTWISE, _WITHIN_LEAF = 1e-5, 1e-2


def _optimizers() -> dict[str, tuple[optax.GradientTransformation, float]]:
    """Each with the difference at which it is wrong."""
    schedule = optax.linear_schedule(1e-3, 1e-4, 10)
    return {
        "adamw": (optax.adamw(schedule, weight_decay=0.1), _ELEMENTWISE),
        "lamb": (optax.lamb(1e-3), _WITHIN_LEAF),
        "adamw, bfloat16 mu": (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), 1e-2),
        "nadamw": (optax.nadamw(1e-3), _ELEMENTWISE),
        "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), _ELEMENTWISE),
        "muon": (optax.contrib.muon(1e-3), _WITHIN_LEAF),
    }


def check(quick: bool) -> list[dict[str, Any]]:
    """One row an optimizer: values, bit differences, worst errors, a verdict."""
    optimizers = list(_optimizers().items())[: 2 if quick else None]
    steps = 3 if quick else 10
    return [_compare(name, *rest, steps) for name, rest in optimizers]


def _compare(
    name: str, inner: optax.GradientTransformation, tolerance: float, steps: int
) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    draw = lambda: {
        key: generator.normal(size=shape).astype(np.float32)
        for key, shape in _SHAPES.items()
    }
    # Of magnitude 1 to 2 or so, that an ulp is an ulp: near zero the least rounding
    # of an update is a thousand of the parameter's.
    start = {key: np.copysign(1 + np.abs(x) / 4, x) for key, x in draw().items()}
    gradients = [draw() for _ in range(steps)]
    paged = po.paged(inner, page_size=PAGE_BYTES, min_paged_size=0)
    plan = po.plan(paged, start)
    cut = [x for x in plan.moments if x.on_host and x.pages > 1]
    wanted_params, wanted_state = _train(inner, start, gradients)
    params, state = _train(paged, start, gradients)
    state_bits, _, state_error = _difference(state, wanted_state)
    param_bits, ulps, param_error = _difference(params, wanted_params)
    right = max(state_error, param_error) <= tolerance
    return {
        "section": SECTION,
        "name": name,
        "steps": steps,
        "most_pages_a_leaf": max((x.pages for x in plan.moments), default=0),
        "leaves_in_pages": len(cut),
        "leaves_with_a_smaller_last_page": sum(
            x.pages * x.page_bytes != x.bytes for x in cut
        ),
        "state_values": sum(map(np.size, jax.tree.leaves(wanted_state))),
        "state_values_that_differ": state_bits,
        "parameters": sum(map(np.size, jax.tree.leaves(wanted_params))),
        "parameters_that_differ": param_bits,
        "most_ulps_between_parameters": ulps,
        "worst_relative_error": max(state_error, param_error),
        "tolerance": tolerance,
        "right": bool(right),
    }


def _train(
    tx: optax.GradientTransformation, start: Any, gradients: list[Any]
) -> tuple[Any, Any]:
    params = jax.tree.map(jnp.array, start)
    state = tx.init(params)

    # Shapes that state where they live, as uncommitted arrays do not: without that,
    # jax 0.10.2 to 0.12.0.1 pair donated buffers with outputs in other memory.
    arguments = machine.typed((params, state, params))
    update = po.jit_step(tx.update, *arguments, donate_argnums=(0, 1))
    # Apart, so that both are added alike: within one program XLA multiplies by the
    # learning rate and adds in one rounding where nothing stands between.
    apply = jax.jit(optax.apply_updates, donate_argnums=0)
    for gradient in gradients:
        updates, state = update(jax.tree.map(jnp.array, gradient), state, params)
        params = apply(params, updates)
    return jax.tree.map(np.asarray, (params, state))


def _difference(found: Any, wanted: Any) -> tuple[int, int, float]:
    """Values whose bits differ, most ulps, and the worst error relative to a leaf."""
    different, ulps, error = 0, 0, 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(
                f"{x.dtype}{x.shape} where Optax has {y.dtype}{y.shape}"
            )
        steps = np.abs(_ordered(x) - _ordered(y))
        different += int(np.count_nonzero(steps))
        ulps = max(ulps, int(steps.max(initial=0)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        if steps.any():
            scale = np.abs(y).max(initial=np.finfo(np.float32).tiny)
            worst = float(np.abs(x - y).max() / scale)
            error = max(error, worst if math.isfinite(worst) else math.inf)
    return different, ulps, error


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats: neighbours are one apart."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bits
    lowest = -(1 << (8 * x.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
