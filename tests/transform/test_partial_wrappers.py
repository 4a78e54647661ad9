"""Updates of some parameters, within other transformations."""

import jax
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers.activity import adam, flag, on_the_device, small
from helpers.reference import SMALL_PAGES, assert_equal, distances, kinds

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
