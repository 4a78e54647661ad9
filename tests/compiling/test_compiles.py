"""A plain `jax.jit` or `nnx.jit` compiles a step once, when its arguments are tied.

JAX ties what a program with host arrays returns to its device; an argument that was not
tied at the first call would have the second compile the step again.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import paged_optax as po
from helpers.reference import ALIASES, SMALL_PAGES
from paged_optax.backend.memory import on_host

OTHERS = ["paged_adamw_8bit", "paged_lion_8bit", "paged_ademamix_8bit"]
SHAPES = {"w": (64, 64), "b": (8,)}


def draw(number):
    keys = jax.random.split(jax.random.key(number), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def programs(step: Any) -> int:
    """How many times a jitted function was compiled."""
    return getattr(step, "jitted_fn", step)._cache_size()


def tied(tree):
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


@pytest.mark.quick("-paged_adamw-", "paged_adamw_8bit")
@pytest.mark.parametrize(("number", "alias"), list(enumerate([*ALIASES, *OTHERS])))
def test_update_compiles_once(number, alias):
    _, options = ALIASES.get(alias, (None, {}))
    tx = getattr(po, alias)(1e-2, **options, **SMALL_PAGES)
    params = draw(0)
    state = tx.init(params)
    assert any(map(on_host, jax.tree.leaves(state)))
    step = jax.jit(tx.update, donate_argnums=(0, 1) if number % 2 else ())
    for step_number in range(3):
        _, state = step(draw(step_number), state, params)
    assert programs(step) == 1


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_step_compiles_once(donated):
    tx = po.paged_adamw(1e-2, per_parameter_steps=bool(donated), **SMALL_PAGES)
    params = tied(draw(0))
    state = tx.init(params)

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=donated)
    for number in range(3):
        params, state = step(params, state, draw(number))
    assert programs(step) == 1


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_nnx_step_compiles_once(codec, donated):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = po.paged_adamw(1e-2, codec=codec, **SMALL_PAGES)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model, optimizer = tied((model, optimizer))

    def step(model, optimizer, x):
        loss = lambda model: jnp.mean(model(x) ** 2)
        optimizer.update(model, nnx.grad(loss)(model))

    step = nnx.jit(step, donate_argnums=donated)
    for number in range(3):
        step(model, optimizer, draw(number)["w"])
    assert programs(step) == 1
    state: Any = optimizer.opt_state
    moments = jax.tree.leaves(state[0].mu)
    assert all(map(on_host, moments))


def test_new_state_is_where_committed_parameters_are():
    device = jax.devices()[1]
    params = jax.device_put(draw(0), device)
    state = po.paged_adamw(1e-2, **SMALL_PAGES).init(params)
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {device}
    assert all(x.committed for x in jax.tree.leaves(state))


def test_state_without_host_arrays_stays_free():
    """As Optax's own: it follows parameters wherever they are put later."""
    state = po.paged_adamw(1e-2, device_budget=None).init(draw(0))
    assert not any(x.committed for x in jax.tree.leaves(state))


def test_a_state_without_moments_is_tied():
    """As its parameters are: a plain step then compiles once, with noise as without."""
    params = tied({"w": jnp.ones((8, 16))})
    tx = po.paged(optax.noisy_sgd(1e-3, key=0), min_paged_size=0)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
