"""From how many tokens a step paging costs no time."""

import math

import jax
import jax.numpy as jnp

import paged_optax as po
from paged_optax.planning.cards import free_from


def test_transfers_take_as_long_as_what_is_computed_beside_them():
    """A second of transfers hides behind a second of products."""
    tokens = free_from(10**9, 1.0, 500.0)
    assert 6 * 10**9 * (tokens - 1) < 500e12 <= 6 * 10**9 * tokens
    assert free_from(10**9, 0.8, 500.0) == math.ceil(0.8 * 500e12 / 6e9)


def test_plan_says_it():
    """At the plan's own bytes and rates; it says nothing where no rate is stated."""
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    tx = po.paged_adamw(1e-3)
    stated = po.plan(tx, params, link_gigabytes_per_second=50.0, teraflops=500.0)
    # Where the directions take turns, both count.
    ways = all(x.bidirectional for x in stated.moments if x.on_host)
    seconds = (1 if ways else 2) * stated.host_bytes / 50e9
    assert stated.free_from == free_from(4096**2, seconds, 500.0)
    assert f"{stated.free_from:,}" in str(stated)
    silent = po.plan(tx, params)
    assert silent.free_from is None
    assert "free" not in str(silent)
