"""Master weights of which the host keeps 8 bits: FlashOptim's, rounded to nearest."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, PartitionSpec

import paged_optax as po
from helpers import meshes
from helpers.coded import ALL_PAGED
from helpers.programs import bfloat16, square
from paged_optax.transform.remainders import with_master_remainders

_INT8 = {"master_remainders": "int8"}


def wide(x):
    """Values in float32, as NumPy has them."""
    return np.asarray(x).astype(np.float32)


def weights(shape=(32, 256), seed=0):
    random = np.random.default_rng(seed)
    return {"w": jnp.asarray(random.normal(size=shape) * 0.02, jnp.bfloat16)}


def scanned(tx, params, signal, steps=1000):
    """Steps with gradients of a constant part and of noise that is drawn anew."""
    shape = params["w"].shape
    sign = jnp.sign(jax.random.normal(jax.random.key(1), shape))

    def step(given, number):
        key = jax.random.fold_in(jax.random.key(2), number)
        gradients = {"w": signal * sign + jax.random.normal(key, shape)}
        updates, state = tx.update(gradients, given[1], given[0])
        return (optax.apply_updates(given[0], updates), state), None

    run = lambda *given: jax.lax.scan(step, given, jnp.arange(steps))[0]
    return jax.jit(run)(params, tx.init(params))


@pytest.mark.parametrize(
    ("signal", "codec"), [(1.0, None), (0.1, None), (0.1, "dynamic_int8")]
)
def test_a_thousand_steps_of_adam(signal, codec):
    """At a rate of 1e-5: 2% of the way of float32 weights at most, and unbiased."""
    params, adam = weights(), optax.adam(1e-5)
    stored = functools.partial(po.paged, adam, device_budget=None, codec=codec)
    masters = optax.tree.cast(params, jnp.float32)
    plain = adam if codec is None else stored()
    wanted = wide(scanned(plain, masters, signal)[0]["w"])
    found = po.master_weights(*scanned(stored(**_INT8), params, signal))["w"]
    way = wanted - wide(params["w"])
    error = found - wanted
    assert np.linalg.norm(error) <= 0.02 * np.linalg.norm(way)
    assert abs(np.mean(error * np.sign(way))) <= 1e-3 * np.mean(abs(way))


def test_masters_are_rounded_to_nearest():
    """Half of a 256th of bfloat16's unit at most, by float64's arithmetic."""
    params = weights()
    tx = with_master_remainders(optax.sgd(1.0), jnp.int8)
    random = np.random.default_rng(1)
    old = wide(params["w"])
    wanted = (old * random.uniform(0.8, 1.25, old.shape)).astype(np.float32)
    gradients = {"w": jnp.asarray(old - wanted)}
    updates, state = tx.update(gradients, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert state.remainder_int8["w"].dtype == jnp.int8
    found = np.asarray(po.master_weights(params, state)["w"], np.float64)
    unit = 2.0 ** (np.floor(np.log2(abs(wanted.astype(np.float64)))) - 15)
    # Close to a tie between two numbers of bfloat16, 127 units are the most.
    error = abs(found - wanted) / unit
    assert np.mean(error > 0.502) < 0.005
    assert error.max() <= 1.01


def train(tx, params, state, steps, first=0):
    update = jax.jit(tx.update)
    for number in range(first, first + steps):
        gradients = jax.tree.map(
            lambda x, number=number: jax.device_put(
                weights(x.shape, number + 7)["w"], x.sharding
            ),
            params,
        )
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_resumed(codec):
    """From NumPy's arrays after two steps: bit for bit as at once."""
    tx = po.paged_adamw(1e-3, codec=codec, **_INT8, **ALL_PAGED)
    params = weights()
    wanted, state = train(tx, params, tx.init(params), 4)
    half = train(tx, params, tx.init(params), 2)
    params, saved = jax.tree.map(np.asarray, half)
    params = jax.tree.map(jnp.asarray, params)
    kept = po.place_state(tx, saved, params)
    assert kept.remainder_int8["w"].sharding.memory_kind == "pinned_host"
    found, kept = train(tx, params, kept, 2, first=2)
    np.testing.assert_array_equal(found["w"], wanted["w"])
    np.testing.assert_array_equal(kept.remainder_int8["w"], state.remainder_int8["w"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(axis_type):
    """Each device has its part of the remainders; bit for bit as on one device."""
    tx = po.paged_adamw(1e-3, codec="dynamic_int8", **_INT8, **ALL_PAGED)
    params = weights((64, 512))
    wanted, one = train(tx, params, tx.init(params), 3)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        params = meshes.divided(params, mesh, {"w": PartitionSpec("x")})
        found, state = train(tx, params, tx.init(params), 3)
    assert state.remainder_int8["w"].sharding.spec[0] == "x"
    np.testing.assert_array_equal(wide(found["w"]), wide(wanted["w"]))
    np.testing.assert_array_equal(state.remainder_int8["w"], one.remainder_int8["w"])


def test_bytes():
    """Each way, with moments in eight bits."""
    plan = po.plan(po.paged_adamw_8bit(1e-3, **_INT8), bfloat16(square(1)))
    assert plan.host_bytes <= 3.05 * 4096**2
    assert "int8" in str(plan)


def test_a_tpu_keeps_them_on_the_device(monkeypatch):
    """It slices no bytes in host memory; the moments are paged as without them."""
    monkeypatch.setattr("paged_optax.backend.memory.platform", lambda: "tpu")
    params = bfloat16(square(1))
    plan = po.plan(po.paged_adamw_8bit(1e-3, **_INT8), params)
    (kept,) = (x for x in plan.moments if x.dtype == "int8")
    assert "master_remainders=True" in kept.refused
    assert not kept.on_host
    assert (
        plan.scratch_bytes == po.plan(po.paged_adamw_8bit(1e-3), params).scratch_bytes
    )


def test_small_rates():
    """A constant rate is known, and a schedule's is not."""
    with pytest.warns(UserWarning, match="learning_rate=1e-07 with master_remainders"):
        po.paged_adamw(1e-7, **_INT8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.paged_adamw(learning_rate=1e-6, **_INT8)
        po.paged_adamw(1e-7, master_remainders=True)
        po.paged_adamw(optax.constant_schedule(1e-7), **_INT8)


@pytest.mark.parametrize("bits", [True, "int8"])
def test_a_state_of_other_bits_is_refused(bits, tmp_path):
    """By `update`, and by Orbax, which casts what has one name."""
    params, other = weights(), "int8" if bits is True else True
    make = lambda bits: po.paged_adamw(1e-3, master_remainders=bits, **ALL_PAGED)
    tx, state = make(bits), make(other).init(params)
    names = r"state\.remainder(_int8)?\['w'\].*state\.remainder(_int8)?\['w'\]"
    with pytest.raises(ValueError, match=names):
        tx.update(params, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="remainder_int8"):
            checkpointer.restore(tmp_path / "saved", po.abstract_state(tx, params))


def test_vectors_keep_16_bits():
    """Scales of norms begin at 1, of which a step of 1e-5 is too small for 8 bits."""
    tx = po.paged_adamw(1e-5, weight_decay=0, **_INT8)
    params = {"scale": jnp.ones(256, jnp.bfloat16)}
    state, gradients = tx.init(params), {"scale": jnp.ones(256, jnp.bfloat16)}

    @jax.jit
    def run(params, state):
        def step(carry, _):
            updates, state = tx.update(gradients, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, state), length=1000)[0]

    masters = po.master_weights(*run(params, state))["scale"]
    np.testing.assert_allclose(1 - masters, 0.01, rtol=0.02)
