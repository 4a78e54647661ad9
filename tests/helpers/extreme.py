"""Gradients at the ends of the floats, paged and by plain Optax.

Each stream of gradients is a leaf of one tree, so that one program computes all of
them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from helpers.reference import ALIASES, compare

LEARNING_RATE = 1e-2
SHAPE = (16, 1024)
PAGES = {"page_size": "16KiB", "min_paged_size": "1B"}
STEPS = 12

_RANDOM = np.random.default_rng(0).normal(size=(STEPS, *SHAPE)).astype(np.float32)


def _one(number: int, value: float) -> np.ndarray:
    """Random numbers, and one other."""
    found = _RANDOM[number].copy()
    found[5, 77] = value
    return found


def _alone(number: int) -> np.ndarray:
    found = np.zeros(SHAPE, np.float32)
    found[5, 77] = 1.0 if number in (0, 7) else 0.0
    return found


#: By name, the gradients of a step. Those that stay finite, in moments of squares too:
FINITE: dict[str, Callable[[int], np.ndarray]] = {
    "all zero": lambda number: np.zeros(SHAPE, np.float32),
    "one nonzero": _alone,
    "1e-30": lambda number: 1e-30 * _RANDOM[number],
    "denormal": lambda number: np.float32(1e-42) * _RANDOM[number],
    "1e-15": lambda number: 1e-15 * _RANDOM[number],
    "1e15": lambda number: 1e15 * _RANDOM[number],
    "converging": lambda number: np.float32(10.0 ** (-4 * number)) * _RANDOM[number],
    "side by side": lambda number: (
        _RANDOM[number]
        * np.float32(10.0) ** (-(np.arange(SHAPE[1]) % 20)).astype(np.float32)
    ),
}
#: And those that do not.
OTHERS: dict[str, Callable[[int], np.ndarray]] = {
    "1e30": lambda number: 1e30 * _RANDOM[number],
    "one inf": lambda number: _one(number, np.inf),
    "one -inf": lambda number: _one(number, -np.inf),
    "one NaN": lambda number: _one(number, np.nan),
    "all NaN": lambda number: np.full(SHAPE, np.nan, np.float32),
    "NaN once": lambda number: _one(number, np.nan if number == 3 else 1.0),
}
STREAMS = FINITE | OTHERS


def gradients(streams: dict[str, Any], number: int) -> dict[str, jax.Array]:
    """Those of a step, of all streams."""
    with np.errstate(over="ignore", under="ignore"):
        return {name: jnp.asarray(make(number)) for name, make in streams.items()}


# -- beside Optax --------------------------------------------------------------------

#: Of float16: squares, sums and steps are more than it holds, or less.
HALVES = {"6e4": 6e4, "300": 300.0, "1": 1.0, "6e-8": 6e-8}


def mixed(number: int) -> dict[str, jax.Array]:
    """The gradients of a step, of all streams, and those of float16."""
    with np.errstate(all="ignore"):
        halves = {
            f"float16 {name}": jnp.asarray(x * np.sign(_RANDOM[number]), jnp.float16)
            for name, x in HALVES.items()
        }
    return gradients(STREAMS, number) | halves


def compare_with_optax(alias: str) -> dict[str, dict[str, float]]:
    """How far an alias is from Optax, see `reference.compare`; float16 overflows."""
    make, settings = ALIASES[alias]
    params = jax.tree.map(jnp.ones_like, mixed(0))
    paged = getattr(po, alias)(100.0, **settings, **PAGES)
    return compare(make(100.0, **settings), paged, params, 5, gradients=mixed)


# -- codecs -------------------------------------------------------------------------

#: The largest error over the largest magnitude of a block, signed and not, that
#: `tests/codecs/test_codecs.py` holds each codec to; of bfloat16, over each value.
BOUNDS = {
    "dynamic_int8": (0.008, 0.004),
    "dynamic_int4": (0.12, 0.12),
    "float8_e4m3": (0.036, 0.036),
    "bfloat16": (2**-8, 2**-8),
    "bfloat16_stochastic": (2**-7, 2**-7),
}
#: The least scale of a block, as in torchao: all less is rounded as if beside it.
LEAST = {"dynamic_int4": 1e-12, "float8_e4m3": 1e-12}
BLOCKS = {"dynamic_int8": 256, "dynamic_int4": 128, "float8_e4m3": 256}
UNSIGNED = {"nu"}


def fields(tree: Any) -> dict[str, Any]:
    """The trees of moments in a state of Optax, by their names."""
    named = {}
    for path, x in jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, dict)
    )[0]:
        if isinstance(x, dict):
            named[getattr(path[-1], "name", str(path[-1]))] = x
    return named


def revealing(inner: optax.GradientTransformation, field: str) -> Any:
    """Gives a state's own moments as updates: as they are read back from a codec."""
    return optax.GradientTransformation(
        inner.init, lambda updates, state, params=None: (fields(state)[field], state)
    )


