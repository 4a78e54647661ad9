"""Codecs against their own rules."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import aot
from helpers.coding import (
    EVERY,
    EVERY_BLOCKED,
    SIGNED,
    assert_same,
    beside_one,
    decode,
    encode,
    encode_with,
    noise_for,
    sample,
)
from helpers.programs import MIB, on_device
from paged_optax.codecs import DynamicInt4, DynamicInt8, Float8E4M3, Quantized, named
from paged_optax.codecs.dynamic_int4 import int4_map
from paged_optax.codecs.dynamic_int8 import _few_digits, dynamic_map

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict")]


# Against the rule itself.


@SIGNED
def test_int8_is_the_nearest(signed, platform):
    """At every midpoint of the map and three floats to either side of it."""
    numbers = dynamic_map(signed)
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    near = [middles]
    for towards in (np.float32(-9), np.float32(9)):
        x = middles
        for _ in range(3):
            near.append(x := np.nextafter(x, towards))
    x = np.concatenate(near)
    # bitsandbytes' rule: distances in float32; of two as near, the lower.
    nearest = np.argmin(np.abs(x[:, None] - numbers), axis=1)
    stored = encode(DynamicInt8(signed, rounds_to_zero=True), beside_one(x))
    codes = np.asarray(stored.codes).reshape(-1, 256)[:, :255].reshape(-1)
    np.testing.assert_array_equal(codes[: x.size], nearest)
    assert np.all(np.bincount(nearest, minlength=256) > 0)


def test_second_moments_are_rounded_up_early(platform):
    """From a quarter of the way on between the lowest numbers, else to the nearest."""
    numbers = dynamic_map(False)[1:].astype(np.float64)
    low, gap = numbers[:-1], np.diff(numbers)
    share = np.where(np.arange(gap.size) < 14, 0.25, 0.5)
    above, below = low + gap * (share + 1e-3), low + gap * (share - 1e-3)
    for x, code in ((low, 0), (below, 0), (above, 1)):
        values = beside_one(x.astype(np.float32))
        codes = np.asarray(encode(DynamicInt8(signed=False), values).codes)
        codes = codes.reshape(-1, 256)[:, :255].reshape(-1)[: x.size]
        np.testing.assert_array_equal(codes, np.arange(1, 255) + code)


def test_denormal_reciprocals_are_rounded_once():
    """Where `1 / scale` has few digits: the multiple of 2^-149 nearest to it."""
    rng = np.random.default_rng(0)
    mantissas = np.concatenate([[2**23, 2**25 - 2], rng.integers(2**23, 2**25, 50_000)])
    x = mantissas.astype(np.float32) / np.float32(2**23)
    exact = [round(Fraction(2**46, int(y * 2**23))) for y in x]
    assert np.any(np.round(np.float32(2**23) / x) != exact)  # rounding twice is not it
    digits = np.asarray(jax.jit(_few_digits)(x[:, None]))[:, 0]
    np.testing.assert_array_equal(digits * 2**23, exact)


@SIGNED
def test_int8_decodes_the_map(signed, platform):
    codes = jnp.arange(256, dtype=jnp.uint8)
    codec = DynamicInt8(signed)
    for scale in (1, 0.3, 1e30):
        stored = Quantized(codes, jnp.array([scale], jnp.float32))
        expected = dynamic_map(signed) * np.float32(scale)
        np.testing.assert_array_equal(decode(codec, stored, (256,)), expected)


@SIGNED
def test_int4_decodes_the_map(signed, platform):
    codes = jnp.arange(16, dtype=jnp.uint8)
    stored = Quantized(codes, jnp.array([0.3], jnp.float32))
    numbers = int4_map(signed)
    decoded = decode(DynamicInt4(signed), stored, (16,))
    np.testing.assert_array_equal(decoded, numbers * np.float32(0.3))


@EVERY_BLOCKED
def test_decoding_is_near(codec):
    x = sample((64, 256), positive=not codec.signed)
    decoded = np.asarray(decode(codec, encode(codec, x), x.shape))
    largest = np.abs(x).reshape(-1, codec.block).max(axis=1)
    error = np.abs(decoded - x).reshape(-1, codec.block).max(axis=1) / largest
    bound = {DynamicInt8: 0.008, DynamicInt4: 0.12, Float8E4M3: 0.036}[type(codec)]
    if codec == DynamicInt8(signed=False):
        bound /= 2
    assert np.all(error <= bound)


@EVERY
def test_zeros_stay_zeros(codec):
    zeros = jnp.zeros((3, 100), jnp.float32)
    decoded = decode(codec, encode(codec, zeros), zeros.shape)
    np.testing.assert_array_equal(decoded, zeros)


@EVERY_BLOCKED
def test_fresh_state_is_all_zero_bytes(codec):
    """As in the libraries: a fresh state is what `encode` makes of zeros."""
    if codec == DynamicInt4(signed=True) or isinstance(codec, Float8E4M3):
        pytest.skip("zero has another code, or the scale its least value")
    for array in jax.tree.leaves(encode(codec, jnp.zeros((3, 100), jnp.float32))):
        assert not np.asarray(array).any()


# Shapes, pages, types.


@pytest.mark.quick("shape8-")
@EVERY
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (0,),
        (3, 0),
        (0, 5),
        (7,),
        (256,),
        (1000,),
        (3, 5, 7),
        (257, 3),
        (2, 640),
    ],
)
def test_shapes(codec, shape):
    x = jnp.asarray(sample(shape, positive=not codec.signed))
    stored = encode(codec, x)
    promised = codec.stored(shape)
    assert jax.tree.structure(stored) == jax.tree.structure(promised)
    for array, aval in zip(
        jax.tree.leaves(stored), jax.tree.leaves(promised), strict=True
    ):
        assert (array.shape, array.dtype) == (aval.shape, aval.dtype)
    decoded = decode(codec, stored, shape)
    assert (decoded.shape, decoded.dtype) == (shape, jnp.float32)
    if isinstance(stored, Quantized):
        flat = encode(codec, x.reshape(-1))
        assert_same(stored.scales, flat.scales)
        assert_same(decoded.reshape(-1), decode(codec, flat, (x.size,)))


@pytest.mark.quick(
    "256-30-int8 signed", "256-30-int4 unsigned", "256-30-bfloat16 stochastic"
)
@EVERY
@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("columns", [256, 131])
def test_pages_are_the_whole(codec, rows, columns):
    """Pages of whole blocks store, and give back, what the whole moment does."""
    rows *= codec.block // math.gcd(codec.block, columns)
    x = jnp.asarray(sample((2 * rows + rows // 2, columns), positive=not codec.signed))
    starts = range(0, x.shape[0], rows)
    pages = [
        encode_with(x[i : i + rows], noise_for(codec, start=i * columns), codec)
        for i in starts
    ]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pages)
    assert_same(joined, encode(codec, x))
    decoded = [
        decode(codec, page, x[i : i + rows].shape)
        for i, page in zip(starts, pages, strict=True)
    ]
    assert_same(jnp.concatenate(decoded), decode(codec, joined, x.shape))


@pytest.mark.quick("float8")
@EVERY
def test_eager_is_jitted(codec):
    x = sample((4, 512), positive=not codec.signed)
    x[1] *= np.float32(1e-38)
    x[2] *= np.float32(3e38) / np.abs(x[2]).max()
    stored = encode(codec, x)
    assert_same(codec.encode(jnp.asarray(x), noise_for(codec)), stored)
    jitted = jax.jit(codec.decode, static_argnums=1)(stored, x.shape)
    assert_same(codec.decode(stored, x.shape), jitted)


@EVERY
def test_fused_with_an_update(codec):
    """Inside a larger jitted computation the codes are the same."""
    x = jnp.asarray(sample((40, 512), positive=not codec.signed))
    stored = encode(codec, x)
    noise = noise_for(codec)

    @jax.jit
    def update(stored, gradient):
        moment = codec.decode(stored, gradient.shape)
        moment = jnp.maximum(moment, gradient)
        return codec.encode(moment, noise), moment

    again, moment = update(stored, x)
    assert_same(again, encode(codec, moment))


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("bfloat16", 1),
        ("bfloat16_stochastic", 1),
        ("dynamic_int8", 2),
        ("dynamic_int4", 2),
        ("float8_e4m3", 2),
    ],
)
def test_a_codec_made_anew_is_no_new_program(name, programs):
    """As a static argument; one that uses the sign's bit has a program for each."""
    blank = jax.jit(
        lambda codec: jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), codec.stored((4, 256))
        ),
        static_argnums=0,
    )
    for signed in (True, False, True, False):
        blank(named(name, signed))
    assert blank._cache_size() == programs


