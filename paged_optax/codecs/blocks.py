"""Blocks of consecutive values, and the exact arithmetic that codecs share."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, Shaped

MAGNITUDE = np.int32(0x7FFFFFFF)
SMALLEST_NORMAL = np.int32(0x00800000)
#: The least magnitude that torchao divides a block by.
SMALLEST_ABSMAX = np.float32(1e-12)


def bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The bit pattern; for numbers that are not negative it orders as they do."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The number with this bit pattern."""
    return lax.bitcast_convert_type(x, jnp.float32)


def count(shape: tuple[int, ...], block: int) -> int:
    """Blocks in a moment of this shape, the last one perhaps not full."""
    return -(-math.prod(shape) // block)


def split(x: Shaped[Array, "*shape"], block: int) -> Shaped[Array, "blocks block"]:
    """The flattened values in rows of one block, the last one filled with zeros."""
    flat = x.reshape(-1)
    missing = -flat.size % block
    if missing:
        flat = jnp.pad(flat, (0, missing))
    return flat.reshape(-1, block)


def join(
    x: Shaped[Array, "blocks block"], shape: tuple[int, ...]
) -> Shaped[Array, "*shape"]:
    """Undoes `split`."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def absmax(x: Float32[Array, "blocks block"]) -> Float32[Array, " blocks"]:
    """The largest magnitude of each block; NaN where one of its values is NaN.

    Magnitudes are compared by their bit patterns. As numbers, backends that flush
    denormal ones to zero (XLA:CPU, XLA:TPU) would not find the largest of those, and
    XLA:CPU's maximum over the rows of a matrix passes NaN over (jax 0.10.2, 0.12.0.1).
    """
    return from_bits(jnp.max(bits(x) & MAGNITUDE, axis=1))


def divide(
    x: Float32[Array, "*#shape"], y: Float32[Array, "*#shape"] | np.float32
) -> Float32[Array, "*shape"]:
    """Divides with one rounding, under `jit` too.

    XLA turns a division by a constant or by a broadcast into a multiplication by its
    reciprocal, which rounds twice and flushes the reciprocals of numbers above 2^126
    (checked on CPU with jax 0.10.2 and 0.12.0.1). This divisor looks like neither.
    """
    return x / jnp.where(jnp.isnan(x), x, y)


def looked_up(
    index: Int32[Array, "*shape"], entries: Sequence[int | float], dtype: type
) -> Array:
    """Looks a small table up without a gather, which a TPU does one by one.

    Args:
      index: Positions. If one is out of range, only its low bits are used.
      entries: The table, of a power of two entries.
      dtype: Its dtype.
    """
    chosen: list[Array] = [jnp.asarray(entry, dtype) for entry in entries]
    bit = 1
    while len(chosen) > 1:
        high = (index & np.int32(bit)) != 0
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [jnp.where(high, odd, even) for even, odd in pairs]
        bit *= 2
    return jnp.broadcast_to(chosen[0], index.shape)
