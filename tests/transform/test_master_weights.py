"""Master weights in float32 of parameters in bfloat16, which others may change too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers.coded import ALL_PAGED


@pytest.mark.quick("None")
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_master_weights(codec):
    """1000 steps: the copy rounded, or within one ulp of where an update can lead."""
    random = np.random.default_rng(0)
    tx = po.paged_adamw(1e-3, codec=codec, master_dtype="float32", **ALL_PAGED)
    params = {"w": jnp.asarray(random.normal(size=(64, 128)) * 0.02, jnp.bfloat16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, noise):
        gradients = jax.tree.map(lambda p, n: p * 0.5 + n, params, noise)
        updates, state = tx.update(gradients, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        return optax.apply_updates(params, updates), state, updates

    wide = lambda x: np.asarray(x.astype(jnp.float32))
    moved = 0
    for _ in range(1000):
        noise = {"w": jnp.asarray(random.normal(size=(64, 128)), jnp.bfloat16)}
        params, state, _ = step(params, state, noise)
        masters = po.master_weights(params, state)["w"]
        rounded = wide(masters.astype(jnp.bfloat16))
        np.testing.assert_array_equal(wide(params["w"]), rounded)
        moved += np.sum(np.asarray(masters) != np.asarray(state.master["w"]))
    assert moved < 0.02 * 1000 * params["w"].size


def regression(dtype, tx, scale=1024.0):
    """The losses of twenty steps; the loss that is differentiated is scaled."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)
    x, y, params = draw(64, 128), draw(64, 64), {"w": draw(128, 64) / 8}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            return scale * jnp.mean((x @ params["w"] - y).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value / scale

    losses = []
    for _ in range(20):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def test_float16_needs_master_weights():
    """As a T4 is told to train: squares of gradients leave what float16 has."""
    wanted = regression(jnp.float32, po.paged_adamw(3e-3, **ALL_PAGED))
    masters = po.paged_adamw(3e-3, master_dtype="float32", **ALL_PAGED)
    found = regression(jnp.float16, masters)
    assert found[-1] < 0.9 * found[0]
    np.testing.assert_allclose(found, wanted, rtol=2e-3)
    alone = regression(jnp.float16, po.paged_adamw(3e-3, **ALL_PAGED))
    assert not np.isfinite(alone[-1])


_STEPS = 12
_RATE = 1e-2

EITHER = pytest.mark.parametrize(
    "masters", [{"master_dtype": "float32"}, {"master_remainders": True}], ids=str
)

AROUND = {
    "alone": lambda make: make(),
    "clip before": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make()),
    "scale": lambda make: optax.chain(make(), optax.scale(0.1)),
    "clip after": lambda make: optax.chain(make(), optax.clip(1e-3)),
    "schedule": lambda make: optax.chain(
        make(), optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, _STEPS))
    ),
    "decay": lambda make: optax.chain(make(), optax.add_decayed_weights(-1e-2)),
    "every second": lambda make: optax.chain(make(), optax.apply_every(2)),
    "trace": lambda make: optax.chain(make(), optax.trace(0.5)),
    "schedule free": lambda make: optax.contrib.schedule_free(make(b1=0.0), _RATE),
    "multi steps": lambda make: po.MultiSteps(make(), 2).gradient_transformation(),
}


def _gradients(shape, steps=_STEPS):
    random = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(random.normal(size=shape), "float32")} for _ in range(steps)
    ]


def _parameters(shape, dtype=jnp.bfloat16):
    values = np.random.default_rng(1).normal(size=shape)
    return {"w": jnp.asarray(values, jnp.bfloat16).astype(dtype)}


