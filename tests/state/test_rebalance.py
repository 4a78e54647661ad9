"""`rebalance` within a budget: what moves, what stays, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers.moments import BUDGET, KERNEL, A, B, C, adam, filled, nested, paths, small
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import DEVICE, HOST


def test_rebalance_of_groups_and_repeated_paths():
    tx = adam(device_budget=A + C)
    state = po.rebalance(tx, tx.init(nested()), ["blocks/0", "blocks/1"])
    # 71 KiB of the most recent are over the budget alone: it is passed over.
    assert po.device_bytes(state, "blocks") == A + C
    tx = adam(device_budget=B + C)
    state = po.rebalance(tx, state, ["blocks/0/q/bias", "blocks/0/q", "blocks/1"])
    assert po.device_bytes(state, "blocks") == B
    state = po.rebalance(tx, state, [KERNEL, "blocks/1", "blocks/0/q/bias"])
    assert po.device_bytes(state, "blocks") == B + C
    state = po.rebalance(tx, state, ["blocks/1", KERNEL, "blocks/1", KERNEL])
    assert po.device_bytes(state, "blocks") == A
    by_key = po.rebalance(tx, state, [paths(nested())[1]])
    assert not po.is_device_resident(by_key, "blocks/1")


def test_rebalance_of_generators_and_nothing_used():
    tx = adam(device_budget="1MiB")
    state = po.rebalance(tx, tx.init(small()), iter(["a"]))
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        True,
        False,
        False,
    ]
    assert po.device_resident_count(po.rebalance(tx, state, [])) == 0


def test_without_a_budget_everything_stays():
    tx = adam(device_budget=None)
    state = adam().init(small())
    state = po.rebalance(tx, state, [])
    assert set(kinds(state)) == {DEVICE}


def test_without_room_everything_leaves():
    state = adam(device_budget=None).init(small())
    assert kinds(po.rebalance(adam(), state, ["a", "b"])).count(HOST) == 6


def test_small_moments_stay_and_cost_nothing():
    small_stays = SMALL_PAGES | {"min_paged_size": "1KiB"}
    tx = po.paged_adam(1e-2, device_budget="32KiB", **small_stays)
    state = po.rebalance(tx, tx.init(small()), ["c", "b", "a"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [True, False, True]
    state = po.rebalance(tx, state, ["b"])
    assert [po.is_device_resident(state, name) for name in "abc"] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("less", "resident"), [(0, "ab"), (1, "b")])
def test_several_paged_transformations_share_their_budgets(less, resident):
    """The sum of them, for whichever parameters are recent; not a byte more."""
    tx = optax.partition(
        {"x": adam(device_budget=1000), "y": adam(device_budget=A + B - 1000 - less)},
        {"a": "x", "b": "y", "c": "x"},
    )
    state = po.rebalance(tx, tx.init(small()), ["c", "a", "b"])
    assert {n for n in "abc" if po.is_device_resident(state, n)} == set(resident)


@pytest.mark.parametrize(("budget", "resident"), [(0, ""), (-1, "a"), (None, "ab")])
def test_a_byte_too_little(budget, resident):
    budget = {0: A - 1, -1: A + B - 1, None: A + B}[budget]
    state = po.rebalance(adam(device_budget=budget), adam().init(small()), ["b", "a"])
    assert {n for n in "ab" if po.is_device_resident(state, n)} == set(resident)


def test_rebalance_keeps_shards_where_they_are():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({name: small()[name] for name in "ab"}, sharding)
    tx = adam(device_budget="33KiB")
    state = filled(tx.init(params))
    wanted = jax.tree.map(np.array, state)
    for recent in (["b", "a"], ["b"], ["a"]):
        state = po.rebalance(tx, state, recent)
        assert_equal(state, wanted)
        for x in jax.tree.leaves((state[0].mu, state[0].nu)):
            kind = x.sharding.memory_kind
            assert x.sharding.is_equivalent_to(sharding.with_memory_kind(kind), 2)


def test_training_goes_on_between_moves():
    """Ten steps with a move before each are ten steps without."""
    tx, params = adam(device_budget=BUDGET), small()
    update = jax.jit(tx.update)
    moved = still = tx.init(params)
    moved = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), moved)
    for number in range(10):
        _, still = update(small(number), still, params)
        moved = po.rebalance(tx, moved, [("a", "c", "b")[number % 3]])
        _, moved = update(small(number), moved, params)
        assert po.is_device_resident(moved, "c") == (number % 3 == 1)
    assert_equal(moved, still)


def test_a_string_is_one_parameter():
    experts = {name: jnp.ones((512, 512)) for name in ("a", "ab", "b")}
    tx = po.paged_adamw(1e-3, device_budget="2MiB")
    state = po.rebalance(tx, tx.init(experts), "ab")
    assert [po.is_device_resident(state, name) for name in experts] == [
        False,
        True,
        False,
    ]
