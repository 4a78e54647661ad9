"""Parameters that join a state, or start anew in it."""

import chex
import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from helpers.moments import B, adam, filled, small
from helpers.reference import kinds
from helpers.small import HOST
from paged_optax.backend.types import is_traced


@pytest.mark.parametrize("old", ["missing", "present"])
def test_a_group_joins_or_restarts(old):
    tx = adam(per_parameter_steps=True)
    adapter = {"down": jnp.ones((64, 33)), "up": jnp.ones((33, 64))}
    base = {"base": {"w": small()["b"]}}
    params = base | {"adapter": adapter}
    state = filled(tx.init(base if old == "missing" else params))
    state = po.increment_step(state, "base/w")
    if old == "present":
        state = po.increment_step(state, "adapter/up")
    new = po.init_param(tx, state, params, "adapter")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, tx.init(params))
    assert kinds(new) == kinds(tx.init(params))
    for name in ("adapter/down", "adapter/up"):
        assert float(jnp.abs(po.page_in(new, name)["mu"]).max()) == 0
        assert int(po.get_step(new, name)) == 0
    assert new[0].mu["base"]["w"] is state[0].mu["base"]["w"]
    assert int(po.get_step(new, "base/w")) == 1
    tx.update(params, new, params)


def test_joining_allocates_its_own_moments_alone():
    """The others' are neither copied nor made again."""
    made = []

    def init(params):
        state = adam().init(params)
        made.append([x for x in jax.tree.leaves(state) if not is_traced(x)])
        return state

    tx, params = adam()._replace(init=init), small()
    state = tx.init({name: params[name] for name in ("a", "c")})
    made.clear()
    po.init_param(tx, state, params, "b")
    assert 0 < sum(x.nbytes for each in made for x in each) <= B + 64


def test_small_ones_that_become_enough_to_be_paged():
    """Those that were there stay, and the next update tells why they should not."""
    tx = po.paged_adam(0.1, on_moved="raise")
    params = {name: jnp.ones((128, 128)) for name in "abc"}  # 64 KiB each
    state = tx.init(params)
    assert HOST not in kinds(state[0].mu)
    params["d"] = jnp.ones((128, 128))
    state = po.init_param(tx, state, params, "d")
    assert kinds(state[0].mu).count(HOST) == 1
    with pytest.raises(ValueError, match=r"now count as large together.*place_state"):
        tx.update(params, state, params)
    state = po.place_state(tx, state, params)
    assert kinds(state[0].mu) == [HOST] * 4
    tx.update(params, state, params)
