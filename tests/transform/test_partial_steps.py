"""Parameters that count their own steps: each is alone under Optax."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import reference
from helpers.activity import NAMES, ULPS, adam, chosen, flag, on_the_device, small
from helpers.small import DEVICE

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)


@functools.cache
def alone(alias):
    """Plain Optax for one parameter: its transformation and jitted update."""
    optimizer, kwargs = reference.ALIASES[alias]
    inner = optimizer(SCHEDULE, **kwargs)
    return inner, jax.jit(inner.update), jax.jit(optax.apply_updates)


def trajectories(alias, activity):
    """Each parameter under plain Optax, given only the steps in which it is active."""
    inner, update, apply = alone(alias)
    made = {}
    for i, name in enumerate(NAMES):
        params = {name: small()[name]}
        state, past = inner.init(params), []
        for number, gates in enumerate(activity):
            start, updates = params, None
            if gates[i]:
                gradient = {name: small(100 + number)[name]}
                updates, state = update(gradient, state, params)
                params = apply(params, updates)
            past.append((start[name], updates and updates[name], params[name], state))
        made[name] = past
    return made


@functools.cache
def own_steps(alias):
    _, kwargs = reference.ALIASES[alias]
    paging = reference.SMALL_PAGES | {"per_parameter_steps": True}
    tx = getattr(po, alias)(SCHEDULE, **kwargs, **paging)
    return tx, jax.jit(lambda g, s, p, a: tx.update(g, s, p, active=a))


def assert_own_trajectories(alias, activity, update=None):
    tx, jitted = own_steps(alias)
    update = update or jitted
    state_ulps, ulps = ULPS.get(alias, (0, 8))
    right = trajectories(alias, activity)
    state = tx.init(small())
    for number, gates in enumerate(activity):
        now = {name: right[name][number] for name in NAMES}
        params = {name: now[name][0] for name in NAMES}
        active = chosen(gates)
        updates, state = update(small(100 + number), state, params, active)
        new = optax.apply_updates(params, updates)
        for name, (start, change, wanted, _) in now.items():
            if change is None:
                assert not updates[name].any()
                continue
            scale = reference.largest([start, change, wanted])
            apart = reference.distances([wanted], [new[name]], [scale])
            assert max(apart.values(), default=0) <= ulps, (alias, name)
    assert "pinned_host" in reference.kinds(state)
    for i, name in enumerate(NAMES):
        states = [past[3] for past in right[name]]
        assert int(po.get_step(state, name)) == sum(gates[i] for gates in activity)
        ours = dict(_of(state, name))
        for (path, wanted), (_, scale) in zip(
            _of(states[-1], name), _of(reference.largest(states), name), strict=True
        ):
            apart = reference.distances([wanted], [ours.pop(path)], [scale])
            assert max(apart.values(), default=0) <= state_ulps, (name, path)
        assert not ours


def _of(state, name):
    """A parameter's arrays: those under its name, and the counts that it has alone."""
    key = jax.tree_util.DictKey(name)
    others = [jax.tree_util.DictKey(x) for x in NAMES if x != name]
    return [
        (jax.tree_util.keystr([p for p in path if p != key]), x)
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
        if path[-1] not in others
    ]


ACTIVITY = ((1, 1, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1))
#: Each way to use a step count: bias corrections, two of them, decays, a schedule.
COUNTING = [
    "paged_adamw",
    "paged_ademamix",
    # Its iteration of products makes every rounding larger: as XLA rounds by default.
    pytest.param("paged_muon", marks=pytest.mark.optimized),
    *(
        pytest.param(alias, marks=pytest.mark.slow)
        for alias in ("paged_nadamw", "paged_lion", "paged_rmsprop", "paged_adafactor")
    ),
]


@pytest.mark.parametrize("alias", COUNTING)
def test_each_parameter_is_alone_under_optax(alias):
    """Bias corrections and schedules follow the steps that a parameter has had."""
    assert_own_trajectories(alias, ACTIVITY)


@hypothesis.settings(max_examples=5, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=8, max_size=14)
)
def test_any_activity_gives_each_its_own_trajectory(activity):
    assert_own_trajectories("paged_adamw", activity)


@pytest.mark.parametrize("kind", ["static", "eager and traced"])
def test_each_parameter_is_alone_eager(kind):
    tx, _ = own_steps("paged_adamw")
    make = on_the_device if kind != "static" else lambda active: active
    assert_own_trajectories(
        "paged_adamw",
        ACTIVITY,
        lambda g, s, p, active: tx.update(g, s, p, active=make(active)),
    )


def test_counts_of_resident_parameters_stand_still_too():
    tx = adam(per_parameter_steps=True, device_budget=None)
    state = tx.init(small())
    active = {"w": flag(False), "v": True, "s": flag(True)}
    _, new = tx.update(small(), state, small(), active=active)
    assert {name: int(x) for name, x in new[0].count.items()} == {
        "w": 0,
        "v": 1,
        "s": 1,
    }
    reference.assert_equal(new[0].mu["w"], state[0].mu["w"])
    assert set(reference.kinds(new)) == {DEVICE}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_hyperparameters_injected_inside_are_refused(jit):
    """They are one value for all, and follow from the count."""
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)
    tx = po.paged(inner, per_parameter_steps=True, **reference.SMALL_PAGES)
    state = tx.init(small())
    update = lambda: tx.update(small(), state, small())
    with pytest.raises(ValueError) as error:
        (jax.jit(update) if jit else update)()
    for word in ("per_parameter_steps=True", "learning_rate", "inject_hyperparams"):
        assert word in str(error.value)
    assert "around paged(...)" in str(error.value)


def test_hyperparameters_injected_around():
    def build(learning_rate):
        paging = reference.SMALL_PAGES | {"per_parameter_steps": True}
        return po.paged_adamw(learning_rate, **paging)

    tx = optax.inject_hyperparams(build)(learning_rate=SCHEDULE)
    state, update = tx.init(small()), jax.jit(tx.update)
    for on in (True, False, True):
        active = {"w": flag(on), "v": flag(True), "s": flag(True)}
        _, state = update(small(), state, small(), active=active)
    assert [int(po.get_step(state, name)) for name in NAMES] == [2, 3, 3]
    # Around, the schedule has one count: it follows the calls.
    np.testing.assert_allclose(state.hyperparams["learning_rate"], SCHEDULE(2))


def test_a_state_with_one_count_for_all_is_refused():
    tx = adam(per_parameter_steps=True)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match="state"):
            update(small(), adam().init(small()), small())


def test_a_count_that_follows_from_a_gradient():
    """Inside, for a single parameter, `apply_if_finite` is within one leaf."""
    params = {"w": small()["w"]}
    inner = optax.apply_if_finite(optax.adam(1e-2), 2)
    tx = po.paged(inner, per_parameter_steps=True, **reference.SMALL_PAGES)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    _, state = tx.update({"w": params["w"] * jnp.nan}, state, params)
    assert int(jax.tree.leaves(state.notfinite_count)[0]) == 1
    assert int(po.get_step(state, "w")) == 1
