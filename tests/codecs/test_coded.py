"""Moments that a codec stores, in training and in memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, reference
from helpers.coded import ALL_PAGED, NAMES, SHAPES, trained
from helpers.programs import MIB, assert_in_place, square, updating
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD, GPU_NEEDS_RAW_INDEX
from paged_optax.codecs import BFloat16Codec


@pytest.mark.slow
@pytest.mark.parametrize("codec", NAMES)
def test_pages_change_no_bit(codec):
    """The state is the same bit for bit with pages of any size, eager and jitted."""
    build = lambda size: po.paged_adamw(
        1e-2, codec=codec, page_size=size, min_paged_size="1B"
    )
    results = [
        trained(build(size), eager=eager)
        for size, eager in [
            ("64KiB", False),
            ("1MiB", False),
            ("1GiB", False),
            ("16KiB", True),
        ]
    ]
    for params, state in results[1:]:
        reference.assert_equal(state, results[0][1])
        distances = reference.distances(params, results[0][0])
        assert max(distances.values(), default=0) <= 1, distances


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_moments_of_several_shapes(eager):
    """A factored moment is a vector, decoded beside a matrix or a flag of one bit."""
    shapes = {"tall": (5000, 40), "stack": (3, 4, 1400)}
    build = functools.partial(optax.adafactor, 1e-2, min_dim_size_to_factor=2)
    for wanted in (build(), optax.chain(optax.zero_nans(), build(), optax.zero_nans())):
        settings = {"page_size": 4096, "min_paged_size": 0}
        tx = po.paged(wanted, codec={"v_col": "dynamic_int8"}, **settings)
        params = reference.arrays(shapes=shapes)
        jit = (lambda f: f) if eager else jax.jit
        steps = reference.steps(tx, params, 3, jit=jit)
        for (one, *_), (other, *_) in zip(
            reference.steps(wanted, params, 3), steps, strict=True
        ):
            chex.assert_trees_all_close(one, other, rtol=2e-2)


@pytest.mark.quick("-bfloat16-")
@pytest.mark.parametrize("codec", NAMES)
def test_memory_kinds_and_dtypes(codec):
    """Stored moments stay on the host; small ones are float32, as bitsandbytes'."""
    params, state = trained(po.paged_adamw(1e-2, codec=codec, **ALL_PAGED))
    stored = jax.tree.leaves(optax.tree.get(state, "mu")["even"])
    assert {x.sharding.memory_kind for x in stored} == {"pinned_host"}
    assert optax.tree.get(state, "mu")["small"].dtype == jnp.float32
    assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"codec": "dynamic_int8"}, 2.03125),
        ({"codec": "dynamic_int4"}, 1.0625),
        ({"codec": "float8_e4m3"}, 2.03125),
        ({"codec": "bfloat16"}, 4),
        ({"codec": "bfloat16_stochastic"}, 4),
        ({"codec": "dynamic_int8", "master_dtype": "float32"}, 6.03125),
    ],
    ids=["8-bit", "4-bit", "fp8", "bfloat16", "stochastic", "master + 8-bit"],
)
def test_bytes_a_parameter(settings, wanted):
    """Host bytes a parameter of AdamW."""
    params = {"w": jnp.ones((1024, 1024), jnp.bfloat16)}
    tx = po.paged_adamw(1e-3, **settings)
    state = tx.init(params)
    assert po.host_bytes(state) / params["w"].size == wanted
    assert po.plan(tx, params).host_bytes == po.host_bytes(state)


@pytest.mark.slow
def test_resident_and_coded():
    """With no budget at all, coded moments stay on the device, and give the numbers."""
    resident = po.paged_adamw_8bit(1e-2, device_budget=None, page_size="16KiB")
    params, state = trained(resident)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
    paged_params, paged_state = trained(po.paged_adamw_8bit(1e-2, **ALL_PAGED))
    reference.assert_equal(state, paged_state)
    assert max(reference.distances(params, paged_params).values(), default=0) <= 1