def _trained(tx, params, gradients):
    """The values that a chain of transformations leads to."""

    @jax.jit
    def step(params, state, gradients):
        cast = lambda g, p: g.astype(p.dtype)
        given = jax.tree.map(cast, gradients, params)
        updates, state = tx.update(given, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for each in gradients:
        params, state = step(params, state, each)
    return np.asarray(params["w"]).astype(np.float32)


@EITHER
@pytest.mark.parametrize("around", AROUND)
def test_as_near_as_bfloat16(around, masters):
    """Masters cost no accuracy, whatever comes after them; alone they are better."""
    shape, wrap = (64, 128), AROUND[around]
    gradients, low = _gradients(shape), _parameters(shape)
    wanted = _trained(
        wrap(lambda **k: optax.adamw(_RATE, **k)),
        _parameters(shape, jnp.float32),
        gradients,
    )
    plain = _trained(wrap(lambda **k: optax.adamw(_RATE, **k)), low, gradients)
    paged = lambda **k: po.paged_adamw(_RATE, **masters, **ALL_PAGED, **k)
    found = _trained(wrap(paged), low, gradients)
    off = lambda x: np.abs(x - wanted).mean()
    assert off(found) <= (0.3 if around in ("alone", "clip before") else 1.8) * off(
        plain
    )


@EITHER
@pytest.mark.parametrize("rate", [1e-3, 3e-4])
@pytest.mark.parametrize(
    "after",
    [optax.apply_every(4), optax.apply_every(10), optax.scale(2.0), optax.scale(0.8)],
    ids=["every 4", "every 10", "twice", "less"],
)
def test_steps_below_a_unit_add_up(after, rate, masters):
    """However they are delayed or scaled; in bfloat16 nothing moves, or too far."""
    shape = (64, 64)
    values = np.linspace(1.01, 1.9, 64 * 64).reshape(shape)
    start = jnp.asarray(values, jnp.bfloat16)
    moved = lambda tx, dtype: np.mean(
        _trained(
            optax.chain(tx, after),
            {"w": start.astype(dtype)},
            [{"w": jnp.ones(shape)}] * 300,
        )
        - np.asarray(start).astype(np.float32)
    )
    lion = optax.lion(rate, weight_decay=0.0)
    wanted = moved(lion, jnp.float32)
    found = moved(po.paged(lion, **masters, **ALL_PAGED), jnp.bfloat16)
    assert 0.85 * abs(wanted) < abs(found) < 1.3 * abs(wanted)


@EITHER
def test_infinities_stay(masters):
    """A parameter that has overflowed is as with plain Optax."""
    params = {"w": jnp.full((64, 64), jnp.inf, jnp.bfloat16)}
    tx = po.paged(optax.sgd(1e-2), **masters, **ALL_PAGED)
    updates, _ = tx.update({"w": jnp.ones((64, 64))}, tx.init(params), params)
    assert jnp.all(jnp.isinf(optax.apply_updates(params, updates)["w"]))


def test_masters_in_float64():
    """A number of 64 bits is rounded once, not to 32 bits first."""
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(256, 256))
        params = {"w": jnp.asarray(values, jnp.bfloat16)}
        gradients = {"w": jnp.asarray(values[::-1].copy(), jnp.float64)}
        tx = po.paged(optax.sgd(1e-3), master_dtype="float64", **ALL_PAGED)
        state, start = tx.init(params), np.asarray(params["w"]).astype(np.float64)
        update = jax.jit(tx.update)
        for _ in range(40):
            updates, state = update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        found = np.asarray(po.master_weights(params, state)["w"])
    wanted = start - 40e-3 * np.asarray(gradients["w"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-5)


@EITHER
def test_replaced_parameters(masters):
    """A restore of weights alone: the next step is a step from these."""
    shape = (65, 67)
    tx = po.paged(optax.sgd(1e-2), **masters, **ALL_PAGED)
    old = _parameters(shape)
    _, state = tx.update(old, tx.init(old), old)
    new = jax.tree.map(lambda x: x[::-1] * 1.5, old)
    gradients = _gradients(shape, 1)[0]
    updates, state = tx.update(gradients, state, new)
    found = optax.apply_updates(new, updates)
    wide = lambda x: np.asarray(x).astype(np.float32)
    wanted = wide(new["w"]) - 1e-2 * np.asarray(gradients["w"])
    # Half a unit in the last place of the sum, and of the parameter before.
    bound = 2.0**-8 * (np.abs(wanted) + np.abs(wide(new["w"])))
    assert np.all(np.abs(wide(found["w"]) - wanted) <= bound)
    kept = np.asarray(po.master_weights(found, state)["w"])
    assert np.all(np.abs(kept - wide(found["w"])) <= 2.0**-8 * np.abs(kept) + 1e-30)


@EITHER
@pytest.mark.parametrize(
    "wrapper", [po.lookahead, optax.lookahead], ids=["po", "optax"]
)
def test_lookahead(wrapper, masters):
    """Slow parameters are put into the fast ones: those of float32, rounded."""
    shape = (64, 128)

    def slow(wrap, tx, params):
        tx = wrap(tx, 3, 0.5)
        params = optax.LookaheadParams.init_synced(params)
        state = tx.init(params)
        for gradients in _gradients(shape):
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params.slow["w"]).astype(np.float32)

    start = _parameters(shape, jnp.float32)
    wanted = slow(optax.lookahead, optax.adamw(0.1), start)
    paged = po.paged_adamw(0.1, **masters, **ALL_PAGED)
    for dtype, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
        found = slow(wrapper, paged, _parameters(shape, dtype))
        assert np.abs(found - wanted).mean() < bound


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "bfloat16", "float32"])
def test_steps_below_the_parameters_resolution(dtype):
    """Signs, zeros, and numbers without a leading one, in every dtype."""
    values = np.array([0.0, -0.0, 2e-7, -2e-7, 3e-2, -1.0, 200.0, -1e-3] * 512)
    params = {"w": jnp.asarray(values.reshape(64, 64), dtype)}
    tx = po.paged(optax.sgd(1.0), master_dtype="float32", **ALL_PAGED)
    state = tx.init(params)
    start = np.asarray(params["w"]).astype(np.float32)
    step = (2.0**-13 * np.maximum(np.abs(start), 1e-8)).astype(np.float32)
    update = jax.jit(tx.update)
    for _ in range(20):
        updates, state = update({"w": jnp.asarray(step)}, state, params)
        params = optax.apply_updates(params, updates)
    wanted = start - 20 * step
    found = np.asarray(po.master_weights(params, state)["w"])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-12)
