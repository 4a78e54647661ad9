"""Rounding by random bits: right in the mean, keyed, and never where none is needed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.coding import encode, encode_with, noise_for
from paged_optax.codecs import BFloat16Codec, Noise, draw

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("strict")]


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
        np.asarray(encode_with(x, noise_for(codec, **where), codec)) > 1.004
    )
    first = up()
    np.testing.assert_array_equal(first, up())
    np.testing.assert_array_equal(first[256:], up(start=256)[:-256])
    for other in (up(seed=1), up(step=1), up(start=1), ~first[::-1]):
        assert 0.45 < np.mean(first == other) < 0.55
    noise = noise_for(codec)
    for word in (0, 1):
        words = noise.words.at[word].add(jnp.uint32(1))
        other = np.asarray(encode_with(x, noise._replace(words=words), codec)) > 1.004
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
            stored = np.asarray(encode_with(x, noise_for(codec, step=step), codec))
            share, p = np.mean(stored > 1), sixteenths / 16
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_noise_of_typed_keys():
    for implementation in ("threefry2x32", "rbg"):
        noise = draw(jax.random.key(0, impl=implementation), 1, 5)
        assert isinstance(noise, Noise)
        assert (noise.words.shape, noise.words.dtype) == ((2,), jnp.uint32)
        assert (noise.start.shape, noise.start.dtype) == ((), jnp.uint32)
