"""Compares with Optax in a process where XLA:CPU rounds one way only.

Two passes make XLA:CPU round one formula in two ways, by what it is fused with: the
contraction of `a * b + c` into a fused multiply-add, and the algebraic simplifier,
which turns `(m / c) / (sqrt(n) + e)` into one division where it sees both. A page
loop is fused otherwise than a whole tree, so each moves Optax's numbers by an ulp.
With both switched off every number must be Optax's, bit for bit.

`python tests/helpers/exact.py` answers with the distances of the cases it is asked for,
see `apart`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import paged_optax as po
from helpers import apart, extreme, reference
from helpers.fuzz_parts import scale_by_value

FLAGS = "--xla_cpu_max_isa=AVX --xla_disable_hlo_passes=algsimp"

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def _partition(matrix: Any, vector: Any) -> Any:
    return optax.partition({"matrix": matrix, "vector": vector}, labels)


def slow_copies() -> optax.GradientTransformation:
    """Keeps a slow copy of the parameters, as `optax.lookahead` does."""

    def init(params):
        return jax.tree.map(jnp.asarray, params), jnp.zeros((), jnp.int32)

    def update(updates, state, params):
        slow, count = state
        slow = jax.tree.map(lambda x, y: x + 0.1 * (y - x), slow, params)
        updates = jax.tree.map(
            lambda u, x, y: -0.01 * u + 0.1 * (x - y), updates, slow, params
        )
        return updates, (slow, count + 1)

    return optax.GradientTransformation(init, update)


_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 12)

#: Transformations to build twice: with `paged` for `page`, and with nothing.
COMPOSITIONS: dict[str, Callable[[Wrap], optax.GradientTransformation]] = {
    "schedule": lambda page: page(optax.adamw(_SCHEDULE)),
    "mu_dtype": lambda page: page(optax.adamw(1e-2, mu_dtype=jnp.bfloat16)),
    "decay mask": lambda page: page(optax.adamw(1e-2, mask=matrices)),
    "inject inside": lambda page: page(optax.inject_hyperparams(optax.adamw)(1e-2)),
    "inject a schedule inside": lambda page: page(
        optax.inject_hyperparams(optax.adamw)(_SCHEDULE)
    ),
    "inject around": lambda page: optax.inject_hyperparams(
        lambda learning_rate: page(optax.adamw(learning_rate))
    )(_SCHEDULE),
    "masked inside": lambda page: page(optax.masked(optax.adam(1e-2), matrices)),
    "masked around": lambda page: optax.masked(page(optax.adam(1e-2)), matrices),
    "partition inside": lambda page: page(
        _partition(optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9))
    ),
    "partition around": lambda page: _partition(
        page(optax.adam(1e-2)), page(optax.lion(1e-3))
    ),
    "chain around": lambda page: optax.chain(
        optax.clip_by_global_norm(1.0), page(optax.adamw(1e-2))
    ),
    "chain inside": lambda page: page(
        optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1e-2))
    ),
    "centered": lambda page: page(optax.rmsprop(1e-2, centered=True, momentum=0.9)),
    "flatten inside": lambda page: page(optax.flatten(optax.adamw(1e-2))),
    "flatten around": lambda page: optax.flatten(page(optax.adamw(1e-2))),
    "plateau in a chain": lambda page: optax.chain(
        page(optax.adam(1e-2)), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "plateau inside": lambda page: page(
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    ),
    "extra argument": lambda page: page(scale_by_value()),
    "schedule free": lambda page: page(optax.contrib.schedule_free_adamw(1e-2)),
    "slow copies": lambda page: page(slow_copies()),
    "noise": lambda page: page(
        optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(0)), optax.adam(1e-2))
    ),
    "noisy sgd": lambda page: page(
        optax.chain(optax.noisy_sgd(1e-2, key=0), optax.trace(0.9))
    ),
    "multi steps around": lambda page: optax.MultiSteps(
        page(optax.adam(1e-2)), 3
    ).gradient_transformation(),
    "apply if finite around": lambda page: optax.apply_if_finite(
        page(optax.adam(1e-2)), 3
    ),
}

#: Those whose `update` needs `value`.
WITH_VALUE = ("plateau in a chain", "plateau inside", "extra argument")


def run(name: str) -> dict[str, dict[str, float]]:
    """The distances of an alias or a composition from Optax."""
    if (alias := name.removeprefix("extreme ")) != name:
        return extreme.compare_with_optax(alias)
    if name in reference.ALIASES:
        return reference.compare_alias(name, reference.arrays())
    shapes = {x: reference.SHAPES[x] for x in ("scalar", "seven", "odd", "stack")}
    build = COMPOSITIONS[name]
    wanted = build(lambda inner: inner)
    paged = build(lambda inner: po.paged(inner, **reference.SMALL_PAGES))
    extra_args = {"value": jnp.float32(1.5)} if name in WITH_VALUE else {}
    return reference.compare(
        wanted, paged, reference.arrays(shapes=shapes), count=8, **extra_args
    )


if __name__ == "__main__":
    apart.answer(run)
