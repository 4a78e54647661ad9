"""One parameter's state, whatever wrapper it is in: in, out, restarted, counted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers.moments import (
    BUDGET,
    KERNEL,
    WRAPPERS,
    adam,
    assert_updates_alike,
    belonging,
    filled,
    flat,
    named,
    nested,
    paths,
    small,
)
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import DEVICE, HOST


@functools.cache
def built(name):
    """A transformation, and its jitted update, which all tests share."""
    own = {"per_parameter_steps": True} if name == "own steps" else {}
    tx = WRAPPERS[name](adam(device_budget=BUDGET, **own))
    return tx, jax.jit(tx.update)


@pytest.fixture(params=WRAPPERS)
def wrapped(request):
    """A transformation, its update, and its state: "a" and "c" on the device."""
    tx, update = built(request.param)
    return tx, update, filled(tx.init(small()))


def paged_paths(state, params):
    return [path for path in paths(params) if belonging(state, path)]


def test_page_in_gives_the_moments_on_the_device(wrapped):
    """Each name of a moment once, with that moment's bits, in device memory."""
    _, _, state = wrapped
    params = small()
    before = kinds(state)
    for key_path in paged_paths(state, params):
        for path in (key_path, named(key_path), f"/{named(key_path)}/"):
            found = po.page_in(state, path)
            own = belonging(state, key_path)
            assert {"mu", "nu"} & set(found) == {"mu", "nu"} & set(own)
            for name in {"mu", "nu", "trace"} & set(own):
                assert_equal(found[name], own[name])
            assert set(kinds(found)) == {DEVICE}
    assert kinds(state) == before


@pytest.mark.quick("plain", "masked", "partition", "multi steps", "own steps")
def test_page_out_of_page_in_is_the_identity(wrapped):
    """Bit for bit; the moments on the host; the old state whole; updates go on."""
    tx, update, state = wrapped
    params = small()
    before, start = kinds(state), state
    for key_path in paged_paths(state, params):
        path = named(key_path)
        new = po.page_out(state, path, po.page_in(state, path))
        assert_equal(new, state)
        own = belonging(new, key_path)
        assert kinds([own[n] for n in ("mu", "nu") if n in own]) == [HOST] * len(
            own.keys() & {"mu", "nu"}
        )
        for (at, x), (_, old) in zip(flat(new), flat(state), strict=True):
            if at[-1:] != key_path:
                assert x is old
        state = new
    assert kinds(start) == before
    assert_updates_alike(update, params, start, state)


def test_page_out_takes_new_moments(wrapped):
    """One parameter's numbers change, and no other's."""
    _, _, state = wrapped
    params = small()
    for key_path in paged_paths(state, params):
        moments = po.page_in(state, key_path)
        doubled = {name: 2 * x for name, x in moments.items()}
        new = po.page_out(state, key_path, doubled)
        assert_equal(po.page_in(new, key_path), doubled)
        assert_equal(po.page_in(state, key_path), moments)
        for (at, x), (_, old) in zip(flat(new), flat(state), strict=True):
            assert at[-1:] == key_path or x is old


def test_residency_and_bytes_are_the_arrays_own(wrapped):
    """What a fresh look at the memory kind of every array says."""
    _, _, state = wrapped
    params = small()
    everything = [(x.nbytes, x.sharding.memory_kind) for x in jax.tree.leaves(state)]
    count = lambda arrays, kind: sum(n for n, where in arrays if where == kind)
    assert po.device_bytes(state) == count(everything, DEVICE)
    assert po.host_bytes(state) == count(everything, HOST)
    resident = 0
    for key_path in paged_paths(state, params):
        own = [
            (x.nbytes, x.sharding.memory_kind)
            for x in belonging(state, key_path).values()
        ]
        for path in (key_path, named(key_path)):
            assert po.device_bytes(state, path) == count(own, DEVICE)
            assert po.host_bytes(state, path) == count(own, HOST)
            assert po.is_device_resident(state, path) == (count(own, HOST) == 0)
        resident += count(own, HOST) == 0
    assert po.device_resident_count(state) == resident
    assert po.is_device_resident(state, "a")
    assert not po.is_device_resident(state, "b")


STEPS = {"multi steps": 2}


@pytest.mark.quick("plain", "multi steps", "own steps")
def test_get_step_counts_updates(wrapped, request):
    """The steps that moments have really had, under whatever counts beside them."""
    tx, update, _ = wrapped
    params = small()
    state = tx.init(params)
    for number in range(4):
        _, state = update(small(number), state, params)
    wanted = STEPS.get(request.node.callspec.params["wrapped"], 4)
    for key_path in paged_paths(state, params):
        assert int(po.get_step(state, key_path)) == wanted
        assert int(po.get_step(state, named(key_path))) == wanted


@pytest.mark.quick("plain", "masked", "partition", "multi steps", "own steps")
def test_init_param_restarts(wrapped):
    """As `init` makes it, and all others' arrays the very same objects."""
    tx, update, state = wrapped
    params = small()
    fresh = tx.init(params)
    for key_path in paged_paths(state, params):
        path = named(key_path)
        new = po.init_param(tx, state, params, path)
        chex.assert_trees_all_equal_structs(new, fresh)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, fresh)
        assert kinds(new) == kinds(fresh)
        for (at, x), (_, old), (_, made) in zip(
            flat(new), flat(state), flat(fresh), strict=True
        ):
            if at[-1:] == key_path:
                assert_equal(x, made)
            else:
                assert x is old
        update(params, new, params)


@pytest.mark.quick("plain", "multi steps", "own steps")
def test_rebalance_of_any_state(wrapped):
    """What fits goes to the device, the rest to the host, and updates go on."""
    tx, update, state = wrapped
    params = small()
    copy = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)
    known = [named(path) for path in paged_paths(state, params)]
    # What "b" has is more than the budget: it is passed over.
    for recent in ([], ["c", "a", "b"] if "c" in known else ["a", "b"]):
        state = po.rebalance(tx, state, recent)
        assert_equal(state, copy)
        assert po.is_device_resident(state, "a") == bool(recent)
        assert not po.is_device_resident(state, "b")
        assert_updates_alike(update, params, copy, state)


def test_a_multi_steps_of_optax_is_read_too():
    tx = optax.MultiSteps(adam(device_budget=BUDGET), 2)
    state = filled(tx.init(small()))
    assert_equal(po.page_in(state, "b")["mu"], state.inner_opt_state[0].mu["b"])
    assert not po.is_device_resident(state, "b")
    assert po.is_device_resident(state, "a")
    assert int(po.get_step(state, "b")) == 0


def test_a_lookahead_is_read_too():
    fast = small()
    params = optax.LookaheadParams.init_synced(fast)
    tx = optax.lookahead(adam(), sync_period=5, slow_step_size=0.5)
    state = filled(tx.init(params))
    found = po.page_in(state, "b")
    assert_equal(found["nu"], optax.tree.get(state, "nu")["b"])


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