def test_unknown_name():
    with pytest.raises(ValueError, match="'int7' is unknown: use one of 'float32'"):
        named("int7", signed=True)


# What is not finite.


@EVERY
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nothing_finite_comes_of_what_is_not(codec, bad):
    """A block with NaN or an infinity decodes to nothing finite; others are safe."""
    x = sample(4 * 256, positive=not codec.signed)
    x[300] = bad
    decoded = np.asarray(decode(codec, encode(codec, x), x.shape))
    block = 300 // codec.block
    hit = slice(block * codec.block, (block + 1) * codec.block)
    assert not np.isfinite(decoded[hit]).any()
    if np.isnan(bad):
        assert np.isnan(decoded[hit]).all()
    others = np.delete(decoded, hit)
    assert np.isfinite(others).all()
    x[300] = 1
    sane = np.asarray(decode(codec, encode(codec, x), x.shape))
    np.testing.assert_array_equal(others, np.delete(sane, hit))


@pytest.mark.slow
def test_unsigned_maps_store_negative_numbers_as_the_least():
    x = jnp.array([-1.0, -1e-3, 0.5, 1.0], jnp.float32)
    assert DynamicInt8(signed=False).encode(x).codes.tolist()[:2] == [0, 0]
    decoded = DynamicInt4(signed=False).decode(DynamicInt4(False).encode(x), x.shape)
    assert decoded.tolist()[:2] == [1 / 16, 1 / 16]


# On the accelerators' compilers.


def moving(codec, shape):
    """A page decoded, moved towards a gradient and encoded, in place."""

    def build(mesh):
        def move(stored, gradient, noise):
            moment = codec.decode(stored, shape)
            moment = np.float32(0.9) * moment + np.float32(0.1) * gradient
            return codec.encode(moment, noise), moment

        noise = jax.eval_shape(lambda: noise_for(codec))
        return jax.jit(move, donate_argnums=(0, 1)), (
            on_device(mesh, codec.stored(shape)),
            on_device(mesh, jax.ShapeDtypeStruct(shape, jnp.float32)),
            on_device(mesh, noise),
        )

    return build


@pytest.mark.quick("h200", "float8-v5e")
@pytest.mark.compiler
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
@EVERY_BLOCKED
def test_scratch_is_a_page(compile_for, codec):
    """4 Mi values, 16 MiB in float32: at most one page of scratch.

    A TPU would look entries of a table up one by one.
    """
    report = compile_for(moving(codec, (1024, 4096)))
    assert report.device_temp <= 17 * MIB
    assert compile_for is aot.h200 or " gather(" not in report.hlo
