"""The state is Optax's own, and lives where it should, whoever moves it."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import aot
from helpers.programs import state_on
from helpers.reference import ALIASES, SMALL_PAGES, arrays, assert_equal, kinds
from helpers.small import (
    ALL_PAGED,
    DEVICE,
    HOST,
    ORDERS,
    TX,
    counting,
    make_step,
    small,
)


def described(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


# -- init ---------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_init_is_optax_init(alias):
    optimizer, kwargs = ALIASES[alias]
    params = arrays()
    wanted = optimizer(1e-2, **kwargs).init(params)
    tx = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    for init in (tx.init, jax.jit(tx.init), functools.partial(jax.eval_shape, tx.init)):
        state = init(params)
        chex.assert_trees_all_equal_structs(state, wanted)
        assert described(state) == described(wanted)
    state = tx.init(params)
    assert_equal(state, wanted)
    for x in jax.tree.leaves(state):
        is_moment = x.ndim and jnp.issubdtype(x.dtype, jnp.inexact)
        assert x.sharding.memory_kind == (HOST if is_moment else DEVICE)
    assert kinds(jax.jit(tx.init)(params)) == kinds(state)


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_init_of_parameters_that_a_jit_closes_over(codec):
    """They are there, and what is made of them is traced."""
    params = small()
    tx = po.paged_adamw(1e-2, codec=codec, **SMALL_PAGES)
    state = jax.jit(lambda: tx.init(params))()
    assert_equal(state, tx.init(params))
    assert kinds(state[0].mu) == kinds(tx.init(params)[0].mu)


def test_init_copies_parameters_and_leaves_them_alone():
    tx = po.paged(optax.contrib.schedule_free_adamw(1e-2), **SMALL_PAGES)
    params = small()
    state = tx.init(params)
    assert_equal(state.z, params)
    assert kinds(state.z) == [HOST, HOST]
    assert kinds(params) == [DEVICE, DEVICE]


# -- residency -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("paging", "wanted"),
    [
        ({}, ALL_PAGED),
        ({"device_budget": 0}, ALL_PAGED),
        ({"device_budget": None}, [DEVICE] * 5),
        # Both moments of a parameter stay, or neither does.
        ({"device_budget": "31KiB"}, ALL_PAGED),
        ({"device_budget": "32KiB"}, [DEVICE, DEVICE, HOST, DEVICE, HOST]),
        ({"device_budget": "101KiB"}, [DEVICE, DEVICE, HOST, DEVICE, HOST]),
        ({"device_budget": "102KiB"}, [DEVICE] * 5),
        ({"min_paged_size": "16KiB"}, ALL_PAGED),
        ({"min_paged_size": 2**14 + 1}, [DEVICE, DEVICE, HOST, DEVICE, HOST]),
        ({"min_paged_size": "1MiB"}, [DEVICE] * 5),
        ({"host_memory_kind": "auto"}, ALL_PAGED),
    ],
    ids=str,
)
def test_where_moments_live(paging, wanted):
    tx = po.paged_adam(1e-2, **(SMALL_PAGES | paging))
    params = small()
    state = tx.init(params)
    right = optax.adam(1e-2)
    _, right_state = jax.jit(right.update)(params, right.init(params), params)
    for start in (state, jax.jit(tx.init)(params)):
        assert kinds(start) == wanted
        for update in (tx.update, jax.jit(tx.update)):
            updates, new = update(params, start, params)
            assert kinds(new) == wanted
            assert kinds(updates) == [DEVICE, DEVICE]
            assert_equal(new, right_state)
    # A user's own step and plan see the same.
    plan = po.plan(tx, params)
    assert [HOST if x.on_host else DEVICE for x in plan.moments] == wanted


def test_update_follows_the_state_not_the_configuration():
    params = small()
    everywhere = optax.adam(1e-2).init(params)
    with pytest.warns(UserWarning, match="are in device memory"):
        found = TX.update(params, everywhere, params)[1]
    assert kinds(found) == [DEVICE] * 5
    nothing = po.paged_adam(1e-2, device_budget=None)
    assert kinds(nothing.update(params, TX.init(params), params)[1]) == ALL_PAGED


# -- Optax's own tools -----------------------------------------------------------


def test_tree_get_set_and_map_params():
    params = small()
    _, state = TX.update(params, TX.init(params), params)
    chex.assert_trees_all_equal_shapes(optax.tree.get(state, "mu"), params)
    assert kinds(optax.tree.get(state, "mu")) == [HOST, HOST]
    assert optax.tree.get(optax.tree.set(state, count=jnp.int32(7)), "count") == 7
    marked = optax.tree_map_params(
        TX, lambda _: "moment", state, transform_non_params=lambda _: "other"
    )
    assert marked[0].mu == {"a": "moment", "b": "moment"} == marked[0].nu
    assert marked[0].count == "other"


# -- tracing --------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("leaves", [1, 30])
def test_inner_update_is_traced_once_a_call(leaves, jit):
    inner, traces = counting(optax.lion(1e-2))
    tx = po.paged(inner, **SMALL_PAGES)
    params = {f"w{i}": jnp.ones((40, 30 + i % 3)) for i in range(leaves)}
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for _ in range(3):  # the state that comes back must not mean a second trace
        _, state = update(params, state, params)
    # What is eager may read more than its arguments, as Optax would.
    assert len(traces) == (1 if jit else 3)


# -- a user's own jit -------------------------------------------------------------


@pytest.mark.quick("state-params-params-state", "params-state-state-params-(0, 1)")
@pytest.mark.parametrize("donated", [(0,), (1,), (2,), (0, 1)], ids=str)
@pytest.mark.parametrize("results", ORDERS, ids="-".join)
@pytest.mark.parametrize("arguments", ORDERS, ids="-".join)
def test_donation_of_anything_in_any_order(arguments, results, donated):
    """`jax.jit` alone would pair moments on the host with parameters."""
    step = jax.jit(make_step(arguments, results), donate_argnums=donated)
    made = {"params": small(), "state": TX.init(small())}
    plain = jax.jit(make_step(arguments, results, optax.adam(1e-2)))
    wanted = {"params": small(), "state": optax.adam(1e-2).init(small())}
    ordered = lambda given, number: (*(given[x] for x in arguments), small(number))
    named = lambda found: dict(zip(results, found, strict=True))
    for number in range(3):
        old = ordered(made, number)
        made, wanted = named(step(*old)), named(plain(*ordered(wanted, number)))
        assert kinds(made["state"]) == ALL_PAGED
        assert kinds(made["params"]) == [DEVICE, DEVICE]
        for place, tree in enumerate(old):
            gone = {x.is_deleted() for x in jax.tree.leaves(tree)}
            assert gone == {place in donated}
    assert_equal(made["state"], wanted["state"])


def test_donation_where_no_moment_is_computed():
    """What calls this package pairs within a memory, whatever it computes."""
    twice = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
    resident = po.paged_adam(1e-2, device_budget=None)
    single = po.paged_adam(1e-2, **SMALL_PAGES, per_parameter_steps=True)

    def inactive(state, params):
        closed = dict.fromkeys(params, False)
        updates, state = single.update(params, state, params, active=closed)
        return optax.apply_updates(params, updates), state

    def beside(state, params):
        updates, _ = resident.update(params, resident.init(params), params)
        return optax.apply_updates(params, updates), state

    def paged_out(state, params):
        return params, po.page_out(state, "a", po.page_in(state, "a"))

    for step, tx in [(inactive, single), (beside, TX), (paged_out, TX)]:
        old = tx.init(small())
        params, state = jax.jit(step, donate_argnums=0)(old, small())
        assert kinds(params) == [DEVICE, DEVICE]
        assert DEVICE not in kinds([x for x in jax.tree.leaves(state) if x.ndim])
        assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.ndim)
    make = jax.jit(lambda params: (TX.init(params), twice(params)), donate_argnums=0)
    state, params = make(small())
    assert kinds(state) == ALL_PAGED
    assert kinds(params) == [DEVICE, DEVICE]


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, None], ids=str)
def test_the_state_alone_is_donated_on_a_mesh(axis_type):
    types = (axis_type or jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("x",), axis_types=types)
    split = NamedSharding(mesh, PartitionSpec("x"))
    with jax.set_mesh(mesh):
        params = jax.device_put(
            {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 8))}, split
        )
        tx = po.paged_adam(1e-2, **SMALL_PAGES)
        state, step = tx.init(params), make_step(*ORDERS[::-1], tx)
        step = jax.jit(step, donate_argnums=0)
        for _ in range(2):
            old = state
            params, state = step(old, params, params)
            assert kinds(state) == ALL_PAGED
            assert kinds(params) == [DEVICE, DEVICE]
            assert all(x.is_deleted() for x in jax.tree.leaves(old))


@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_the_state_alone_is_donated_on_accelerators(compile_for):
    def build(mesh):
        device, _ = aot.placements(mesh)
        params = {"a": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=device)}
        tx = po.paged_adamw(1e-3, page_size=2**20, min_paged_size=0)
        step = make_step(*ORDERS[::-1], tx)
        state = state_on(mesh, tx, params)
        return jax.jit(step, donate_argnums=0), (state, params, params)

    report = compile_for(build)
    moments = 2 * 4 * 2**20
    assert report.host_arguments == report.host_outputs == moments
    assert report.host_aliased == moments
    assert report.host_temp == 0
