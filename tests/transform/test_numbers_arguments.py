"""The same numbers as Optax, whatever arguments come from outside."""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import exact
from helpers.reference import (
    SMALL_PAGES,
    arrays,
    assert_equal,
    distances,
    kinds,
    largest,
    steps,
)

# Strict dtypes are for what Optax writes strictly: not `decay**count` of its adams.
pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict_ranks")]


def _counting(inner, counts):
    def update(updates, state, params=None, **extra_args):
        counts.append(None)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.slow
def test_members_of_an_ensemble():
    """Made by `vmap`, or stacked, which is what moments on the host are updated by."""
    shapes = {"w": (3, 64, 64), "v": (3, 300)}
    params, gradients = arrays(shapes=shapes), arrays(shapes=shapes, seed=1)
    inner, tx = optax.adam(1e-2), po.paged_adam(1e-2, **SMALL_PAGES)
    resident = po.paged_adam(1e-2, device_budget=None)
    start = jax.vmap(inner.init)(params)
    wanted = jax.jit(jax.vmap(inner.update))(gradients, start, params)[1]
    state = jax.vmap(resident.init)(params)
    found = jax.jit(jax.vmap(resident.update))(gradients, state, params)[1]
    assert_equal(found, wanted)
    state = jax.vmap(tx.init)(params)
    assert_equal(state, start)
    assert "pinned_host" in kinds(state)
    with pytest.raises(ValueError, match=r"stacked parameters, without vmap"):
        jax.eval_shape(jax.vmap(tx.update), gradients, state, params)
    found = jax.jit(tx.update)(gradients, tx.init(params), params)[1]
    assert_equal(found[0].mu, wanted[0].mu)


@pytest.mark.slow
def test_schedule_free_around_paging():
    """Its parameters for evaluation are computed of what stays on the device."""
    params = arrays(shapes={"w": (70, 128)})
    results = []
    for make, paging in ((optax.adamw, {}), (po.paged_adamw, SMALL_PAGES)):
        tx = optax.contrib.schedule_free(make(1e-2, b1=0.0, **paging), 1e-2)
        *_, (_, new, state) = steps(tx, params, 3)
        results.append(optax.contrib.schedule_free_eval_params(state, new))
    assert "pinned_host" in kinds(state)
    # A difference of the parameters and of z: no more exact than these are.
    scale = largest([new, state.z, results[0]])
    assert max(distances(*results, scale).values(), default=0) <= 8
    tx = po.paged(optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2), **SMALL_PAGES)
    with pytest.raises(ValueError, match="memory_space of all inputs passed to"):
        optax.contrib.schedule_free_eval_params(tx.init(params), params)


@pytest.mark.parametrize("moving", [False, True], ids=["resident", "paged"])
def test_one_array_given_for_two_moments(moving):
    """Each place of a state gets its own new value, though one array be in several."""
    shapes = {"w": (70, 128), "v": (300,)}
    params, gradients = arrays(shapes=shapes), arrays(shapes=shapes, seed=1)
    space = jax.memory.Space.Host if moving else jax.memory.Space.Device

    def update(tx, space, state):
        zeros = jax.device_put(jax.tree.map(jnp.zeros_like, params), space)
        state = (state[0]._replace(mu=zeros, nu=zeros), *state[1:])
        return tx.update(gradients, state, params)[1]

    inner, paged = optax.adam(1e-2), po.paged_adam(1e-2, **SMALL_PAGES)
    paged = paged if moving else po.paged_adam(1e-2, device_budget=None)
    state = inner.init(params)
    device = jax.memory.Space.Device
    right = jax.jit(lambda state: update(inner, device, state))(state)
    found = jax.jit(lambda state: update(paged, space, state))(state)
    assert_equal(found, right)


@pytest.mark.quick("around")
@pytest.mark.parametrize("where", ["inside", "around"])
def test_injected_learning_rate_changes_between_steps(where):
    traced = []

    def build(page):
        lion = lambda learning_rate: optax.lion(learning_rate)  # noqa: E731
        if where == "inside":
            return page(_counting(optax.inject_hyperparams(lion)(1e-2), traced))
        return optax.inject_hyperparams(
            lambda learning_rate: page(_counting(lion(learning_rate), traced))
        )(learning_rate=1e-2)

    def final(tx):
        params = arrays()
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        traced.clear()
        for number in range(4):
            rate = jnp.float32(1e-2 / (number + 1))
            state = optax.tree.set(state, learning_rate=rate)
            updates, state = update(arrays(seed=number), state, params)
            params = optax.apply_updates(params, updates)
        assert len(traced) == 1
        return params, state

    wanted = final(build(lambda inner: inner))
    found = final(build(lambda inner: po.paged(inner, **SMALL_PAGES)))
    assert "pinned_host" in kinds(found[1])
    assert_equal(found, wanted)


def test_extra_arguments_of_every_type():
    def update(updates, state, params=None, *, value, scale, flag, name, **extra_args):
        del params, extra_args
        assert flag is True and name == "x"
        rate = (value * scale).astype(jnp.float32)
        return jax.tree.map(lambda u: u * rate, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    tx = po.paged(inner, **SMALL_PAGES)
    params = arrays()
    updates, _ = tx.update(
        params,
        tx.init(params),
        params,
        value=jnp.float32(3.0),
        scale=2.0,
        flag=True,
        name="x",
    )
    assert_equal(updates, jax.tree.map(lambda x: x * 6.0, params))


def test_new_value_of_an_extra_argument_is_no_new_program(caplog):
    tx = po.paged(exact.scale_by_value(), **SMALL_PAGES)
    params = arrays()
    state = tx.init(params)
    for value in (1.0, 2.0, 3.0):
        with jax.log_compiles(value > 1.0):
            _, state = tx.update(params, state, params, value=value)
    assert "Compiling" not in caplog.text
    assert distances(state, tx.init(params)) != {}
