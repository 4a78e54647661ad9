"""Every codec, and what goes through it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_optax.codecs import BFloat16Codec, DynamicInt4, DynamicInt8, Float8E4M3, draw

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
    "bfloat16": BFloat16Codec(),
    "bfloat16 stochastic": BFloat16Codec(stochastic=True),
}
EVERY = pytest.mark.parametrize("codec", ALL.values(), ids=ALL.keys())
EVERY_BLOCKED = pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED.keys())


def sample(shape, seed=0, positive=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    return np.abs(x).astype(np.float32) if positive else x.astype(np.float32)


def noise_for(codec, start=0, seed=0, step=0):
    return draw(jax.random.key(seed), step, start) if codec.draws else None


encode_with = jax.jit(lambda x, noise, codec: codec.encode(x, noise), static_argnums=2)


def encode(codec, x):
    return encode_with(jnp.asarray(x), noise_for(codec), codec)


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


def blocks_of(x, block):
    return np.pad(x, (0, -x.size % block)).reshape(-1, block)


def beside_one(x):
    """Blocks of 255 numbers and a 1, so that the scale is 1."""
    rows = np.pad(x, (0, -x.size % 255)).reshape(-1, 255)
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=1).reshape(-1)
