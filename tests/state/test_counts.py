"""The steps that a parameter counts, alone or with others."""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.moments import KERNEL, adam, flat, nested, small
from helpers.reference import SMALL_PAGES


def test_increment_step_adds_one_to_one():
    tx = po.paged_adamw(lambda count: 1e-2, per_parameter_steps=True, **SMALL_PAGES)
    state = tx.init(nested())
    new = po.increment_step(po.increment_step(state, KERNEL), KERNEL)
    assert int(po.get_step(new, KERNEL)) == 2
    assert int(po.get_step(state, KERNEL)) == 0
    counts = [x for path, x in flat(new) if x.dtype == jnp.int32]
    # Adam counts steps, and so does the schedule.
    assert sorted(map(int, counts)) == [0, 0, 0, 0, 2, 2]
    tx.update(nested(), new, nested())


def test_increment_step_stops_at_the_largest_count():
    state = adam(per_parameter_steps=True).init({"w": small()["a"]})
    top = jnp.int32(2**31 - 1)
    state = optax.tree.set(state, count={"w": top})
    assert int(po.get_step(po.increment_step(state, "w"), "w")) == 2**31 - 1


def test_get_step_of_a_schedule_alone():
    tx = po.paged_sgd(lambda count: 1e-2, momentum=0.9, **SMALL_PAGES)
    state = tx.init(small())
    for _ in range(3):
        _, state = tx.update(small(), state, small())
    assert int(po.get_step(state, "a")) == 3


@pytest.mark.parametrize("schedule", [False, True])
def test_get_step_of_each_label(schedule):
    """Each counts for its own under `optax.partition`, beside its moments too."""
    rate = lambda count: 1e-2
    one = po.paged_sgd(rate, momentum=0.9, **SMALL_PAGES) if schedule else adam()
    tx = optax.partition(
        {"x": one, "y": po.MultiSteps(one, 2).gradient_transformation()},
        {"a": "x", "b": "y", "c": "x"},
    )
    state, update = tx.init(small()), jax.jit(tx.update)
    for _ in range(4):
        _, state = update(small(), state, small())
    assert [int(po.get_step(state, name)) for name in "abc"] == [4, 2, 4]