@pytest.mark.quick("nan-dynamic_int8")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nothing_turns_finite(name, value):
    """A moment that is not finite does not come back as a number."""
    tx = po.paged_adamw(1e-3, codec=name, **ALL_PAGED)
    params = {"w": jnp.ones((64, 128))}
    gradients = {"w": jnp.ones((64, 128)).at[3, 5].set(value)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(gradients, state, params)
    assert not np.isfinite(np.asarray(updates["w"][3, 5]))
    updates, _ = tx.update(params, state, params)
    assert not np.isfinite(np.asarray(updates["w"][3, 5]))


def test_seeds_of_stochastic_rounding():
    """A seed gives the same bits again, another seed others."""
    gradients = reference.arrays(jnp.float32, 1, {"w": (64, 128)})

    def stored(codec):
        tx = po.paged(optax.trace(0.9), codec=codec, **ALL_PAGED)
        _, state = tx.update(gradients, tx.init(gradients))
        return optax.tree.get(state, "trace")["w"]

    first, again, other = (
        stored(BFloat16Codec(stochastic=True, seed=seed)) for seed in (0, 0, 1)
    )
    reference.assert_equal(again, first)
    reference.assert_equal(stored("bfloat16_stochastic"), first)
    assert 0.1 < np.mean(np.asarray(other) != np.asarray(first)) < 0.9


def handing_over():
    """Moments that are the parameters, the gradients, or one another."""

    def init(params):
        # Optax's names: the codec takes no sign's bit for `nu`.
        return {"trace": params, "mu": params, "nu": jax.tree.map(abs, params)}

    def update(updates, state, params=None):
        del params
        return state["mu"], {
            "trace": updates,
            "mu": state["nu"],
            "nu": jax.tree.map(jnp.square, updates),
        }

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "float8_e4m3", "bfloat16"])
def test_a_moment_that_is_handed_over_is_stored_by_its_codec(codec):
    """Made by `init` or by `update`, of no arithmetic at all."""
    inner = handing_over()
    params = reference.arrays(shapes=SHAPES)
    tx = po.paged(inner, codec=codec, **ALL_PAGED)
    state, wanted = tx.init(params), inner.init(params)
    shapes = jax.eval_shape(tx.init, params)
    for wrap in (jax.jit, lambda update: update, jax.jit):
        # Two roundings: to a step of the map, or to half of a bit.
        near = lambda x, y: np.testing.assert_allclose(x, y, atol=0.04 * abs(y).max())
        updates, state = wrap(tx.update)(params, state, params)
        right, wanted = inner.update(params, wanted, params)
        assert set(reference.kinds(updates)) == {jax.devices()[0].default_memory().kind}
        jax.tree.map(near, updates, right)
        described = jax.tree.map(lambda x: (x.shape, x.dtype), (state, shapes))
        assert described[0] == described[1]
        assert reference.kinds(state) == reference.kinds(tx.init(params))


@pytest.mark.slow
def test_partial_updates():
    """An inactive parameter's codes and scales stay."""
    tx = po.paged_adamw_8bit(1e-2, per_parameter_steps=True, **ALL_PAGED)
    params, state = trained(tx)
    active = {"even": jnp.asarray(False), "odd": True, "vector": False, "small": True}
    updates, after = jax.jit(tx.update)(params, state, params, active=active)
    assert not np.any(np.asarray(updates["even"]))
    reference.assert_equal(po.page_in(after, "even"), po.page_in(state, "even"))
    assert reference.distances(po.page_in(after, "odd"), po.page_in(state, "odd"))
    assert [int(po.get_step(after, name)) for name in ("even", "odd")] == [3, 4]


@functools.cache
def compiled(compile_for, codec, leaves):
    tx = po.paged_adamw(1e-3, page_size="8MiB", codec=codec)
    return compile_for(updating(tx, square(leaves))), po.plan(tx, square(leaves))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("codec", "leaves"), [("dynamic_int8", 16), ("dynamic_int4", 3), ("float8_e4m3", 3)]
)
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_scratch(compile_for, codec, leaves):
    """No more scratch than pages of 32 bits take in turn, everything in place."""
    coded, plan = compiled(compile_for, codec, leaves)
    assert_in_place(coded)
    assert coded.device_temp <= 4 * 8 * MIB + leaves * 4 * 54 * 2**10
    if compile_for is aot.h200:
        found = aot.descriptors(coded.hlo)
        (page,) = {x.page_bytes for x in plan.moments if x.on_host}
        # Codes, and scales where they are many.
        sizes = {page // 8, page // 128} if codec == "dynamic_int4" else {page // 4}
        # The first page is read, and the last written, in two pieces.
        pieces = {size // 2 for size in sizes} if GPU_FETCHES_AHEAD else set()
        assert {stride for _, _, _, stride in found} == sizes | pieces
        (count,) = {x.pages for x in plan.moments if x.on_host}
        for way, _, first, stride in found:
            if stride in pieces:
                last = (count - 1) * 2 * stride
                assert first == (0 if way == "read" else last)
                continue
            ahead = way == "read" and not GPU_NEEDS_RAW_INDEX
            assert first == (stride if ahead else 0)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_state_of_the_parameters_own_tree(way):
    """What is no field of a state of Optax's is a parameter's moment all the same."""
    add = lambda updates, state, params=None: (
        updates,
        jax.tree.map(jnp.add, state, updates),
    )
    inner = optax.GradientTransformation(optax.tree.zeros_like, add)
    tx = po.paged(inner, codec="bfloat16", **ALL_PAGED)
    params = reference.arrays(jnp.float32, 0, {"a": (64, 64), "b": (129, 65)})
    state = tx.init(params)
    for _ in range(2):
        _, state = way(tx.update)(params, state, params)
    assert [x.dtype for x in jax.tree.leaves(state)] == [jnp.bfloat16] * 2
    assert po.host_bytes(state, "a") == 64 * 64 * 2
    wanted = jax.tree.map(lambda x: 2 * x, params)
    close = lambda x, y: np.testing.assert_allclose(np.float32(x), y, rtol=2**-7)
    jax.tree.map(close, state, wanted)


@pytest.mark.parametrize("codec", ["dynamic_int8", "float8_e4m3"])
def test_a_single_value_made_of_coded_moments(codec):
    """No gradient enters the flag of `zero_nans`: it is a leaf of its own, a scalar."""
    by_moments = optax.GradientTransformation(
        optax.scale_by_adam().init, lambda _, state, params=None: (state.mu, state)
    )
    tx = po.paged(optax.chain(by_moments, optax.zero_nans()), codec=codec, **ALL_PAGED)
    params = {"w": jnp.ones((64, 1024))}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert not state[1].found_nan["w"]
    chex.assert_trees_all_equal(updates, {"w": jnp.zeros((64, 1024))})
