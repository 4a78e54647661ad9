"""Master weights: the host keeps 16 bits of them, or 8, and parameters the others."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import paged_optax as po
from helpers import aot, meshes, reference, step_model
from helpers.checkpoints import standard
from helpers.coded import ALL_PAGED, NAMES
from helpers.programs import BOTH_WAYS, MIB, assert_in_place, bfloat16, square, updating
from paged_optax.transform.remainders import with_master_remainders


def wide(x):
    """Values in float32, as NumPy has them."""
    return np.asarray(x).astype(np.float32)


def masters_of(params, remainder):
    """Masters by the definition: so many float32 numbers above the parameter."""
    bits = wide(params).view(np.int32).astype(np.int64)
    position = np.where(bits < 0, -(2**31) - bits, bits) + np.asarray(remainder)
    bits = np.where(position < 0, -(2**31) - position, position).astype(np.int32)
    return bits.view(np.float32)


def is_tie(masters):
    """Whether masters are exactly between two numbers of bfloat16."""
    return (masters.view(np.uint32) & 0xFFFF) == 0x8000


def expressible(old, new):
    """Where differences are exact: within a factor of two (Sterbenz)."""
    low, high = np.minimum(abs(old), abs(new)), np.maximum(abs(old), abs(new))
    return (old * new > 0) & (high <= 2 * low)


@pytest.mark.parametrize("exponent", [-30, 0])
def test_any_master_is_kept(exponent):
    """One step to a stated number keeps its every bit, of both signs."""
    random = np.random.default_rng(0)
    size = (64, 1024)
    params = random.uniform(1, 2, size) * 2.0**exponent * random.choice([-1, 1], size)
    params = {"w": jnp.asarray(params, jnp.bfloat16)}
    old = wide(params["w"])
    wanted = (old * random.uniform(0.6, 1.9, size)).astype(np.float32)
    # By sgd at rate 1 the gradient is the way to go.
    tx = po.paged(optax.sgd(1.0), master_remainders=True, **ALL_PAGED)
    gradients = {"w": jnp.asarray(old - wanted)}
    updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert state.remainder["w"].sharding.memory_kind == "pinned_host"
    found = np.asarray(po.master_weights(params, state)["w"])
    np.testing.assert_array_equal(found, masters_of(params["w"], state.remainder["w"]))
    exact = old - (old - wanted) == wanted
    assert np.mean(exact) > 0.99
    kept = exact & ~is_tie(wanted) & expressible(old, wanted)
    assert np.mean(kept) > 0.9
    np.testing.assert_array_equal(found[kept], wanted[kept])
    rounded = wide(jnp.asarray(wanted, jnp.bfloat16))
    np.testing.assert_array_equal(wide(params["w"])[kept], rounded[kept])


def test_each_step_is_optaxs():
    """100 steps: of the masters before, Optax in float32 makes the masters after.

    But at ties, and where no update in bfloat16 leads to them, as where signs change:
    there within 1/256 of the step. Parameters are the masters rounded.
    """
    random = np.random.default_rng(0)
    shape = (64, 128)
    tx = po.paged_adamw(1e-3, master_remainders=True, **ALL_PAGED)
    params = {"w": jnp.asarray(random.normal(size=shape) * 0.02, jnp.bfloat16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def plain(masters, moments, gradients):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
        updates, _ = optax.adamw(1e-3).update(wide, moments, masters)
        return optax.apply_updates(masters, updates)

    others = 0
    for _ in range(100):
        gradients = {"w": jnp.asarray(random.normal(size=shape), jnp.bfloat16)}
        before, old = po.master_weights(params, state), wide(params["w"])
        moments = jax.device_put(state.inner_state, jax.memory.Space.Device)
        wanted = np.asarray(plain(before, moments, gradients)["w"])
        params, state = step(params, state, gradients)
        found = np.asarray(po.master_weights(params, state)["w"])
        rounded = wide(jnp.asarray(wanted, jnp.bfloat16))
        kept = expressible(old, rounded) & ~is_tie(wanted)
        # XLA contracts a product and a sum in one of two programs only.
        np.testing.assert_allclose(found[kept], wanted[kept], rtol=2.0**-22, atol=1e-9)
        assert np.mean(wide(params["w"])[kept] != rounded[kept]) < 1e-3
        step_size = np.abs(old - wanted)[~kept]
        assert np.all(np.abs(found - wanted)[~kept] <= step_size * 2.0**-8)
        others += np.sum(~kept)
    assert others < 0.05 * 100 * params["w"].size


def test_small_steps_add_up():
    """As with masters in full, and as in float32."""
    steps = 100

    def trained(dtype, **masters):
        params = {"w": jnp.ones((64, 128), dtype)}
        tx = po.paged(optax.sgd(1e-4), **masters, **ALL_PAGED)
        state = tx.init(params)
        for _ in range(steps):
            gradients = {"w": jnp.full((64, 128), 0.5, dtype)}
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    wanted = trained(jnp.float32)[0]["w"]
    found = po.master_weights(*trained(jnp.bfloat16, master_remainders=True))["w"]
    np.testing.assert_array_max_ulp(np.asarray(found), np.asarray(wanted), 1)
    copies = po.master_weights(*trained(jnp.bfloat16, master_dtype="float32"))["w"]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(copies))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    "compile_for", [pytest.param(aot.h200, marks=BOTH_WAYS), aot.v5e]
)
def test_bytes_and_the_links_time(compile_for):
    """Four bytes a parameter with moments in eight bits; at the link's rate."""
    tx = po.paged_adamw_8bit(1e-3, master_remainders=True)
    params = bfloat16(square(4))
    plan = po.plan(tx, params)
    assert plan.host_bytes == 4.03125 * 4 * 4096**2
    report = compile_for(updating(tx, params))
    assert_in_place(report)
    assert report.device_temp <= 32 * MIB
    trips = len(params) * [plan.moments[0].pages]
    assert step_model.traffic(report.hlo, trips) == plan.link_bytes
    assert step_model.over_floor(report.hlo, plan.host_bytes, trips) <= 1.10


