"""Codecs against the libraries whose formats they are, and against their own rules.

`data/codecs.npz` holds what bitsandbytes and torchao stored, so that every machine
compares with them; where they are installed, more inputs are compared.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
import sys
import warnings
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import aot
from helpers.programs import MIB, on_device
from paged_optax.codecs import (
    BFloat16Codec,
    DynamicInt4,
    DynamicInt8,
    Float8E4M3,
    Float32Codec,
    Noise,
    Quantized,
    draw,
    named,
)
from paged_optax.codecs.dynamic_int8 import _few_digits
from paged_optax.codecs.maps import dynamic_map, linear_map

pytestmark = pytest.mark.optimized

DATA = pathlib.Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "codecs.npz")
CASES = [key.removeprefix("input/") for key in GOLDEN if key.startswith("input/")]

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
BLOCKED = {
    "int8 signed": DynamicInt8(signed=True),
    "int8 unsigned": DynamicInt8(signed=False),
    "int4 signed": DynamicInt4(signed=True),
    "int4 unsigned": DynamicInt4(signed=False),
    "float8": Float8E4M3(),
    "float8 unsigned": Float8E4M3(signed=False),
}
ALL = BLOCKED | {
    "float32": Float32Codec(),
    "bfloat16": BFloat16Codec(),
    "bfloat16 stochastic": BFloat16Codec(stochastic=True),
}
EVERY = pytest.mark.parametrize("codec", ALL.values(), ids=ALL.keys())
EVERY_BLOCKED = pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED.keys())


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def sample(shape, seed=0, positive=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    return np.abs(x).astype(np.float32) if positive else x.astype(np.float32)


def noise_for(codec, start=0, seed=0, step=0):
    return draw(jax.random.key(seed), step, start) if codec.draws else None


_encode = jax.jit(lambda x, noise, codec: codec.encode(x, noise), static_argnums=2)


def encode(codec, x):
    return _encode(jnp.asarray(x), noise_for(codec), codec)


@functools.partial(jax.jit, static_argnums=(0, 2))
def decode(codec, stored, shape):
    return codec.decode(stored, shape)


def assert_same(one, other):
    """The same trees, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(
            a.reshape(-1).view("u1"), b.reshape(-1).view("u1")
        )


def int4_codes(stored, shape):
    packed = np.asarray(stored.codes).reshape(*shape[:-1], -1)
    pairs = np.stack([packed >> 4, packed & 15], axis=-1).reshape(*shape[:-1], -1)
    return pairs[..., : shape[-1]]


# Against bitsandbytes and torchao.


def case(name, kind):
    x = GOLDEN[f"input/{name}"]
    return x if kind == "signed" else np.abs(x)


def golden(codec, kind, name):
    return [GOLDEN[f"{codec}/{kind}/{what}/{name}"] for what in ("codes", "scales")]


@SIGNED
def test_maps(signed):
    kind = "signed" if signed else "unsigned"
    np.testing.assert_array_equal(dynamic_map(signed), GOLDEN[f"map8/{kind}"])
    four_bits = dynamic_map(True, decades=3) if signed else linear_map()
    np.testing.assert_array_equal(four_bits, GOLDEN[f"map4/{kind}"])
    assert dynamic_map(signed).dtype == four_bits.dtype == np.float32


@pytest.mark.quick("cpu-random", "cpu-thresholds 8 signed-", "cpu-denormal")
@SIGNED
@pytest.mark.parametrize("name", CASES)
def test_int8_is_bitsandbytes(name, signed, platform):
    """Code for code and scale for scale, thresholds and denormals included."""
    kind = "signed" if signed else "unsigned"
    codes, scales = golden("int8", kind, name)
    stored = encode(DynamicInt8(signed, rounds_to_zero=True), case(name, kind))
    np.testing.assert_array_equal(stored.codes, codes)
    assert_same(stored.scales, scales)


@pytest.mark.quick("cpu-random", "cpu-thresholds 4 signed-", "cpu-denormal")
@SIGNED
@pytest.mark.parametrize("name", CASES)
def test_int4_is_torchao(name, signed, platform):
    kind = "signed" if signed else "unsigned"
    codes, scales = golden("int4", kind, name)
    x = case(name, kind)
    stored = encode(DynamicInt4(signed), x)
    np.testing.assert_array_equal(int4_codes(stored, x.shape), codes)
    # The one difference: a block of zeros has no scale, and decodes to zeros.
    zeros = [not block.any() for block in blocks_of(x, 128)]
    assert_same(stored.scales, np.where(zeros, np.float32(0), scales))
    assert np.all(scales[zeros] == np.float32(1e-12))