def largest(tree: Any) -> Any:
    return jax.tree.map(lambda x: float(jnp.max(jnp.abs(x))), tree)


def compare_codec(alias: str, codec: str) -> tuple[dict[str, float], dict[str, float]]:
    """Each step by plain Optax from the state that was stored, and stored anew.

    Returns:
      Of each finite stream the worst error over the codec's bound; and the largest
      update over that of Optax in a run of its own.
    """
    make, settings = ALIASES[alias]
    inner = make(LEARNING_RATE, **settings)
    tx = getattr(po, alias)(LEARNING_RATE, **settings, codec=codec, **PAGES)
    params = {name: jnp.ones(SHAPE) for name in FINITE}
    state, plain = tx.init(params), inner.init(params)
    names = list(fields(plain))
    reveal = {
        name: jax.jit(po.paged(revealing(inner, name), codec=codec, **PAGES).update)
        for name in names
    }
    update, exact = jax.jit(tx.update), jax.jit(inner.update)
    read = lambda state: {x: reveal[x](params, state, params)[0] for x in names}
    moments = read(state)
    errors = dict.fromkeys(FINITE, 0.0)
    sizes, wanted_sizes = dict.fromkeys(FINITE, 0.0), dict.fromkeys(FINITE, 0.0)
    free = inner.init(params)
    for number in range(STEPS):
        g = gradients(FINITE, number)
        start = optax.tree.set(plain, **moments)
        _, plain = exact(g, start, params)
        updates, state = update(g, state, params)
        theirs, free = exact(g, free, params)
        moments = read(state)
        for name, wanted in fields(plain).items():
            for stream, x in wanted.items():
                error = _over_bound(codec, name, moments[name][stream], x)
                errors[stream] = max(errors[stream], error)
        for stream in FINITE:
            for tree, found in ((updates, sizes), (theirs, wanted_sizes)):
                size = float(jnp.max(jnp.abs(tree[stream]))) / LEARNING_RATE
                found[stream] = max(found[stream], size)
    ratios = {
        x: sizes[x] / wanted_sizes[x]
        if wanted_sizes[x]
        else (np.inf if sizes[x] else 0)
        for x in FINITE
    }
    return errors, ratios


def _over_bound(codec: str, field: str, found: Any, wanted: Any) -> float:
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert np.isfinite(wanted).all()
    bound = BOUNDS[codec][field in UNSIGNED]
    scale = np.abs(wanted)
    if block := BLOCKS.get(codec):
        scale = scale.reshape(-1, block).max(1, keepdims=True)
        found, wanted = found.reshape(-1, block), wanted.reshape(-1, block)
    # Below the least normal float32 nothing is exact.
    scale = np.maximum(scale, LEAST.get(codec, np.finfo(np.float32).tiny))
    return float(np.max(np.abs(found - wanted) / scale) / bound)