def test_a_scalar_counts_no_steps():
    """Its remainder is an integer too, as a step count is."""
    params = {"scale": jnp.asarray(2.66, jnp.bfloat16), "w": jnp.ones((64, 128))}
    for own in (False, True):
        tx = po.paged_adamw(1e-3, master_remainders=True, per_parameter_steps=own)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        assert int(po.get_step(state, "scale")) == 2
        assert po.master_weights(params, state)["w"] is params["w"]


@pytest.mark.quick("dynamic_int8")
@pytest.mark.parametrize(
    "how",
    [
        *({"codec": name} for name in NAMES),
        {"codec": {"mu": "bfloat16"}},
        {"codec": {"one": "dynamic_int4"}},
        {"per_parameter_steps": True},
        {"codec": "dynamic_int8", "per_parameter_steps": True},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_in_float32(how, jit):
    """The state is that of the parameters, whatever dtype the gradients have."""
    random = np.random.default_rng(0)
    shapes = {"one": (64, 80), "two": (65, 67), "scale": (65,)}
    draw = lambda shape: jnp.asarray(random.uniform(1, 2, shape), jnp.bfloat16)
    old = {name: draw(shape) for name, shape in shapes.items()}
    gradients = reference.arrays(jnp.float32, 1, shapes)
    tx = po.paged_adamw(1e-3, master_remainders=True, **how, **ALL_PAGED)
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update(gradients, tx.init(old), old)
    found = po.master_weights(optax.apply_updates(old, updates), state)
    plain, masters = optax.adamw(1e-3), optax.tree.cast(old, jnp.float32)
    wanted, _ = plain.update(gradients, plain.init(masters), masters)
    wanted = optax.apply_updates(masters, wanted)
    for name in shapes:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2.0**-22)


def test_steps_in_one_program():
    """XLA may keep parameters unrounded between them: exact where differences are."""
    random = np.random.default_rng(0)
    gradients = jnp.asarray(random.normal(size=(4, 64, 128)) * 1e-3, jnp.float32)
    params = jnp.asarray(random.uniform(1, 2, (64, 128)), jnp.bfloat16)
    tx = po.paged(optax.sgd(1.0), master_remainders=True, device_budget=None)

    def step(given, gradient):
        updates, state = tx.update(gradient, given[1], given[0])
        return (optax.apply_updates(given[0], updates), state), None

    def masters(unroll):
        scan = lambda given: jax.lax.scan(step, given, gradients, unroll=unroll)[0]
        return np.asarray(po.master_weights(*jax.jit(scan)((params, tx.init(params)))))

    np.testing.assert_array_equal(masters(4), masters(1))


def test_with_64_bits():
    """Rates and gradients in float64 are rounded to the masters' float32."""
    with jax.enable_x64(True):
        params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        tx = po.paged_sgd(jnp.float64(0.25), master_remainders=True, **ALL_PAGED)
        gradients = {"w": jnp.full((64, 128), 2.0**-12, jnp.float64)}
        updates, state = tx.update(gradients, tx.init(params), params)
        params = optax.apply_updates(params, updates)
        assert po.master_weights(params, state)["w"][0, 0] == 1 - 2.0**-14


_INT8 = {"master_remainders": "int8"}


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
    with pytest.raises(ValueError, match="remainder_int8"):
        standard(tmp_path, state, po.abstract_state(tx, params))


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
