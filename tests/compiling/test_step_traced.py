"""`jit_step` where `jax.jit` works: JAX's own caches and transformations."""

import contextlib
import copy
import pickle
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po


def loss(x):
    return (x**2).sum()


def in_shard_map(f):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("d",), auto)
    spec = jax.sharding.PartitionSpec("d")
    one = lambda x: f(x) * jnp.ones(1)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped(jnp.arange(16.0))


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, y: (y * jax.grad(f)(x),))
    return jax.jit(jax.grad(g))(jnp.ones(3))


TRANSFORMED = {
    "shard_map": in_shard_map,
    "custom_vjp": in_custom_vjp,
    "cond": lambda f: jax.lax.cond(True, f, lambda x: 0.0, jnp.ones(3)),
    "hessian": lambda f: jax.hessian(f)(jnp.ones(3)),
    "linearize": lambda f: jax.linearize(f, jnp.ones(3))[1](jnp.ones(3)),
    "jit": lambda f: jax.jit(lambda x: f(x) + 1)(jnp.ones(3)),
    "a constant in jit": lambda f: jax.jit(lambda: f(jnp.ones(3)))(),
    "grad": lambda f: jax.grad(f)(jnp.ones(3)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(3)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), c), 0.0, jnp.ones((2, 3))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(jnp.ones(3)),
    "jit_step": lambda f: po.jit_step(lambda x: f(x) + 1)(jnp.ones(3)),
}


@pytest.mark.parametrize("donated", [(), 0], ids=str)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_within_a_transformation(name, donated):
    """It is `jax.jit` there, and donates nothing, though it may be traced before."""
    step, run = po.jit_step(loss, donate_argnums=donated), TRANSFORMED[name]
    chex.assert_trees_all_equal(run(step), run(jax.jit(loss)))


def test_a_step_that_calls_itself():
    def again(x):
        return step(x[1:]) + x[0] if x.shape[0] > 1 else x[0]

    step, results = po.jit_step(again), []
    thread = threading.Thread(
        target=lambda: results.append(step(jnp.ones(3))), daemon=True
    )
    thread.start()
    thread.join(60)
    assert results == [3.0]


def test_the_configuration_and_the_mesh_are_in_the_key():
    def step(x):
        size = max(jax.sharding.get_abstract_mesh().size, 1)
        return x @ x / size

    ours, theirs = po.jit_step(step), jax.jit(step)
    x = jnp.ones((8, 8))
    for count in (2, 4):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((count,), ("d",), auto, devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            chex.assert_trees_all_equal(ours(x), theirs(x))
    chex.assert_trees_all_equal(ours(x), theirs(x))
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(jax.make_jaxpr(ours)(x))
    assert "HIGHEST" not in str(jax.make_jaxpr(ours)(x))


def test_settings_around_calls():
    """Each changes the program, and so does the return to the first."""
    x = np.arange(3, dtype=np.float64)
    cpus = jax.devices()
    settings = [
        contextlib.nullcontext,
        lambda: jax.enable_x64(True),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.default_device(cpus[1]),
        lambda: jax.default_device(cpus[2]),
        contextlib.nullcontext,
    ]
    step = lambda x: x * 2.5 + jax.random.normal(jax.random.key(0), (3,))
    ours, theirs = po.jit_step(step), jax.jit(step)
    for setting in settings:
        with setting():
            found, expected = ours(x), theirs(x)
        chex.assert_trees_all_equal(found, expected, strict=True)
        assert found.devices() == expected.devices()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        ours(np.full(3, np.nan))
    np.testing.assert_array_equal(ours(x), theirs(x))


def test_ordered_effects(capsys):
    @po.jit_step(donate_argnums=(0, 1))
    def step(x, y):
        jax.debug.print("sum {}", x.sum(), ordered=True)
        return y + 1, x + 1

    for _ in range(2):
        x, y = jnp.ones(5), jnp.ones(6)
        step(x, y)
        assert x.is_deleted() and y.is_deleted()
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 5.0\n" * 2
    with pytest.raises(po.DonationError, match="argument 0"):
        lost = lambda x, y: (jax.debug.print("{}", x[0], ordered=True), y + 1)
        po.jit_step(lost, jnp.ones(5), jnp.ones(6), donate_argnums=(0, 1))


def test_first_arguments_that_are_not_committed_compile_once(compilations):
    """A state on the host is committed, and so are a step's results."""
    state = jax.device_put(jnp.ones(8), jax.memory.Space.Host)
    params = jnp.ones(8)
    step = po.jit_step(lambda p, s, b: (p + b, s), donate_argnums=(0, 1))
    compilations.clear()
    for _ in range(3):
        old = params
        params, state = step(params, state, np.ones(8, np.float32))
        assert old.is_deleted()
    assert len(compilations) == 1


def test_copies():
    step = po.jit_step(loss)
    copies = copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))
    assert [made(jnp.ones(3)) for made in copies] == [3.0] * 3
