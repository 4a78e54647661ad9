"""`device_budget="auto"`: what the device has left."""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import moments
from helpers.moments import BUDGET, A, B, C, adam, small
from helpers.reference import kinds
from helpers.small import HOST

PARAMETERS = sum(x.nbytes for x in small().values())


@pytest.fixture
def statistics(monkeypatch):
    """Makes the device say how much memory it has, and how much is in use."""

    def pretend(limit, used):
        module = sys.modules["paged_optax.transform.paged_transformation"]
        monkeypatch.setattr(module, "device_memory", lambda: (limit, used))

    return pretend


def limit_for(free):
    """A device that has this much left when 1000 bytes are in use, reserve taken."""
    limit = (free + PARAMETERS + 1000) * 4 // 3
    while limit - limit // 4 - 1000 - PARAMETERS < free:
        limit += 1
    assert limit - limit // 4 - 1000 - PARAMETERS == free
    return limit, 1000


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("free", "resident"),
    [
        (A + B + C, "abc"),
        (A + B + C - 1, "ab"),
        (A + B, "ab"),
        (A + B - 1, "ac"),
        (A, "a"),
        (A - 1, "c"),
        (0, ""),
    ],
)
def test_auto_takes_what_is_left(statistics, free, resident, jit):
    """The free memory, less the gradients, less a quarter of the device."""
    statistics(*limit_for(free))
    tx = adam(device_budget="auto")
    state = (jax.jit(tx.init) if jit else tx.init)(small())
    assert moments.resident(state) == resident
    # Where moments live is told beforehand as well.
    assert kinds(po.abstract_state(tx, small())) == kinds(state)
    plan = po.plan(tx, small())
    assert [x.on_host for x in plan.moments] == [k == HOST for k in kinds(state)]


@pytest.mark.parametrize("memory", [(0, 0), (10**9, 10**9), (10**5, 10**6)], ids=str)
def test_auto_without_room_or_statistics_pages_everything(statistics, memory):
    statistics(*memory)
    tx = adam(device_budget="auto")
    assert po.device_resident_count(tx.init(small())) == 0


def test_auto_counts_resident_moments_as_free_when_it_rebalances(statistics):
    tx = adam(device_budget="auto")
    limit, used = limit_for(A)
    statistics(limit, used)
    state = tx.init(small())
    assert po.is_device_resident(state, "a")
    statistics(limit, used + A)  # they are in use now
    state = po.rebalance(tx, state, ["a"])
    assert po.is_device_resident(state, "a")
    state = po.rebalance(tx, state, ["a", "c"])
    assert moments.resident(state) == "c"
    statistics(limit, used + C)
    state = po.rebalance(tx, state, ["c", "a"])
    assert moments.resident(state) == "a"


def test_auto_is_taken_once_by_several(statistics):
    statistics(*limit_for(A))
    tx = optax.chain(adam(device_budget="auto"), adam(device_budget="auto"))
    state = tx.init({name: jnp.zeros(0) for name in "abc"} | small())
    state = po.rebalance(adam(), jax.tree.map(lambda x: x, state), [])
    state = po.rebalance(tx, state, ["c"])
    state = po.rebalance(tx, state, ["a"])
    assert po.device_bytes(state) - 2 * 4 <= A


def test_auto_reserves_for_the_parameters_whatever_their_moments_are(statistics):
    """A moment of bfloat16 says less of its parameter's size than one of float32."""
    tx = adam(device_budget="auto", mu_dtype=jnp.bfloat16)
    limit, used = limit_for(A * 3 // 4 - 1)
    statistics(limit, used)
    state = tx.init(small())
    assert not po.is_device_resident(state, "a")
    statistics(limit, used + po.device_bytes(state, "c"))  # it is in use now
    state = po.rebalance(tx, state, ["a"])
    assert not po.is_device_resident(state, "a")


def test_auto_is_refused_in_one_of_several_processes(monkeypatch, statistics):
    statistics(10**9, 0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    tx = adam(device_budget="auto")
    for do in (
        lambda: tx.init(small()),
        lambda: jax.jit(tx.init)(small()),
        lambda: po.abstract_state(tx, small()),
    ):
        with pytest.raises(ValueError, match="'auto' in one of 2 processes.*bytes"):
            do()
    adam(device_budget=BUDGET).init(small())
