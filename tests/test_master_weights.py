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
    """The parameters are the master copy rounded, but where no difference says so.

    Over 1000 steps: everywhere else equal; there within one ulp of what was added; and
    as few such places at the end as at the beginning.
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
    counts = []
    for _ in range(1000):
        noise = {"w": jnp.asarray(random.normal(size=(64, 128)), jnp.bfloat16)}
        old = wide(params["w"])
        params, state, updates = step(params, state, noise)
        wanted = wide(state.master["w"].astype(jnp.bfloat16))
        found = wide(params["w"])
        differs = found != wanted
        counts.append(differs.sum())
        # Differences of numbers within a factor of two are exact (Sterbenz).
        expressible = (wanted * old > 0) & (
            np.abs(np.abs(wanted) - np.abs(old))
            <= np.minimum(*map(np.abs, (old, wanted)))
        )
        assert not np.any(differs & expressible)
        largest = np.maximum(np.abs(old), np.abs(wide(updates["w"])))
        assert np.all(np.abs(found - wanted) <= largest * 2.0**-7)
    assert np.mean(counts) < 0.02 * params["w"].size
    assert np.mean(counts[-100:]) <= np.mean(counts[:100]) + 0.01 * params["w"].size


def test_master_weights_learn_what_bfloat16_forgets():
    """Steps far below the parameters' resolution add up."""
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    tx = po.paged(optax.sgd(1e-4), master_dtype="float32", **ALL_PAGED)
    state = tx.init(params)
    for _ in range(100):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert abs(float(params["w"][0, 0]) - 0.99) < 4e-3
    plain, bare = optax.sgd(1e-4), {"w": jnp.ones((64, 128), jnp.bfloat16)}
    updates, _ = plain.update(bare, plain.init(bare), bare)
    assert float(optax.apply_updates(bare, updates)["w"][0, 0]) == 1.0
