"""Updates of some parameters: what is inactive stands still and moves no byte."""

import collections
import functools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot
from helpers.programs import (
    COMPILERS,
    MIB,
    assert_in_place,
    on_device,
    shapes_of,
    shardings,
    state_on,
    updating,
)
from helpers.reference import (
    ALIASES,
    SMALL_PAGES,
    arrays,
    assert_equal,
    distances,
    kinds,
    largest,
)
from helpers.small import counting
from paged_optax.engine.geometry import Kept, cut

HOST, DEVICE = "pinned_host", "device"
#: Ulps by which state and updates may differ, for the reasons that `test_numbers`
#: gives: with the flags of `exact` there is no difference, for any alias. A step count
#: that is wrong by one moves them by thousands.
ULPS = {
    "paged_sgd": (1, 8),
    "paged_rmsprop": (4, 8),
    "paged_lars": (4, 8),
    "paged_adafactor": (4, 8),
    "paged_muon": (0, 128),
}
#: Several pages, one page, and less than a page.
SHAPES = {"w": (70, 128), "v": (300,), "s": ()}
adam = functools.partial(po.paged_adam, 1e-2, **SMALL_PAGES)
flag = jnp.asarray


def small(seed=0):
    return arrays(shapes=SHAPES, seed=seed)


def nested(seed=0):
    w, v, s = small(seed).values()
    return {"x": {"v": v, "w": w}, "y": [s, 2 * w]}


@functools.cache
def started(**paging):
    """A transformation after two full steps, and its state: all moments not zero."""
    tx = adam(**paging)
    state, update = tx.init(nested()), jax.jit(tx.update)
    for seed in (1, 2):
        _, state = update(nested(seed), state, nested())
    return tx, state


def full(state, seed=3):
    """What Optax's own update makes of a state with every parameter active."""
    inner = optax.adam(1e-2)
    on_device = jax.device_put(state, jax.memory.Space.Device)
    return jax.jit(inner.update)(nested(seed), on_device, nested())


def assert_partial(found, state, gates, seed=3, wanted=None):
    """Active parameters are Optax's; inactive ones have not moved by a bit."""
    (updates, new), (right, right_state) = found, wanted or full(state, seed)
    assert jax.tree.structure(updates) == jax.tree.structure(right)
    assert kinds(new) == kinds(state)
    for gate, update, one in zip(
        gates, jax.tree.leaves(updates), jax.tree.leaves(right), strict=True
    ):
        assert (update.shape, update.dtype) == (one.shape, one.dtype)
        if gate:
            np.testing.assert_allclose(update, one, rtol=1e-6)
        else:
            assert not np.asarray(update).any()
    for name in ("mu", "nu"):
        before, after, one = (
            jax.tree.leaves(getattr(x[0], name)) for x in (state, new, right_state)
        )
        for gate, *each in zip(gates, before, after, one, strict=True):
            assert_equal(each[1], each[2 if gate else 0])
    assert int(new[0].count) == int(state[0].count) + any(gates)


# -- ways to say it -------------------------------------------------------------

#: The parameters are, in order: x/v, x/w, y/0, y/1.
WAYS = {
    "all": (True, (1, 1, 1, 1)),
    "none": (False, (0, 0, 0, 0)),
    "tree": ({"x": {"v": True, "w": False}, "y": [False, True]}, (1, 0, 0, 1)),
    "prefix": ({"x": False, "y": True}, (0, 0, 1, 1)),
    "mixed": ({"x": {"v": False, "w": True}, "y": False}, (0, 1, 0, 0)),
    "numpy bools": ({"x": np.bool_(True), "y": np.bool_(False)}, (1, 1, 0, 0)),
    "numpy arrays": ({"x": np.array(False), "y": np.array(True)}, (0, 0, 1, 1)),
    "from numpy": (
        {"x": dict(zip("vw", np.array([True, False]), strict=True)), "y": True},
        (1, 0, 1, 1),
    ),
}


def on_the_device(active):
    return jax.tree.map(jnp.asarray, active)


