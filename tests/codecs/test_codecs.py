"""Codecs against their own rules, and rounding by random bits."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import aot, coding
from helpers.coding import EVERY, assert_same, decode, encode, noise_for, sample
from helpers.programs import MIB, on_device
from paged_optax import codecs
from paged_optax.codecs import BFloat16Codec, DynamicInt4, DynamicInt8, Quantized, named
from paged_optax.codecs.dynamic_int4 import int4_map
from paged_optax.codecs.dynamic_int8 import _few_digits, dynamic_map

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict")]


# Against the rule itself.


@coding.SIGNED
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
    stored = encode(DynamicInt8(signed, rounds_to_zero=True), coding.beside_one(x))
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
        values = coding.beside_one(x.astype(np.float32))
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


@coding.SIGNED
def test_int8_decodes_the_map(signed, platform):
    codes = jnp.arange(256, dtype=jnp.uint8)
    codec = DynamicInt8(signed)
    for scale in (1, 0.3, 1e30):
        stored = Quantized(codes, jnp.array([scale], jnp.float32))
        expected = dynamic_map(signed) * np.float32(scale)
        np.testing.assert_array_equal(decode(codec, stored, (256,)), expected)


@coding.SIGNED
def test_int4_decodes_the_map(signed, platform):
    codes = jnp.arange(16, dtype=jnp.uint8)
    stored = Quantized(codes, jnp.array([0.3], jnp.float32))
    numbers = int4_map(signed)
    decoded = decode(DynamicInt4(signed), stored, (16,))
    np.testing.assert_array_equal(decoded, numbers * np.float32(0.3))


@coding.EVERY_BLOCKED
def test_decoding_is_near(codec):
    x = sample((64, 256), positive=not codec.signed)
    decoded = np.asarray(decode(codec, encode(codec, x), x.shape))
    largest = np.abs(x).reshape(-1, codec.block).max(axis=1)
    error = np.abs(decoded - x).reshape(-1, codec.block).max(axis=1) / largest
    bound = {DynamicInt8: 0.008, DynamicInt4: 0.12, codecs.Float8E4M3: 0.036}[
        type(codec)
    ]
    if codec == DynamicInt8(signed=False):
        bound /= 2
    assert np.all(error <= bound)


@EVERY
def test_zeros_stay_zeros(codec):
    zeros = jnp.zeros((3, 100), jnp.float32)
    decoded = decode(codec, encode(codec, zeros), zeros.shape)
    np.testing.assert_array_equal(decoded, zeros)


@coding.EVERY_BLOCKED
def test_fresh_state_is_all_zero_bytes(codec):
    """As in the libraries: a fresh state is what `encode` makes of zeros."""
    if codec == DynamicInt4(signed=True) or isinstance(codec, codecs.Float8E4M3):
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
    for array, aval in zip(*map(jax.tree.leaves, (stored, promised)), strict=True):
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
        coding.encode_with(x[i : i + rows], noise_for(codec, start=i * columns), codec)
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
@coding.EVERY_BLOCKED
def test_scratch_is_a_page(compile_for, codec):
    """16 MiB in float32: at most one page; a TPU looks up no entries of a table."""
    report = compile_for(moving(codec, (1024, 4096)))
    assert report.device_temp <= 17 * MIB
    assert compile_for is aot.h200 or " gather(" not in report.hlo


# Stochastic rounding.


def test_stochastic_rounding_is_right_in_the_mean():
    codec = BFloat16Codec(stochastic=True)
    n = 2**18
    for value in (1 + 1 / 1024, -3.14159, 1e-30, 6.1e37, 1 + 255 / 2**15):
        x = jnp.full((n,), value, jnp.float32)
        stored = np.asarray(encode(codec, x)).astype(np.float64)
        below, above = np.unique(stored)
        assert min(below, above) < np.float32(value) < max(below, above)
        share = (np.float32(value) - below) / (above - below)
        deviation = (above - below) * math.sqrt(share * (1 - share) / n)
        assert abs(stored.mean() - np.float32(value)) < 4 * deviation


def test_stochastic_rounding_keeps_what_needs_no_rounding():
    codec = BFloat16Codec(stochastic=True)
    patterns = jnp.arange(2**16, dtype=jnp.uint16)
    x = jax.lax.bitcast_convert_type(patterns, jnp.bfloat16)
    stored = encode(codec, x.astype(jnp.float32))
    finite = ~np.isnan(np.asarray(x, np.float32))
    # XLA:CPU flushes denormal numbers as it widens bfloat16.
    normal = finite & (np.abs(np.asarray(x, np.float32)) >= 2.0**-126)
    np.testing.assert_array_equal(
        np.asarray(stored, np.float32)[normal], np.asarray(x, np.float32)[normal]
    )
    assert np.isnan(np.asarray(stored, np.float32)[~finite]).all()


def test_stochastic_rounding_never_makes_a_number_of_nan():
    patterns = np.arange(0x7F800001, 0x80000000, 997, dtype=np.uint32)
    patterns = np.concatenate([patterns, [0x7FFFFFFF], patterns | 0x80000000])
    x = jnp.asarray(patterns.astype(np.uint32).view(np.float32))
    stored = encode(BFloat16Codec(stochastic=True), x)
    assert np.isnan(np.asarray(stored, np.float32)).all()


def test_noise_is_keyed_and_moves():
    """Another key, step or position draws other bits; the same draw the same."""
    codec = BFloat16Codec(stochastic=True)
    x = jnp.full((4096,), 1 + 1 / 256, jnp.float32)  # half-way: up or down
    up = lambda **where: (
        np.asarray(coding.encode_with(x, noise_for(codec, **where), codec)) > 1.004
    )
    first = up()
    np.testing.assert_array_equal(first, up())
    np.testing.assert_array_equal(first[256:], up(start=256)[:-256])
    for other in (up(seed=1), up(step=1), up(start=1), ~first[::-1]):
        assert 0.45 < np.mean(first == other) < 0.55
    noise = noise_for(codec)
    for word in (0, 1):
        words = noise.words.at[word].add(jnp.uint32(1))
        other = (
            np.asarray(coding.encode_with(x, noise._replace(words=words), codec))
            > 1.004
        )
        assert 0.45 < np.mean(first == other) < 0.55
    shifted = [np.mean(first[k:] == first[:-k]) for k in (1, 2, 64, 128, 256, 1024)]
    assert all(0.45 < share < 0.55 for share in shifted)


def test_noise_is_uniform():
    codec = BFloat16Codec(stochastic=True)
    n = 2**16
    for sixteenths in range(1, 16):
        value = np.uint32(0x3F800000 + (sixteenths << 12)).view(np.float32)
        for step in range(3):
            x = jnp.full((n,), value, jnp.float32)
            stored = np.asarray(
                coding.encode_with(x, noise_for(codec, step=step), codec)
            )
            share, p = np.mean(stored > 1), sixteenths / 16
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_noise_of_typed_keys():
    for implementation in ("threefry2x32", "rbg"):
        noise = codecs.draw(jax.random.key(0, impl=implementation), 1, 5)
        assert isinstance(noise, codecs.Noise)
        assert (noise.words.shape, noise.words.dtype) == ((2,), jnp.uint32)
        assert (noise.start.shape, noise.start.dtype) == ((), jnp.uint32)
