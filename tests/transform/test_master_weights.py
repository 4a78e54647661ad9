"""Master weights in float32 of parameters in bfloat16."""

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
    """1000 steps: parameters are the master copy rounded, whatever an update can say.

    Where no update in bfloat16 leads to the rounded copy, the copy moves to where the
    update leads, within one ulp of what was added.
    """
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
