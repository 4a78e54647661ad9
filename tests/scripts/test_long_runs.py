"""Optimizers that are made, used and dropped leave nothing behind."""

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po


def objects(work, count):
    for _ in range(count):
        work()
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.quick("place_state")
@pytest.mark.parametrize("what", ["rebalance", "plan", "abstract_state", "place_state"])
def test_nothing_is_left_behind(what):
    """By what is called between steps: each call once left a trace in JAX's caches."""
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 128))}
    tx = po.paged_adamw_8bit(1e-3, device_budget="17KiB", page_size="4KiB")
    state = tx.init(params)
    work = {
        "rebalance": lambda: po.rebalance(tx, state, ["a"]),
        "plan": lambda: po.plan(tx, params),
        "abstract_state": lambda: po.abstract_state(tx, params),
        "place_state": lambda: po.place_state(tx, state, params),
    }[what]
    assert objects(work, 5) + 5 >= objects(work, 20)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda tx: tx, optax.chain], ids=["alone", "chained"])
def test_dropped_optimizers_are_gone(wrap):
    """As plain Optax's are, with what JAX traced of them."""
    params = {"w": jnp.ones((64, 64))}

    def work(make):
        tx = wrap(make(1e-3))
        jax.jit(tx.update).trace(params, tx.init(params), params)

    paged = lambda rate: po.paged_adamw(rate, page_size="4KiB", min_paged_size="1KiB")
    for make in (optax.adamw, paged):
        assert objects(lambda make=make: work(make), 3) + 100 >= objects(
            lambda make=make: work(make), 10
        )
