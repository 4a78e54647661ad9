"""Ten steps in every wrapper that people hold a model in: memory kinds, and numbers.

The oracle of the numbers is Optax's own optimizer in the same wrapper.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import paged_optax as po
from helpers import aot
from helpers.reference import kinds
from paged_optax.backend.memory import nbytes

INNER = optax.adamw(1e-2, weight_decay=0.1)
PAGES = {"page_size": "4KiB", "min_paged_size": "1KiB"}
STEPS = 10
X = jnp.linspace(-1, 1, 8 * 32).reshape(8, 32)


def loss_of(y):
    return jnp.mean((y - jnp.flip(X, 1)) ** 2)


# -- Flax NNX ----------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.LoRALinear(32, 64, lora_rank=16, rngs=rngs)
        self.b = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.gelu(self.a(x)))


def nnx_step(model, optimizer, x, wrt=nnx.Param):
    of = nnx.DiffState(0, wrt)
    gradients = nnx.grad(lambda model: loss_of(model(x)), argnums=of)(model)
    optimizer.update(model, gradients)


def with_nnx_jit(tx, wrt=nnx.Param, order=1):
    """`nnx.jit` returns what it was given in the order in which it was given."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    run = lambda x, *given: nnx_step(*given[::order], x, wrt)
    step = nnx.jit(run, donate_argnums=(1, 2))
    for _ in range(STEPS):
        step(X, *(model, optimizer)[::order])
    return nnx.state(model), nnx.state(optimizer)


# -- Flax Linen --------------------------------------------------------------------


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.gelu(linen.Dense(32)(x)), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x):
        stack = linen.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )
        return stack(name="layers")(x, None)[0]


def with_train_state(tx, module=None):
    module = module or linen.Sequential([linen.Dense(64), linen.gelu, linen.Dense(32)])
    params = module.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        loss = lambda params: loss_of(state.apply_fn({"params": params}, x))
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(STEPS):
        state = step(state, X)
    return state.params, state.opt_state


# -- Equinox -----------------------------------------------------------------------


def equinox_step(tx, model, state, x):
    gradients = eqx.filter_grad(lambda model: loss_of(jax.vmap(model)(x)))(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = tx.update(gradients, state, params)
    return eqx.apply_updates(model, updates), state


def equinox_start(tx):
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


def with_filter_jit(tx):
    model, state = equinox_start(tx)
    step = eqx.filter_jit(functools.partial(equinox_step, tx), donate="all")
    for _ in range(STEPS):
        model, state = step(model, state, X.copy())  # The batch is donated too.
    return eqx.filter(model, eqx.is_array), state


def equinox_in_jit_step(tx):
    """What is no array is closed over; any order, any donation."""
    model, state = equinox_start(tx)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state, params, x):
        model, state = equinox_step(tx, eqx.combine(params, static), state, x)
        return eqx.filter(model, eqx.is_inexact_array), state

    step = po.jit_step(step, state, params, X, donate_argnums=(0, 1))
    for _ in range(STEPS):
        params, state = step(state, params, X)
    return params, state


# -- Pytrees -----------------------------------------------------------------------


def plain_start(tx):
    draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape) / 8
    params = {"up": draw(0, (32, 64)), "down": draw(1, (64, 32))}
    return params, tx.init(params)


def plain_step(tx, params, state, x):
    loss = lambda p: loss_of(jax.nn.gelu(x @ p["up"]) @ p["down"])
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def with_jit(tx, jit=jax.jit):
    """The state first."""
    params, state = plain_start(tx)
    step = lambda state, params, x: plain_step(tx, params, state, x)
    step = jit(step, donate_argnums=(0, 1))
    for _ in range(STEPS):
        params, state = step(state, params, X)
    return params, state


WRAPPERS = {
    "nnx.Optimizer": with_nnx_jit,
    "nnx.Optimizer, LoRA": functools.partial(with_nnx_jit, wrt=nnx.LoRAParam),
    "nnx.Optimizer first": functools.partial(with_nnx_jit, order=-1),
    "TrainState": with_train_state,
    "TrainState, nn.scan": functools.partial(with_train_state, module=Scanned()),
    "Equinox": with_filter_jit,
    "Equinox, jit_step": equinox_in_jit_step,
    "pytree": with_jit,
    "pytree, jit_step": functools.partial(with_jit, jit=po.jit_step),
}


@pytest.mark.quick("nnx.Optimizer, LoRA", "-TrainState-")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ten_steps(wrapper):
    params, state = WRAPPERS[wrapper](po.paged(INNER, **PAGES))
    wanted_params, wanted_state = WRAPPERS[wrapper](INNER)
    # Of the optimizer's state only moments are as large as a parameter.
    sizes = [nbytes(x) for x in jax.tree.leaves(state)]
    assert kinds(state) == ["pinned_host" if n >= 1024 else "device" for n in sizes]
    assert kinds(state).count("pinned_host") >= 2
    assert set(kinds(params)) == {"device"}
    assert all(np.any(x) for x in jax.tree.leaves(state))
    for found, wanted in ((params, wanted_params), (state, wanted_state)):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            # Gradients are compiled into another program: other roundings.
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-7)


def test_lora_leaves_the_rest_alone():
    """Only adapters have moments, and only they move."""
    tx = po.paged(INNER, **PAGES)
    params, state = with_nnx_jit(tx, wrt=nnx.LoRAParam)
    before = nnx.state(Net(nnx.Rngs(0)))
    same = jax.tree.map(lambda x, y: bool((x == y).all()), before, params)
    assert jax.tree.leaves(nnx.filter_state(same, nnx.LoRAParam)) == [False, False]
    assert all(jax.tree.leaves(nnx.filter_state(same, nnx.Not(nnx.LoRAParam))))
    assert kinds(state).count("pinned_host") == 4


@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_donation_on_accelerators(compile_for, order):
    """What `nnx.jit` makes of a step, placements unstated: nothing is copied."""

    def build(mesh):
        device, host = aot.placements(mesh)
        tx = po.paged(INNER, page_size="64KiB", min_paged_size="16KiB")
        model = nnx.Linear(256, 512, use_bias=False, rngs=nnx.Rngs(0))
        parts = [model, nnx.Optimizer(model, tx, wrt=nnx.Param)]
        x = jax.ShapeDtypeStruct((8, 256), jnp.float32, sharding=device)
        if order == "optimizer first":
            parts.reverse()
        graphs, states = zip(*map(nnx.split, parts), strict=True)

        def step(first, second, x):
            made = [
                nnx.merge(*pair) for pair in zip(graphs, (first, second), strict=True)
            ]
            model, optimizer = made if order == "model first" else reversed(made)
            gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, gradients)
            return tuple(map(nnx.state, made))

        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=host if x.sharding.memory_kind == "pinned_host" else device,
            ),
            states,
        )
        return jax.jit(step, donate_argnums=(0, 1)), (*placed, x)

    report = compile_for(build)
    assert report.host_arguments == report.host_outputs == 2 * 256 * 512 * 4
    assert report.host_aliased == report.host_arguments
    assert report.host_temp == 0
    assert report.device_aliased >= 256 * 512 * 4
