"""What no paged state can do: errors that name the way out, and the ways out."""

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import paged_optax as po

ROOT = Path(__file__).parents[2]
MESSAGES = (ROOT / "docs" / "troubleshooting.md").read_text()
PARAMS = {"a": jnp.linspace(-1, 1, 32 * 32).reshape(32, 32)}


def paged(**settings):
    return po.paged_adam(0.1, page_size=1024, min_paged_size=0, **settings)


def loss_after(tx, state, cut=lambda x: x):
    """What one step on the squares' gradients leads to; of the learning rate too."""

    def loss(params):
        gradients = jax.tree.map(lambda x: 2 * x, cut(params))
        updates, _ = tx.update(gradients, state, cut(params))
        return optax.tree.norm(optax.apply_updates(params, updates), squared=True)

    return loss


@pytest.mark.quick("jit")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "derive",
    [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]],
    ids=["grad", "jvp"],
)
def test_derivatives(derive, jit):
    """Refused through host moments; right on the device, and where they are cut."""
    compiled = jax.jit if jit else lambda f: f
    plain, ours, resident = optax.adam(0.1), paged(), paged(device_budget=None)
    state, there = ours.init(PARAMS), resident.init(PARAMS)
    with pytest.raises(ValueError, match=r"no derivative.*device_budget=None"):
        compiled(derive(loss_after(ours, state)))(PARAMS)
    cases = [(resident, there, lambda x: x), (ours, state, jax.lax.stop_gradient)]
    for tx, state, cut in cases:
        wanted = derive(loss_after(plain, plain.init(PARAMS), cut))(PARAMS)
        found = compiled(derive(loss_after(tx, state, cut)))(PARAMS)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), found, wanted
        )


def test_derivative_by_the_learning_rate():
    state = paged().init(PARAMS)
    make = lambda rate: po.paged_adam(rate, page_size=1024, min_paged_size=0)
    step = lambda rate: optax.tree.sum(make(rate).update(PARAMS, state, PARAMS)[0])
    with pytest.raises(ValueError, match="no derivative"):
        jax.grad(step)(0.1)


@contextlib.contextmanager
def refused_by_jax(kind=ValueError):
    """The message is among those that the reference explains."""
    with pytest.raises(kind) as error:
        yield
    found = re.findall(r"^\| `([^`]+)`, by JAX \|", MESSAGES, re.M)
    assert any(message in str(error.value) for message in found)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_arithmetic_on_a_state(jit):
    tx, plain = paged(), optax.adam(0.1)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    _, wanted = plain.update(PARAMS, plain.init(PARAMS), PARAMS)
    norm = jax.jit(optax.tree.norm) if jit else optax.tree.norm
    with refused_by_jax():
        norm(state)
    norm = jax.jit(
        lambda s: optax.tree.norm(jax.device_put(s, jax.memory.Space.Device))
    )
    np.testing.assert_allclose(norm(state), optax.tree.norm(wanted), rtol=1e-6)


def test_a_state_put_on_a_device():
    state = paged().init(PARAMS)
    with refused_by_jax():
        jax.device_put(state, jax.devices()[0])
    moved = jax.device_put(state, jax.memory.Space.Device)
    assert moved[0].mu["a"].sharding.memory_kind == "device"


@pytest.mark.parametrize(
    "use",
    [
        jnp.zeros_like,
        jnp.histogram,
        optax.tree.zeros_like,
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: jax.debug.print("{}", x),
    ],
    ids=["zeros_like", "histogram", "tree.zeros_like", "where", "debug.print"],
)
def test_a_moment_in_a_function_of_jax(use):
    moment = paged().init(PARAMS)[0].mu["a"]
    with refused_by_jax():
        use(moment)
    use(jax.device_put(moment, jax.memory.Space.Device))
    assert np.histogram(moment)[0].sum() == moment.size
    assert not jnp.isnan(moment).any() and float(moment.mean()) == 0


def test_forward_mode_in_a_jit():
    loss = jax.jit(lambda x: po.linear_cross_entropy(x, x, jnp.arange(3)).sum())
    with refused_by_jax(TypeError):
        jax.jvp(loss, (jnp.eye(3),), (jnp.eye(3),))


@pytest.mark.parametrize("axis_type", list(AxisType)[:2], ids=str)
def test_a_state_made_in_a_jit_that_knows_no_mesh(axis_type):
    """JAX makes it on one device. Each use says what to do, and that works."""
    mesh = jax.make_mesh((8,), ("data",), (axis_type,))
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec("data")))
    tx, plain = paged(), optax.adam(0.1)
    wanted, _ = plain.update(PARAMS, plain.init(PARAMS))
    update = jax.jit(tx.update)
    with jax.set_mesh(mesh):
        found, _ = update(params, jax.jit(tx.init)(params))
    np.testing.assert_allclose(found["a"], wanted["a"], rtol=1e-5)
    if axis_type is AxisType.Explicit:
        with refused_by_jax():
            jax.jit(tx.init)(params)
        return
    state = jax.jit(tx.init)(params)
    with refused_by_jax():
        update(params, state)
    way_out = r"by paged_optax.place_state\(tx, state, params\)"
    with pytest.raises(ValueError, match=way_out):
        tx.update(params, state)
    with pytest.raises(ValueError, match=way_out):
        po.jit_step(tx.update, params, state, donate_argnums=(1,))
    found, _ = update(params, po.place_state(tx, state, params))
    np.testing.assert_allclose(found["a"], wanted["a"], rtol=1e-5)


def test_pmap():
    """It keeps no host memory: a state there goes to the device, or is refused."""
    count = jax.local_device_count()
    gradients = jax.tree.map(lambda x: jnp.stack([x] * count), PARAMS)
    tx = paged()
    step = jax.pmap(lambda g, s: tx.update(g, s)[0], in_axes=(0, None))
    with refused_by_jax():
        step(gradients, tx.init(PARAMS))
    state = jax.pmap(tx.init)(gradients)
    with pytest.warns(UserWarning, match="in device memory"):
        updates, _ = jax.pmap(tx.update)(gradients, state)
    plain = optax.adam(0.1)
    wanted, _ = plain.update(PARAMS, plain.init(PARAMS))
    np.testing.assert_allclose(updates["a"][-1], wanted["a"], rtol=1e-5)
