"""Codes in words: what brings them together on a TPU, and elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_optax.codecs import packing

SHAPES = [
    ((1, 197, 1024), 2),
    ((16, 3, 256), 2),
    ((512, 1000), 1),
    ((1000, 512), 0),
    ((3, 33, 136), 1),
    ((2, 4), 1),
    ((50257,), 0),
]


@pytest.mark.quick("-(3, 33, 136)-1-4-")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape, axis", SHAPES, ids=str)
def test_words_hold_codes_in_turn(shape, axis, bits, platform):
    codes = np.random.default_rng(0).integers(0, 2**bits, shape)
    packed = 32 // bits
    filled = [(0, -shape[axis] % packed if i == axis else 0) for i in range(len(shape))]
    turned = np.moveaxis(np.pad(codes, filled), axis, -1)
    expected = turned.reshape(*turned.shape[:-1], -1, packed) << (
        bits * np.arange(packed)
    )
    expected = np.moveaxis(expected.sum(axis=-1), -1, axis).astype(np.uint32)
    found = packing.pack(jnp.asarray(codes, jnp.int32), axis, bits)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected)
    parted = packing.unpack(found, axis, bits, shape[axis])
    np.testing.assert_array_equal(parted, codes)


def test_the_ways_of_a_tpu_are_tried(platform):
    """Slices in sublanes, products in lanes; both above, for a TPU alone."""
    found = {packing._in_sublanes(shape, axis, 4) for shape, axis in SHAPES[:-1]}
    assert found == {True, False}
    traced = jax.make_jaxpr(lambda x: packing.pack(x, 1, 8))(jnp.ones((8, 512), int))
    assert ("dot_general" in str(traced)) == (platform == "tpu")