@pytest.mark.quick("tree-{}")
@pytest.mark.parametrize(
    ("way", "paging"),
    [*((way, {}) for way in WAYS), ("tree", {"device_budget": "40KiB"})],
    ids=str,
)
def test_ways_to_say_what_is_active(way, paging):
    """Static or traced, one bool or a tree or a prefix: eager and jitted alike."""
    active, gates = WAYS[way]
    tx, state = started(**paging)
    _, jitted = shared_updates(*paging.items())
    wanted = full(state)
    gradients, params = nested(3), nested()
    for found in (
        tx.update(gradients, state, params, active=active),
        tx.update(gradients, state, params, active=on_the_device(active)),
        jitted(gradients, state, params, active),
    ):
        assert_partial(found, state, gates, wanted=wanted)


@functools.cache
def shared_updates(*paging):
    tx, _ = started(**dict(paging))
    return tx, jax.jit(lambda g, s, p, active: tx.update(g, s, p, active=active))


@pytest.mark.parametrize("way", ["none", "mixed"])
def test_static_under_jit(way):
    active, gates = WAYS[way]
    tx, state = started()
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, active=active))
    assert_partial(update(nested(3), state, nested()), state, gates)


def test_static_and_traced_together():
    tx, state = started()

    def update(gradients, state, params, on):
        active = {"x": {"v": True, "w": on}, "y": [False, on]}
        return tx.update(gradients, state, params, active=active)

    for call in (update, jax.jit(update)):
        for on, gates in ((True, (1, 1, 0, 1)), (False, (1, 0, 0, 0))):
            found = call(nested(3), state, nested(), flag(on))
            assert_partial(found, state, gates)


def test_computed_from_the_step():
    """A flag may be whatever a traced program computes: here a layer that is drawn."""
    # Without them XLA:CPU of jax 0.12 rounds the scalar's `nu` another way here.
    jax.config.update("jax_disable_most_optimizations", False)
    tx, state = started()

    @jax.jit
    def step(gradients, state, params, key):
        drawn = jax.random.permutation(key, 2)[0]
        active = {"x": drawn == 0, "y": drawn == 1}
        return drawn, tx.update(gradients, state, params, active=active)

    seen = set()
    for seed in range(6):
        drawn, found = step(nested(3), state, nested(), jax.random.key(seed))
        seen.add(int(drawn))
        gates = (1, 1, 0, 0) if drawn == 0 else (0, 0, 1, 1)
        assert_partial(found, state, gates)
    assert seen == {0, 1}


def test_none_is_everything():
    tx, state = started()
    found = tx.update(nested(3), state, nested(), active=None)
    assert_partial(found, state, (1, 1, 1, 1))


