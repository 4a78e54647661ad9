"""Wrappers keep their contract, see `helpers.wrapped`, and Optax's other promises."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import apart, wrapped
from helpers.reference import arrays, assert_equal, kinds
from helpers.wrapped import CASES, PAGING, as_paged, itself


@pytest.fixture(scope="module")
def outcome():
    with apart.process(wrapped.__file__, wrapped.FLAGS) as ask:
        yield ask


@pytest.mark.quick("-po.MultiSteps / clip", "-po.apply_if_finite / clip", "inject")
@pytest.mark.parametrize("case", CASES)
def test_contract(outcome, case):
    """Optax's state and numbers, skips that skip, memory that stays: see `keep`."""
    assert outcome(case) == "kept"


@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("of", [optax, po], ids=["optax", "po"])
def test_has_updated_tells_the_micro_steps(of, jit):
    """`has_updated`, `inner_opt` and the object itself are Optax's."""
    inner = po.paged_sgd(1e-2, momentum=0.9, **PAGING)
    tx = of.MultiSteps(inner, 3)
    assert isinstance(tx, optax.MultiSteps)
    assert (tx.inner_opt.init, tx.inner_opt.update) == (inner.init, inner.update)
    transformation = tx.gradient_transformation()
    assert isinstance(transformation, optax.GradientTransformation)
    update = jax.jit(transformation.update) if jit else transformation.update
    params = arrays(shapes={"w": (70, 32)})
    state, seen = tx.init(params), []
    assert kinds(state.acc_grads) == ["device"]
    for _ in range(7):
        updates, state = update(params, state, params)
        seen.append(bool(tx.has_updated(state)))
        assert seen[-1] == bool(jnp.any(updates["w"] != 0))
    assert seen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_multi_steps_of_optax_is_warned_of(jit):
    """Unless the whole state stays on the device."""
    params, stay = arrays(shapes={"w": (70, 32)}), {"device_budget": None}
    for paging, of in ((PAGING, optax), (PAGING, po), (stay, optax)):
        tx = of.MultiSteps(po.paged_adamw(1e-2, **paging), 2)
        warned = paging is PAGING and of is optax
        context = contextlib.nullcontext()
        if warned:
            context = pytest.warns(UserWarning, match="use paged_optax.MultiSteps")
        with context:
            jit(tx.update)(params, tx.init(params), params)


@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
@pytest.mark.parametrize("finite", [True, False])
def test_micro_steps_are_zero_whatever_the_gradients(finite):
    """Zero as Optax documents, where its `0 * nan` hands a NaN to the parameters."""
    params = arrays(shapes={"w": (70, 32)})
    gradients = params if finite else jax.tree.map(lambda x: x * jnp.nan, params)
    for of in (po,) if not finite else (po, optax):
        tx = of.MultiSteps(po.paged_adamw(1e-2, **PAGING), 2)
        updates, _ = tx.update(gradients, tx.init(params), params)
        assert_equal(updates, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_jitted_inner_update_is_skipped_too(jit):
    """JAX's cache of traces must not hand out one that was made for another step."""
    inner = po.paged_sgd(1e-2, momentum=0.9, **PAGING)
    jitted = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    params, results = arrays(shapes={"w": (70, 32)}), []
    for tx in (po.MultiSteps(inner, 2), po.MultiSteps(jitted, 2)):
        state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
        for _ in range(4):
            _, state = update(params, state, params)
        results.append(state)
    assert_equal(*results)


def _flagged(inner):
    """A transformation whose state holds a Python scalar beside another's."""
    return optax.GradientTransformation(
        lambda params: {"flag": False, "inner": inner.init(params)},
        lambda updates, state, params=None: (
            (made := inner.update(updates, state["inner"], params))[0],
            {"flag": True, "inner": made[1]},
        ),
    )


RESTARTING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 9),
    "Python scalar": lambda of, tx: tx,
}


@pytest.mark.quick("-MultiSteps")
@pytest.mark.parametrize("name", RESTARTING)
def test_a_synchronisation_restarts_what_a_step_skips(name):
    """All of the state, although the wrapper in between skips the step."""
    shapes = {"w": (64, 128), "v": (300,)}
    params = optax.LookaheadParams.init_synced(arrays(shapes=shapes))

    def states(of, page):
        flag = _flagged if name == "Python scalar" else lambda inner: inner
        fast = RESTARTING[name](of, page(flag(optax.adam(1e-2))))
        tx = of.lookahead(fast, 3, 0.5, reset_state=True)
        state, update = tx.init(params), jax.jit(tx.update)
        for number in range(5):
            gradients = arrays(shapes=shapes, seed=number)
            if number == 2 and name == "apply_if_finite":
                gradients["v"] = gradients["v"].at[7].set(jnp.nan)
            updates, state = update(gradients, state, params)
            yield jax.tree.map(np.asarray, (updates, state))

    ours = states(po, as_paged)
    for wanted in states(optax, itself):
        found = next(ours)
        same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        jax.tree.map(same, found, wanted)


def test_a_bad_condition_is_refused_as_by_optax():
    """The condition is asked by Optax's own code, and so are its errors."""
    params = arrays(shapes={"w": (70, 32)})
    skip = lambda *_: (jnp.zeros(2, bool), ())
    for of in (optax, po):
        tx = of.MultiSteps(optax.sgd(1e-2), 2, should_skip_update_fn=skip)
        with pytest.raises(ValueError, match="should return a boolean scalar"):
            tx.update(params, tx.init(params), params)