@pytest.mark.parametrize("name", CASES)
def test_float8_is_torchao(name):
    codes, scales = golden("float8", "signed", name)
    stored = encode(Float8E4M3(), GOLDEN[f"input/{name}"])
    np.testing.assert_array_equal(np.asarray(stored.codes).view(np.uint8), codes)
    assert_same(stored.scales, scales)


@pytest.mark.quick("cpu-random", "cpu-denormal", "cpu-beside zeros")
@pytest.mark.parametrize(
    "exact",
    [
        DynamicInt8(signed=False, rounds_to_zero=True),
        DynamicInt4(signed=False),
        Float8E4M3(signed=False, rounds_to_zero=True),
    ],
    ids=["int8", "int4", "float8"],
)
@pytest.mark.parametrize("name", CASES)
def test_no_second_moment_vanishes(name, exact, platform):
    """Codes are the library's, but for positive numbers that it stores as zero."""
    x = case(name, "unsigned")
    codec = exact
    if not isinstance(exact, DynamicInt4):  # its map has no zero
        codec = dataclasses.replace(exact, rounds_to_zero=False)
    theirs, ours = encode(exact, x), encode(codec, x)
    assert_same(ours.scales, theirs.scales)
    decoded = np.asarray(decode(codec, ours, x.shape))
    codes = [np.asarray(stored.codes).view(np.uint8) for stored in (ours, theirs)]
    if codec is exact:
        assert_same(*codes)
    else:
        vanished = (codes[1] == 0) & (x > 0)
        np.testing.assert_array_equal(codes[0][vanished], 1)
        np.testing.assert_array_equal(codes[0][~vanished], codes[1][~vanished])
        assert name not in ("wide", "partly denormal") or vanished.any()
    # A product with a tiny scale may be denormal, which a backend may take for zero.
    normal = np.repeat(np.asarray(ours.scales), codec.block)[: x.size] > 1e-30
    assert np.all(decoded[normal & (x.reshape(-1) > 0)] > 0)
    assert np.all(decoded[x == 0] == 0) or isinstance(codec, DynamicInt4)


def blocks_of(x, block):
    return np.pad(x, (0, -x.size % block)).reshape(-1, block)


@SIGNED
@pytest.mark.parametrize("name", ["random", "wide", "beside zeros"])
def test_what_bitsandbytes_rounds_first(name, signed):
    """Its float32 kernel differs by nothing but a grid of 65536 points.

    It looks `x * (1 / absmax)` up in a table of codes for -1, -1 + 2/65535, ... 1.
    """
    kind = "signed" if signed else "unsigned"
    x = case(name, kind)
    codes, scales = golden("grid", kind, name)
    rows = blocks_of(x, 256)
    scaled = np.clip(rows * (np.float32(1) / scales)[:, None], -1, 1)
    half = ((scaled + np.float32(1)) * np.float32(0.5)).astype(np.float64)
    point = np.floor((half * 65535 + 0.5).astype(np.float32))
    value = (np.float32(2) * point) / np.float32(65535) - np.float32(1)
    ours = encode(
        DynamicInt8(signed, rounds_to_zero=True), beside_one(value.reshape(-1))
    )
    ours = np.asarray(ours.codes).reshape(-1, 256)[:, :255].reshape(-1)[: x.size]
    np.testing.assert_array_equal(ours, codes)
    exact, _ = golden("int8", kind, name)
    assert 0 < np.mean(codes != exact) < 1


def beside_one(x):
    """Blocks of 255 numbers and a 1, so that the scale is 1."""
    rows = np.pad(x, (0, -x.size % 255)).reshape(-1, 255)
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=1).reshape(-1)


