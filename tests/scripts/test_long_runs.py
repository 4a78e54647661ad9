"""Long training costs no memory and no new programs, and changes no number."""

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import endurance
from helpers.endurance import BUDGET, REBALANCED_EVERY
from helpers.reference import assert_equal, distances, kinds
from helpers.small import HOST


@pytest.mark.slow
def test_paged_and_rebalanced_is_unpaged():
    """To the last bit, in a program for each set of residents, and no more memory."""
    steps, early = 1500, 500  # each set of residents was there by then
    wanted = endurance.run(endurance.eight_bits(None), steps, early)
    found = endurance.run(endurance.eight_bits(BUDGET), steps, early)
    assert HOST in kinds(found.state) and HOST not in kinds(wanted.state)
    assert_equal((found.params, found.state), (wanted.params, wanted.state))
    assert (wanted.programs, found.programs) == (1, 3)
    assert found.growth < 0.01


@pytest.mark.slow
def test_other_moments_show():
    """Of a run in which one moment of one expert is lost on the way."""
    lossy = endurance.eight_bits(BUDGET)

    def rebalance(state, number):
        state = lossy.rebalance(state, number)
        if number == 20:
            moments = po.page_in(state, "b")
            lost = jax.tree.map(jnp.zeros_like, moments["mu"])
            state = po.page_out(state, "b", moments | {"mu": lost})
        return state

    wanted = endurance.run(endurance.eight_bits(None), 30)
    found = endurance.run(lossy._replace(rebalance=rebalance), 30)
    assert "['b']" in distances(found.params, wanted.params)


@pytest.mark.slow
def test_eight_threads():
    """Half with an optimizer of their own: each as it is alone."""
    assert endurance.threads_that_differ(8, steps=REBALANCED_EVERY + 10) == []


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
    tx = po.paged_adamw_8bit(1e-3, device_budget=BUDGET, page_size="4KiB")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", endurance.MADE)
def test_memory_of_dropped_optimizers(name):
    early, late = endurance.dropped(endurance.MADE[name], 60, early=20)
    assert late < 1.05 * early
