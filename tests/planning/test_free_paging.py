"""From how many tokens a step paging costs no time."""

import math

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from paged_optax.planning.cards import free_from

RATES = {"up_gigabytes_per_second": 50.0, "teraflops": 500.0}


def test_transfers_take_as_long_as_what_is_computed_beside_them():
    """A second of transfers each way hides behind a second of products."""
    tokens = free_from(10**9, 50 * 10**9, 50 * 10**9, **RATES)
    assert 6 * 10**9 * (tokens - 1) < 500e12 <= 6 * 10**9 * tokens
    whole = free_from(10**9, 50 * 10**9, 50 * 10**9, flops_per_parameter=8, **RATES)
    assert whole == math.ceil(500e12 / 8e9)


def test_directions():
    """The slower direction counts; where they take turns, both do."""
    up, down = 30 * 10**9, 10 * 10**9
    here = lambda **how: free_from(10**9, up, down, **(RATES | how))
    assert here() == here(down_gigabytes_per_second=50 / 3)
    assert here(down_gigabytes_per_second=5.0) == math.ceil(2 * 500e12 / 6e9)
    assert here(both_ways=False) == math.ceil(0.8 * 500e12 / 6e9)


@pytest.mark.parametrize(
    "name", ["up_gigabytes_per_second", "teraflops", "flops_per_parameter"]
)
def test_what_is_no_rate_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        free_from(10, 10, 10, **(RATES | {name: 0}))
    with pytest.raises(ValueError, match=f"{name}=nan"):
        free_from(10, 10, 10, **(RATES | {name: math.nan}))


def test_plan_says_it():
    """At the plan's own bytes and rates; it says nothing where no rate is stated."""
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    tx = po.paged_adamw(1e-3)
    stated = po.plan(tx, params, link_gigabytes_per_second=50.0, teraflops=500.0)
    moved = stated.host_bytes
    ways = all(x.both_ways for x in stated.moments if x.on_host)
    assert stated.free_from == free_from(4096**2, moved, moved, both_ways=ways, **RATES)
    assert f"{stated.free_from:,}" in str(stated)
    silent = po.plan(tx, params)
    assert silent.free_from is None
    assert "free" not in str(silent)
