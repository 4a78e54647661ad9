"""What bad input gets, eager and jitted, where one call of wrong_calls.md cannot show.

Each error names the argument, the value and the way out.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.reference import SMALL_PAGES, arrays
from helpers.small import small

# -- the arguments of `paged` -----------------------------------------------------


@pytest.mark.parametrize("argument", ["page_size", "device_budget"])
def test_a_size_that_is_injected(argument):
    """Optax makes an array of it, which no trace can read."""
    build = optax.inject_hyperparams(po.paged_adamw)
    with pytest.raises(ValueError, match=f"{argument}=.*static_args='{argument}'"):
        build(1e-3, **{argument: 1 << 20}).init({"w": jnp.ones((64, 64))})
    build = optax.inject_hyperparams(po.paged_adamw, static_args=argument)
    build(1e-3, **{argument: 1 << 20}).init({"w": jnp.ones((64, 64))})


@pytest.mark.parametrize("size", [4096, "4096", "4KiB", " 4.0 KiB ", "4.096KB"])
def test_ways_to_write_a_size(size):
    params = small()
    plan = po.plan(po.paged_adam(1e-3, page_size=size, min_paged_size=0), params)
    wanted = po.plan(po.paged_adam(1e-3, **SMALL_PAGES), params)
    assert plan.moments == wanted.moments


# -- update ----------------------------------------------------------------------


def test_an_extra_argument_without_a_hash():
    tx, params = po.paged_lion(1e-3, **SMALL_PAGES), small()
    updates, _ = tx.update(params, tx.init(params), params, layers={1, 2})
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_clipping_a_single_leaf_is_within_it():
    params = {"w": arrays()["odd"]}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))
    tx = po.paged(inner, **SMALL_PAGES)
    updates, _ = tx.update(params, tx.init(params), params)
    assert float(optax.tree.norm(updates)) > 0
