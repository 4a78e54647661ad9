"""Updates of some parameters: the ways to say which, and what is refused."""

import jax
import numpy as np
import pytest

import paged_optax as po
from helpers import activity
from helpers import small as trees
from helpers.activity import WAYS, adam, assert_partial, flag, nested, small, started
from helpers.reference import assert_equal


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
    _, jitted = activity.shared_updates(*paging.items())
    wanted = activity.full(state)
    gradients, params = nested(3), nested()
    for found in (
        tx.update(gradients, state, params, active=active),
        tx.update(gradients, state, params, active=activity.on_the_device(active)),
        jitted(gradients, state, params, active),
    ):
        assert_partial(found, state, gates, wanted=wanted)


def test_static_and_traced_together():
    tx, state = started()

    def update(gradients, state, params, on):
        active = {"x": {"v": True, "w": on}, "y": [False, on]}
        return tx.update(gradients, state, params, active=active)

    for call in (update, jax.jit(update)):
        for on, gates in ((True, (1, 1, 0, 1)), (False, (1, 0, 0, 0))):
            found = call(nested(3), state, nested(), flag(on))
            assert_partial(found, state, gates)


# Compiled quickly, by jax 0.12, the scalar's `nu` is rounded another way.
@pytest.mark.optimized
def test_computed_from_the_step():
    """A flag may be whatever a traced program computes: here a layer that is drawn."""
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


@pytest.mark.parametrize("budget", [None, 0], ids=["on the device", "on the host"])
def test_codes_wherever_they_are(budget):
    """Known only on the device, a gate leaves codes, or gives what is always given."""
    tx = po.paged_adamw_8bit(1e-2, device_budget=budget, min_paged_size=0)
    shapes = {"a": (70, 256), "b": (40, 512)}
    params, gradients, more = (trees.small(n, shapes=shapes) for n in range(3))
    update = jax.jit(lambda g, s, active: tx.update(g, s, params, active=active))
    state = jax.jit(tx.update)(gradients, tx.init(params), params)[1]
    always = update(more, state, True)
    updates, new = update(more, state, {"a": flag(True), "b": flag(False)})
    assert_equal(updates["a"], always[0]["a"])
    assert not np.asarray(updates["b"]).any()
    for name in ("mu", "nu"):
        before, after, wanted = (getattr(x[0], name) for x in (state, new, always[1]))
        jax.tree.map(assert_equal, after["a"], wanted["a"])
        jax.tree.map(assert_equal, after["b"], before["b"])
        assert np.any(np.asarray(before["a"].codes) != np.asarray(after["a"].codes))