@functools.cache
def maker():
    """`data/make_codecs.py`, where the libraries it asks are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in ("torch", "bitsandbytes", "torchao.optim"):
            why = f"{library} is not installed: pip install '.[oracle]'"
            pytest.importorskip(library, reason=why)
    spec = importlib.util.spec_from_file_location("make", DATA / "make_codecs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make"] = module
    spec.loader.exec_module(module)
    return module


def test_golden_data_is_what_the_libraries_say():
    made = maker().everything()
    assert made.keys() == set(GOLDEN)
    for key, array in made.items():
        if not key.startswith("grid"):  # a table of one version of bitsandbytes
            assert_same(array, GOLDEN[key])


@SIGNED
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 255, 257, 100_000])
def test_installed_libraries(size, seed, signed):
    make = maker()
    x = sample(size, seed, positive=not signed)
    stored = encode(DynamicInt8(signed, rounds_to_zero=True), x)
    codes, absmax = make.bitsandbytes_codes(x, signed)
    np.testing.assert_array_equal(stored.codes, codes)
    assert_same(stored.scales, absmax)
    stored = encode(DynamicInt4(signed), x)
    codes, scales = make.torchao_int4(x, signed)
    np.testing.assert_array_equal(int4_codes(stored, x.shape), codes)
    assert_same(stored.scales, scales)
    stored = encode(Float8E4M3(), x)
    codes, scales = make.torchao_float8(x)
    np.testing.assert_array_equal(np.asarray(stored.codes).view(np.uint8), codes)
    assert_same(stored.scales, scales)


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
        np.testing.assert_array_equal(codec.decode(stored, (256,)), expected)
        jitted = jax.jit(codec.decode, static_argnums=1)(stored, (256,))
        np.testing.assert_array_equal(jitted, expected)


@SIGNED
def test_int4_decodes_the_map(signed, platform):
    codes = np.arange(16, dtype=np.uint8)
    packed = jnp.asarray((codes[::2] << 4) | codes[1::2])
    stored = Quantized(packed, jnp.array([0.3], jnp.float32))
    numbers = dynamic_map(True, decades=3) if signed else linear_map()
    decoded = DynamicInt4(signed).decode(stored, (16,))
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
    for array in jax.tree.leaves(codec.encode(jnp.zeros((3, 100), jnp.float32))):
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
        _encode(x[i : i + rows], noise_for(codec, start=i * columns), codec)
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


def test_bytes_a_value():
    size = 2**16
    expected = {
        "float32": 4,
        "bfloat16": 2,
        "bfloat16_stochastic": 2,
        "dynamic_int8": 1 + 4 / 256,
        "dynamic_int4": 0.5 + 4 / 128,
        "float8_e4m3": 1 + 4 / 256,
    }
    for name, wanted in expected.items():
        stored = jax.tree.leaves(named(name, signed=True).stored((2**8, 2**8)))
        assert sum(x.size * x.dtype.itemsize for x in stored) / size == wanted


def test_static_arguments():
    for name in ("float32", "bfloat16", "dynamic_int8", "dynamic_int4", "float8_e4m3"):
        for signed in (True, False):
            codec = named(name, signed)
            assert codec == named(name, signed)
            assert hash(codec) == hash(named(name, signed))
            assert codec.signed or not signed
    assert named("dynamic_int8", True) != named("dynamic_int8", False)
    assert named("bfloat16_stochastic", True).draws
    assert not named("bfloat16", True).draws


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
        np.asarray(_encode(x, noise_for(codec, **where), codec)) > 1.004
    )
    first = up()
    np.testing.assert_array_equal(first, up())
    np.testing.assert_array_equal(first[256:], up(start=256)[:-256])
    for other in (up(seed=1), up(step=1), up(start=1), ~first[::-1]):
        assert 0.45 < np.mean(first == other) < 0.55
    noise = noise_for(codec)
    for word in (0, 1):
        words = noise.words.at[word].add(jnp.uint32(1))
        other = np.asarray(_encode(x, noise._replace(words=words), codec)) > 1.004
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
            stored = np.asarray(_encode(x, noise_for(codec, step=step), codec))
            share, p = np.mean(stored > 1), sixteenths / 16
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_stochastic_rounding_needs_noise():
    with pytest.raises(ValueError, match="needs noise: pass"):
        BFloat16Codec(stochastic=True).encode(jnp.zeros(3, jnp.float32))


def test_noise_of_typed_keys():
    for implementation in ("threefry2x32", "rbg"):
        noise = draw(jax.random.key(0, impl=implementation), 1, 5)
        assert isinstance(noise, Noise)
        assert (noise.words.shape, noise.words.dtype) == ((2,), jnp.uint32)
        assert (noise.start.shape, noise.start.dtype) == ((), jnp.uint32)


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
