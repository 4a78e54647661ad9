"""What is inactive stands still, under every optimizer and in every wrapper."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import activity, reference
from helpers.activity import adam, flag, full, nested, on_the_device, small, started
from helpers.moments import filled
from helpers.reference import ALIASES, SMALL_PAGES, assert_equal, distances, kinds


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["static", "traced", "jit"])
def test_gradients_of_inactive_parameters_leave_no_trace(kind, value):
    """Neither in their own moments and updates nor in anybody else's."""
    active, gates = activity.WAYS["tree"]
    tx, state = started()
    wanted = full(state)
    gradients = nested(3)
    gradients["x"]["w"] = jnp.full_like(gradients["x"]["w"], value)
    gradients["y"][0] = jnp.full_like(gradients["y"][0], value)
    if kind == "jit":
        found = activity.shared_updates()[1](gradients, state, nested(), active)
    else:
        active = active if kind == "static" else on_the_device(active)
        found = tx.update(gradients, state, nested(), active=active)
    activity.assert_partial(found, state, gates, wanted=wanted)


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
    update = lambda s, active: tx.update(params, s, params, active=active)[1]
    update = update if kind == "static" else jax.jit(update)
    off = dict.fromkeys(params, False)
    for active, steps in ((off, 0), (off | {"v": True}, 1), (False, 1), (True, 2)):
        state = update(state, active)
        assert counts(state) == [steps, steps]


def test_inactive_state_is_the_same_memory_when_donated():
    """A donated host buffer that is not updated is handed through, not copied."""
    tx, params = adam(), small()
    update = lambda s, on: tx.update(params, s, params, active=dict.fromkeys("wvs", on))
    step = jax.jit(lambda s, on: update(s, on)[1], donate_argnums=0)
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
    ulps, _ = activity.ULPS.get(alias, (0, 8))
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
        scales, mixed = reference.largest([start, wanted]), _mixed(start, wanted)
        assert max(distances(mixed, found[1], scales).values(), default=0) <= ulps
    updates, new = update(dict.fromkeys(params, False))
    assert not any(x.any() for x in updates.values())
    reference.assert_equal(new, state)


def _mixed(old, new):
    """The new state, but for parameter "v" the old one."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, y: x if path[-1:] == (jax.tree_util.DictKey("v"),) else y,
        old,
        new,
    )


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
    state, update = filled(tx.init(params)), jax.jit(tx.update)
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
    mu, before = second.inner_opt_state[0].mu, state.inner_opt_state[0].mu
    assert_equal(mu["w"], before["w"])
    assert distances(mu["v"], before["v"])
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
    for moves in (False, True):
        updates, state = tx.update(params, state, params)
        assert {bool(x.any()) for x in updates.values()} == {moves}