@pytest.mark.parametrize(
    "active",
    [
        {"x": True},
        {"x": True, "y": True, "z": True},
        {"x": {"v": True}, "y": True},
        {"x": True, "y": (True, True)},
        {"x": True, "y": [True]},
        {"x": {"v": {"deep": True}, "w": True}, "y": True},
        [True, True],
        [],
        {"x": None, "y": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_another_structure_is_refused(active, jit):
    tx, state = started()
    update = lambda: tx.update(nested(3), state, nested(), active=active)
    with pytest.raises(ValueError) as error:
        (jax.jit(update) if jit else update)()
    for word in ("active=", "prefix", "bool"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [1, 0, 1.0, "yes", jnp.int32(1), jnp.ones((), jnp.float32), jnp.ones(1, bool)]
    + [np.array([True, False]), np.int64(1), jnp.ones((), jnp.uint8)],
    ids=repr,
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_what_is_no_bool_is_refused(wrong, traced):
    if traced and isinstance(wrong, str):
        return
    tx, state = started()
    update = lambda wrong: tx.update(
        nested(3), state, nested(), active={"x": wrong, "y": True}
    )
    with pytest.raises(TypeError) as error:
        (jax.jit(update) if traced else update)(wrong)
    for word in ("active['x']", "is not a bool", "shape ()"):
        assert word in str(error.value)


def test_parameters_that_are_none():
    params = {"a": small()["w"], "b": None, "c": {"d": None, "e": small()["v"]}}
    tx = adam()
    state = tx.init(params)
    for active in (
        {"a": False, "b": True, "c": True},
        {"a": False, "b": None, "c": {"d": None, "e": True}},
        {"a": flag(False), "b": False, "c": flag(True)},
    ):
        updates, new = tx.update(params, state, params, active=active)
        assert not updates["a"].any()
        assert updates["c"]["e"].any()
        assert updates["b"] is None
        assert_equal(new[0].mu["a"], state[0].mu["a"])


def test_a_bare_array():
    params, tx = small()["w"], adam()
    state = tx.init(params)
    for on in (False, flag(False)):
        updates, new = tx.update(params, state, params, active=on)
        assert not updates.any()
        assert_equal(new, state)
    updates, new = tx.update(params, state, params, active=flag(True))
    assert updates.any()
    assert int(new[0].count) == 1


# -- what is inactive -----------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["static", "traced", "jit"])
def test_gradients_of_inactive_parameters_leave_no_trace(kind, value):
    """Neither in their own moments and updates nor in anybody else's."""
    active, gates = WAYS["tree"]
    tx, state = started()
    wanted = full(state)
    gradients = nested(3)
    gradients["x"]["w"] = jnp.full_like(gradients["x"]["w"], value)
    gradients["y"][0] = jnp.full_like(gradients["y"][0], value)
    if kind == "jit":
        found = shared_updates()[1](gradients, state, nested(), active)
    else:
        active = active if kind == "static" else on_the_device(active)
        found = tx.update(gradients, state, nested(), active=active)
    assert_partial(found, state, gates, wanted=wanted)


def remembering():
    """Moments that no gradient enters, or that are one; two change places."""

    def init(params):
        like = lambda value: jax.tree.map(lambda x: jnp.full_like(x, value), params)
        own = jax.tree.map(lambda x: jnp.zeros((), jnp.int32), params)
        names = ("previous", "decays", "first", "second")
        return {name: like(n) for n, name in enumerate(names)} | {"own": own}

    def update(updates, state, params=None):
        del params
        new = {
            "previous": updates,
            "decays": jax.tree.map(lambda x: 0.5 * x, state["decays"]),
            "first": state["second"],
            "second": state["first"],
            "own": jax.tree.map(lambda n: n + 1, state["own"]),
        }
        return jax.tree.map(lambda u, x: u - x, updates, state["previous"]), new

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("kind", ["static", "traced"])
@pytest.mark.parametrize(
    "inner",
    [remembering(), optax.optimistic_gradient_descent(0.1)],
    ids=["remembering", "optimistic"],
)
def test_moments_that_no_gradient_enters_stand_still_too(kind, inner):
    """A parameter's moment is one by its place in the state, however it is made."""
    tx, params = po.paged(inner, **SMALL_PAGES), small()
    _, state = tx.update(small(1), tx.init(params), params)
    _, wanted = inner.update(small(1), inner.init(params), params)
    full = inner.update(small(2), wanted, params)
    active = {"w": False, "v": True, "s": False}
    for on in (active, dict.fromkeys(active, False), dict.fromkeys(active, True)):
        flags = on if kind == "static" else on_the_device(on)
        updates, new = tx.update(small(2), state, params, active=flags)
        assert kinds(new) == kinds(state)
        for name in active:
            stays = (jax.tree.map(jnp.zeros_like, params), wanted)
            right = full if on[name] else stays
            found = distances(
                [right[0][name], _of_one(right[1], name)],
                [updates[name], _of_one(new, name)],
            )
            assert found == {}, (name, on, found)


def _of_one(state, name):
    """A parameter's leaves of a state."""
    return [
        x
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
        if path[-1] == jax.tree_util.DictKey(name)
    ]


def test_a_parameter_called_count():
    """What all parameters share is none of one parameter's for its name."""
    params = collections.namedtuple("Parameters", "count w s")(*small().values())
    tx = adam()
    active = type(params)(count=False, w=True, s=False)
    _, state = tx.update(params, tx.init(params), params, active=active)
    assert int(state[0].count) == 1


@pytest.mark.parametrize("kind", ["static", "traced"])
def test_shared_counts_stand_still_when_nothing_is_active(kind):
    """Adam's count and the schedule's, else one step for all."""
    tx = po.paged_adam(optax.linear_schedule(1e-2, 0.0, 4), **SMALL_PAGES)
    params, state = small(), tx.init(small())
    counts = lambda state: [
        int(x) for x in jax.tree.leaves(state) if x.dtype == "int32"
    ]
    update = jax.jit(lambda s, active: tx.update(params, s, params, active=active)[1])
    if kind == "static":
        update = lambda s, active: tx.update(params, s, params, active=active)[1]
    off = dict.fromkeys(params, False)
    state = update(state, off)
    assert counts(state) == [0, 0]
    state = update(state, off | {"v": True})
    assert counts(state) == [1, 1]
    state = update(state, False)
    assert counts(state) == [1, 1]
    state = update(state, True)
    assert counts(state) == [2, 2]


def test_inactive_state_is_the_same_memory_when_donated():
    """A donated host buffer that is not updated is handed through, not copied."""
    tx, params = adam(), small()
    step = jax.jit(
        lambda s, on: tx.update(params, s, params, active={"w": on, "v": on, "s": on})[
            1
        ],
        donate_argnums=0,
    )
    state = tx.init(params)
    pointers = lambda state: [
        x.unsafe_buffer_pointer() for x in (state[0].mu["w"], state[0].nu["w"])
    ]
    before = pointers(state)
    for on in (False, True, False):
        state = step(state, on)
        assert kinds(state) == kinds(tx.init(params))
        assert pointers(state) == before


# -- every optimizer ------------------------------------------------------------


@pytest.mark.quick("-paged_adamw-")
@pytest.mark.parametrize("alias", [x for x in ALIASES if not x.endswith("_32bit")])
def test_every_alias(alias):
    """One parameter off, the others as Optax has them; then all of them off."""
    optimizer, kwargs = ALIASES[alias]
    inner = optimizer(1e-2, **kwargs)
    tx = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    params, gradients = small(), small(1)
    right = jax.jit(inner.update)
    _, start = right(small(2), inner.init(params), params)
    placed = jax.tree.map(lambda x: x.sharding, po.abstract_state(tx, params))
    state = jax.device_put(start, placed)
    updates, wanted = right(gradients, start, params)
    update = jax.jit(lambda active: tx.update(gradients, state, params, active=active))
    active = {"w": True, "v": False, "s": True}
    ulps, _ = ULPS.get(alias, (0, 8))
    runs = [update(active)]
    if alias in ("paged_adamw", "paged_lamb"):
        runs.append(tx.update(gradients, state, params, active=active))
    for found in runs:
        assert kinds(found[1]) == kinds(state)
        assert not found[0]["v"].any()
        chex.assert_trees_all_close(
            {k: found[0][k] for k in "ws"},
            {k: updates[k] for k in "ws"},
            rtol=2e-3 if alias == "paged_muon" else 1e-5,
            atol=1e-7,
        )
        scales, mixed = largest([start, wanted]), _mixed(start, wanted)
        assert max(distances(mixed, found[1], scales).values(), default=0) <= ulps
    updates, new = update(dict.fromkeys(params, False))
    assert not any(x.any() for x in updates.values())
    assert_equal(new, state)


def _mixed(old, new):
    """The new state, but for parameter "v" the old one."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, y: x if path[-1:] == (jax.tree_util.DictKey("v"),) else y,
        old,
        new,
    )


# -- within other transformations -----------------------------------------------

AROUND = {
    "chain": lambda tx: optax.chain(optax.scale(2.0), tx, optax.scale(0.5)),
    "masked": lambda tx: optax.masked(tx, {"w": True, "v": True, "s": False}),
    "partition": lambda tx: optax.partition(
        {"adam": tx, "sgd": po.paged_sgd(1e-2, momentum=0.9, **SMALL_PAGES)},
        {"w": "adam", "v": "adam", "s": "sgd"},
    ),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=0.5),
    "apply_if_finite": lambda tx: po.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: po.conditionally_transform(
        tx, lambda step: True
    ),
    "MultiSteps": lambda tx: po.MultiSteps(tx, 1),
}


@pytest.mark.parametrize("name", AROUND)
def test_active_reaches_through_wrappers(name):
    tx = AROUND[name](adam())
    params = small()
    state = tx.init(params)
    state = jax.tree.map(
        lambda x: (
            jax.device_put(np.full(x.shape, 0.5, x.dtype), x.sharding) if x.ndim else x
        ),
        state,
    )
    update = jax.jit(tx.update)
    active = {"w": False, "v": True, "s": True}
    updates, new = update(small(2), state, params, active=active)
    assert not updates["w"].any()
    assert updates["v"].any()
    assert kinds(new) == kinds(state)
    for field in ("mu", "nu"):
        old, now = (optax.tree.get_all_with_path(x, field) for x in (state, new))
        for (_, before), (_, after) in zip(old, now, strict=True):
            assert_equal(after["w"], before["w"])
            assert distances(after["v"], before["v"])


def test_active_within_a_micro_step():
    """Only on the last micro-step does anything move, and then the active ones."""
    tx = po.MultiSteps(adam(), 2)
    params = small()
    state, update = tx.init(params), jax.jit(tx.update)
    active = {"w": flag(False), "v": flag(True), "s": flag(True)}
    _, first = update(small(1), state, params, active=active)
    assert_equal(first.inner_opt_state, state.inner_opt_state)
    updates, second = update(small(2), first, params, active=active)
    assert_equal(second.inner_opt_state[0].mu["w"], state.inner_opt_state[0].mu["w"])
    assert distances(
        second.inner_opt_state[0].mu["v"], state.inner_opt_state[0].mu["v"]
    )
    assert not updates["w"].any()
    assert updates["v"].any()


def joined():
    return po.paged(optax.flatten(optax.adam(1e-2)), **SMALL_PAGES)


@pytest.mark.parametrize("kind", ["static", "traced", "jit"])
def test_parts_of_leaves_laid_end_to_end_are_refused(kind):
    """`optax.flatten` makes one leaf of all: it is active or not."""
    tx, params = joined(), small()
    state = tx.init(params)
    active = {"w": True, "v": False, "s": True}
    if kind == "traced":
        active = on_the_device(active)
    update = lambda active: tx.update(params, state, params, active=active)
    with pytest.raises(ValueError, match=r"active=.*optax\.flatten"):
        (jax.jit(update) if kind == "jit" else update)(active)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("kind", ["static", "numpy", "traced", "jit"])
def test_one_bool_for_leaves_laid_end_to_end(kind, on):
    tx, params = joined(), small()
    state = tx.init(params)
    update = lambda active: tx.update(params, state, params, active=active)
    make = {"static": bool, "numpy": np.bool_, "traced": flag, "jit": flag}[kind]
    updates, new = (jax.jit(update) if kind == "jit" else update)(make(on))
    assert all(bool(x.any()) == on for x in updates.values())
    assert bool(distances(new, state)) == on
    assert kinds(new) == kinds(state)


def test_micro_steps_around_leaves_laid_end_to_end():
    """The gate of a wrapper is one bool for all, eager too."""
    tx, params = po.MultiSteps(joined(), 2), small()
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert not any(x.any() for x in updates.values())
    updates, state = tx.update(params, state, params)
    assert all(x.any() for x in updates.values())


def test_transformations_across_parameters_are_refused_as_ever():
    tx = po.paged(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    params = small()
    with pytest.raises(po.CrossLeafError, match="clip_by_global_norm"):
        tx.update(
            params, tx.init(params), params, active={"w": True, "v": 0 < 0, "s": True}
        )


@pytest.mark.parametrize("kind", ["static", "traced"])
def test_codes_of_inactive_parameters_stand_still(kind):
    """Neither decoded nor drawn again: the very codes and scales."""
    tx = adam(codec={"mu": "bfloat16", "nu": "dynamic_int8"})
    params = small()
    _, state = tx.update(params, tx.init(params), params)
    active = {"w": False, "v": True, "s": True}
    active = active if kind == "static" else on_the_device(active)
    updates, new = tx.update(small(1), state, params, active=active)
    assert kinds(new) == kinds(state)
    assert not updates["w"].any()
    assert_equal(po.page_in(new, "w"), po.page_in(state, "w"))
    assert distances(po.page_in(new, "v"), po.page_in(state, "v"))


# -- a step count each ----------------------------------------------------------

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)
NAMES = ("w", "v", "s")


@functools.cache
def alone(alias):
    """Plain Optax for one parameter: its transformation and jitted update."""
    optimizer, kwargs = ALIASES[alias]
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
    _, kwargs = ALIASES[alias]
    paging = SMALL_PAGES | {"per_parameter_steps": True}
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
        active = dict(zip(NAMES, map(bool, gates), strict=True))
        updates, state = update(small(100 + number), state, params, active)
        new = optax.apply_updates(params, updates)
        for name, (start, change, wanted, _) in now.items():
            if change is None:
                assert not updates[name].any()
                continue
            scale = largest([start, change, wanted])
            apart = distances([wanted], [new[name]], [scale])
            assert max(apart.values(), default=0) <= ulps, (alias, name)
    assert "pinned_host" in kinds(state)
    for i, name in enumerate(NAMES):
        states = [past[3] for past in right[name]]
        assert int(po.get_step(state, name)) == sum(gates[i] for gates in activity)
        ours = dict(_of(state, name))
        for (path, wanted), (_, scale) in zip(
            _of(states[-1], name), _of(largest(states), name), strict=True
        ):
            apart = distances([wanted], [ours.pop(path)], [scale])
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
    "paged_muon",
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


def test_own_steps_are_optax_when_all_are_active():
    """Counts apart, the state is that of one count for all."""
    tx, shared = own_steps("paged_adamw")[0], optax.adamw(SCHEDULE, weight_decay=0.1)
    state, wanted = tx.init(small()), shared.init(small())
    for number in range(3):
        _, state = jax.jit(tx.update)(small(number), state, small())
        _, wanted = jax.jit(shared.update)(small(number), wanted, small())
    for field in ("mu", "nu"):
        assert_equal(getattr(state[0], field), getattr(wanted[0], field))
    assert {int(x) for x in jax.tree.leaves(state[0].count)} == {3}
    assert jax.tree.structure(state[0].count) == jax.tree.structure(small())


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
    assert_equal(new[0].mu["w"], state[0].mu["w"])
    assert set(kinds(new)) == {DEVICE}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_hyperparameters_injected_inside_are_refused(jit):
    """They are one value for all, and follow from the count."""
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)
    tx = po.paged(inner, per_parameter_steps=True, **SMALL_PAGES)
    state = tx.init(small())
    update = lambda: tx.update(small(), state, small())
    with pytest.raises(ValueError) as error:
        (jax.jit(update) if jit else update)()
    for word in ("per_parameter_steps=True", "learning_rate", "inject_hyperparams"):
        assert word in str(error.value)
    assert "around paged(...)" in str(error.value)


def test_hyperparameters_injected_around():
    def build(learning_rate):
        paging = SMALL_PAGES | {"per_parameter_steps": True}
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
    tx = po.paged(inner, per_parameter_steps=True, **SMALL_PAGES)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    _, state = tx.update({"w": params["w"] * jnp.nan}, state, params)
    assert int(jax.tree.leaves(state.notfinite_count)[0]) == 1
    assert int(po.get_step(state, "w")) == 1


# -- programs -------------------------------------------------------------------


def test_new_flags_are_no_new_program():
    """Whichever parameters are active: traced flags are one program."""
    inner, traces = counting(optax.adam(1e-2))
    tx = po.paged(inner, **SMALL_PAGES)
    params = small()
    state = jax.jit(tx.init)(params)
    update = jax.jit(lambda s, active: tx.update(params, s, params, active=active)[1])
    for number in range(8):
        active = {name: flag(bool(number >> i & 1)) for i, name in enumerate(NAMES)}
        state = update(state, active)
    assert len(traces) == 1
    assert update._cache_size() == 1


def test_new_flags_are_no_new_program_eager(caplog):
    tx, params = po.paged_adam(1e-2, **SMALL_PAGES), small()
    state = tx.init(params)

    def step(number):
        active = {name: flag(bool(number >> i & 1)) for i, name in enumerate(NAMES)}
        return tx.update(params, state, params, active=active)

    step(0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for number in range(8):
            step(number)
    assert not [x for x in caplog.messages if re.match("Compiling|Finished XLA", x)]


def test_one_program_for_each_static_pattern(caplog):
    tx, params = po.paged_adam(1e-2, **SMALL_PAGES), small()
    state = tx.init(params)
    patterns = [(1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1), (1, 0, 0)]
    compiled = lambda: len([x for x in caplog.messages if x.startswith("Compiling")])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for pattern in patterns:
            active = dict(zip(NAMES, map(bool, pattern), strict=True))
            _, state = tx.update(params, state, params, active=active)
        assert compiled() == len(set(patterns)) == 3
        tx.update(params, state, params)  # all of them, said in another way
    assert compiled() == 3


def loops(tx, active):
    params = small()
    jaxpr = jax.make_jaxpr(lambda g, s: tx.update(g, s, params, active=active))(
        params, tx.init(params)
    )
    found, stack = [], [jaxpr.jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            if eqn.primitive.name == "while":
                found.append({x.aval.shape for x in eqn.invars})
                continue
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                stack += [inner] if hasattr(inner, "eqns") else []
    return found


def test_a_leaf_that_is_off_is_not_in_the_program():
    """Known when traced: no loop, and no transfer, of the leaf."""
    everything = loops(adam(), True)
    assert {shape for shapes in everything for shape in shapes} >= {(70, 128), (300,)}
    others = [shapes for shapes in everything if (70, 128) not in shapes]
    for off in (False, np.bool_(False)):
        some = loops(adam(), {"w": off, "v": True, "s": True})
        assert some == others
        assert not any((70, 128) in shapes for shapes in some)
        assert loops(adam(), off) == []


# -- compiled for accelerators --------------------------------------------------

#: Whole pages, a smaller last page, and a leaf that is one page.
COMPILED = {"even": (1024, 1024), "odd": (305, 1024), "single": (256, 1024)}


def gated(tx, params, static=None):
    """`updating` with a traced flag for each parameter; `static` overrides some."""
    static = static or {}

    def build(mesh):
        device, _ = aot.placements(mesh)
        gradients, state = on_device(mesh, params), state_on(mesh, tx, params)
        flags = {
            name: jax.ShapeDtypeStruct((), jnp.bool_, sharding=device)
            for name in params
            if name not in static
        }

        def update(flags, gradients, state, params):
            return tx.update(gradients, state, params, active=flags | static)

        jitted = jax.jit(
            update,
            donate_argnums=(1, 2),
            out_shardings=(shardings(gradients), shardings(state)),
        )
        return jitted, (flags, gradients, state, gradients)

    return build


class Program:
    """A compiled program's text: its computations, and who calls whom."""

    def __init__(self, hlo):
        self.computations, self.entry = {}, ""
        for block in hlo.split("\n\n"):
            lines = block.strip().splitlines()
            header = lines and re.match(r"(ENTRY )?%([\w.-]+) \(", lines[0])
            if header:
                self.computations[header[2]] = lines[1:]
                self.entry = header[2] if header[1] else self.entry

    def instruction(self, computation, name):
        """An instruction's opcode and operands."""
        pattern = re.compile(rf"\s*(ROOT )?%{re.escape(name)} = ")
        line = next(x for x in self.computations[computation] if pattern.match(x))
        call = re.search(r" ([a-z][\w-]*)\(((?:%[^()]*)?|\d+)\)(?:,|$)", line)
        assert call, line
        return call[1], re.findall(r"%([\w.-]+)", call[2]), line

    def host_transfers(self):
        """The computation of each transfer to or from host memory."""
        for name, lines in self.computations.items():
            for line in lines:
                if re.search(r" [\w-]+-start\(", line) and "S(5)" in line:
                    yield name

    def flag_above(self, computation):
        """The Boolean argument that bounds the outermost loop around a computation."""
        while True:
            called = re.compile(rf"=%{re.escape(computation)}[,\s]")
            computation, call = next(
                (caller, line)
                for caller, lines in self.computations.items()
                for line in lines
                if called.search(line)
            )
            if computation == self.entry:
                return self._bound(call)

    def _bound(self, call):
        loop = re.search(r" while\(%([\w.-]+)\), condition=%([\w.-]+)", call)
        assert loop, f"not inside a loop: {call[:200]}"
        _, inits, _ = self.instruction(self.entry, loop[1])
        compared = [
            int(re.search(r"index=(\d+)", x)[1])
            for x in self.computations[loop[2]]
            if " get-tuple-element(" in x
        ]
        roots = [x for x in self.computations[loop[2]] if "ROOT" in x]
        assert re.search(r" compare\(| fusion\(", roots[0])
        flags = {self._argument(inits[index]) for index in compared} - {None}
        assert len(flags) == 1, call[:200]
        return flags.pop()

    def _argument(self, name):
        """The Boolean argument that an instruction converts, if it does."""
        while True:
            opcode, operands, line = self.instruction(self.entry, name)
            if opcode == "parameter":
                return name if " = pred[]" in line else None
            if opcode not in ("convert", "copy", "fusion", "bitcast", "copy-done"):
                return None
            if len(operands) != 1:
                return None
            (name,) = operands


@pytest.mark.compiler
@COMPILERS
def test_a_flag_is_the_trip_count_of_all_that_travels(compile_for):
    """Every transfer is in a loop from 0 to a parameter's own flag: 0 moves no byte."""
    params = shapes_of(COMPILED)
    report = compile_for(gated(po.paged_adamw(1e-3, page_size="1MiB"), params))
    assert_in_place(report)
    program = Program(report.hlo)
    found = [program.flag_above(name) for name in program.host_transfers()]
    count = {
        flag: sum(f"__{flag}__" in name or f"_{flag}_" in name for name in found)
        for flag in params
    }
    # mu and nu, in and out; the odd leaf has a last page beside its loop's.
    assert count == {"even": 4, "odd": 8, "single": 4}
    assert len(found) == sum(count.values())
    assert not re.search(r"S\(5\)\S* copy\(", report.hlo)


@pytest.mark.compiler
@COMPILERS
def test_flags_cost_no_scratch(compile_for):
    """Gated leaves are in place as others are, and one at a time."""
    params = shapes_of({f"leaf{i}": (4096, 1024) for i in range(6)})
    tx = po.paged_adamw(1e-3, page_size="1MiB", per_parameter_steps=True)
    report, plain = compile_for(gated(tx, params)), compile_for(updating(tx, params))
    assert_in_place(report)
    assert report.host_arguments == plain.host_arguments == 2 * 6 * 16 * MIB
    assert report.device_temp <= plain.device_temp + MIB


@pytest.mark.compiler
@pytest.mark.parametrize("page_size", ["1MiB", "4MiB"])
def test_addresses_under_flags(page_size):
    """Every transfer of the H200 program covers exactly its page."""
    shape, leaves = (4096, 1024), 3
    params = shapes_of({f"leaf{i}": shape for i in range(leaves)})
    report = aot.h200(gated(po.paged_adamw(1e-3, page_size=page_size), params))
    page_bytes = 4 * cut(shape, (Kept(4),), int(page_size[0]) * MIB).rows.entries
    found = aot.descriptors(report.hlo)
    assert {key[2:] for key in found} == {(0, page_bytes)}
    assert sum(n for key, n in found.items() if key[0] == "read") == 2 * leaves
    assert sum(n for key, n in found.items() if key[0] == "write") == 2 * leaves


@pytest.mark.compiler
@COMPILERS
def test_what_is_off_is_compiled_away(compile_for):
    """A leaf off when traced: its moments are handed through, and nothing travels."""
    params = shapes_of(COMPILED)
    tx = po.paged_adamw(1e-3, page_size="1MiB")
    report = compile_for(gated(tx, params, {"odd": False, "even": True}))
    assert report.host_temp == 0
    assert report.host_aliased == report.host_outputs
    assert report.transfers == 4 + 4
    transfers = Program(report.hlo).host_transfers()
    assert sum(1 for _ in transfers) == 4 + 4
    nothing = compile_for(gated(tx, params, dict.fromkeys(params, False)))
    assert nothing.transfers == 0
    assert nothing.host_temp == 0
    assert nothing.host_aliased == nothing.host_outputs
