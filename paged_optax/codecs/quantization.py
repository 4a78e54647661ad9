"""The maps of codes to numbers, blocks, and the exact arithmetic that codecs share."""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, Shaped


def _spaced(count: int) -> np.ndarray:
    """`torch.linspace(0.1, 1, count + 1)` in float32, as its vectorised CPU loop is."""
    # It steps from whichever end is nearer, multiplying and adding with one rounding;
    # float64 holds the product exactly. Other formulas miss a few entries by one ulp.
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count))
    k = np.arange(count + 1)
    from_first = np.float64(first) + step * k
    from_last = np.float64(last) - step * (count - k)
    return np.where(2 * k < count + 1, from_first, from_last).astype(np.float32)


@functools.cache
def dynamic_map(signed: bool, decades: int = 7) -> np.ndarray:
    r"""The dynamic map: more digits for larger numbers, more range for smaller ones.

    Decade :math:`e` (from the smallest) is cut into :math:`n_e` equal intervals and
    holds their centres,

    .. math::
        10^{e - d + 1} \left(0.1 + 0.9 \frac{j + 1/2}{n_e}\right),
        \quad 0 \le j < n_e,\ 0 \le e < d,

    with :math:`n_e = 2^e` and both signs, or :math:`n_e = 2^{e + 1}` without. 0 and 1
    complete the map; -1 is not in it.

    Args:
      signed: Whether it holds negative numbers.
      decades: Powers of ten it spans: 7 for 8 bits, 3 for 4.

    Returns:
      The numbers in increasing order, float32; a code is a position among them. They
      are bitsandbytes' own, bit for bit.

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022; Dettmers, `8-Bit Approximations for
      Parallelism in Deep Learning <https://arxiv.org/abs/1511.04561>`_, 2016.
    """
    positive = []
    for exponent in range(decades):
        edges = _spaced(2 ** (exponent if signed else exponent + 1))
        centres = (edges[:-1] + edges[1:]) / np.float32(2)
        positive.append(np.float32(10.0 ** (exponent - decades + 1)) * centres)
    numbers = np.concatenate(positive)
    negative = -numbers if signed else numbers[:0]
    ends = np.array([0, 1], np.float32)
    numbers = np.sort(np.concatenate([negative, numbers, ends]))
    numbers.flags.writeable = False
    return numbers


@functools.cache
def linear_map() -> np.ndarray:
    """The 16 multiples of 1/16 up to 1; 0 is not among them.

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023.
    """
    numbers = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    numbers.flags.writeable = False
    return numbers


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


def block_count(shape: tuple[int, ...], block: int) -> int:
    """Blocks in a moment of this shape, the last one perhaps not full."""
    return -(-math.prod(shape) // block)


def to_blocks(x: Shaped[Array, "*shape"], block: int) -> Shaped[Array, "blocks block"]:
    """The flattened values in rows of one block, the last one filled with zeros."""
    flat = x.reshape(-1)
    missing = -flat.size % block
    if missing:
        flat = jnp.pad(flat, (0, missing))
    return flat.reshape(-1, block)


def from_blocks(
    x: Shaped[Array, "blocks block"], shape: tuple[int, ...]
) -> Shaped[Array, "*shape"]:
    """Undoes `to_blocks`."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def block_absmax(x: Float32[Array, "blocks block"]) -> Float32[Array, " blocks"]:
    """The largest magnitude of each block; NaN where one of its values is NaN."""
    # Magnitudes are compared by their bit patterns. As numbers, backends that flush
    # denormal ones to zero (XLA:CPU, XLA:TPU) would not find the largest of those, and
    # XLA:CPU's maximum over the rows of a matrix passes NaN over (jax 0.10.2,
    # 0.12.0.1).
    return from_bits(jnp.max(bits(x) & MAGNITUDE, axis=1))


def divide(
    x: Float32[Array, "*#shape"], y: Float32[Array, "*#shape"] | np.float32
) -> Float32[Array, "*shape"]:
    """Divides with one rounding, under `jit` too."""
    # XLA turns a division by a constant or by a broadcast into a multiplication by its
    # reciprocal, which rounds twice and flushes the reciprocals of numbers above 2^126
    # (checked on CPU with jax 0.10.2 and 0.12.0.1). This divisor looks like neither.
    return x / jnp.where(jnp.isnan(x), x, y)


def lookup(
    index: Int32[Array, "*shape"], entries: Sequence[int | float], dtype: type
) -> Array:
    """Looks a small table up without a gather, which a TPU does one by one.

    Args:
      index: Positions. If one is out of range, only its low bits are used.
      entries: The table, of a power of two entries.
      dtype: Its dtype.
    """
    # Each bit of the index halves what is left of the table.
    rest: list[Array] = [jnp.asarray(entry, dtype) for entry in entries]
    bit = 1
    while len(rest) > 1:
        high = (index & np.int32(bit)) != 0
        pairs = zip(rest[::2], rest[1::2], strict=True)
        rest = [jnp.where(high, odd, even) for even, odd in pairs]
        bit *= 2
    return jnp.broadcast_to(rest[0], index.shape)
