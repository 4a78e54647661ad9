"""Moments in four bits, as torchao stores them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, UInt8

from paged_optax.codecs.codec import Noise, Quantized
from paged_optax.codecs.dynamic_int8 import dynamic_map
from paged_optax.codecs.packing import (
    SMALLEST_ABSMAX,
    bits,
    block_absmax,
    block_count,
    divide,
    from_bits,
    from_blocks,
    interleave,
    lookup,
    to_blocks,
)


@dataclasses.dataclass(frozen=True)
class DynamicInt4:
    """Stores half a byte a value: 0.5 + 4/128 bytes.

    First moments use the signed dynamic map of three decades. Second moments use the 16
    multiples of 1/16, without zero. Codes and scales equal torchao's `Adam4bit`. The
    scale of 128 values is their largest magnitude, at least 1e-12. The nearest code is
    stored; of two equally near ones, the higher.

    Unlike in torchao, a block of zeros always has scale zero, as in a fresh torchao
    state. torchao stores it again with scale 1e-12, so that zeros of a second moment
    become 6.25e-14.

    Two codes share a byte along the last axis, the first in the higher bits; the last
    byte of a row of odd length has one code. If a block has NaN or an infinity, its
    scale and all its values decode to NaN or an infinity.

    Attributes:
      signed: If True, the map has negative numbers.
      paired: If True, two codes share a byte, else each has one.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = DynamicInt4(signed=False)
      >>> stored = codec.encode(jnp.array([[1.0, 0.5, 0.1]]))
      >>> [hex(byte) for byte in stored.codes[0].tolist()]
      ['0xf7', '0x10']

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023; torchao's
      `torchao/optim/subclass_4bit.py <https://github.com/pytorch/ao>`_.
    """

    signed: bool = True
    paired: bool = True
    name = "dynamic_int4"
    block = 128
    draws = False
    bits = 4

    def stored(self, shape: tuple[int, ...]) -> Quantized[jax.ShapeDtypeStruct]:
        """Returns uint8 codes, and a float32 scale for each block."""
        return Quantized(
            jax.ShapeDtypeStruct(_packed(shape) if self.paired else shape, jnp.uint8),
            jax.ShapeDtypeStruct((block_count(shape, self.block),), jnp.float32),
        )

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized[Array]:
        """Stores a page."""
        values = to_blocks(page, self.block)
        largest = block_absmax(values)
        divisors = jnp.maximum(largest, SMALLEST_ABSMAX)
        scaled = divide(values, divisors[:, None])
        codes = jnp.zeros(values.shape, jnp.int32)
        # The code is the number of thresholds that the value reaches.
        for threshold in _thresholds(self.signed):
            codes = codes + (scaled >= np.float32(threshold)).astype(jnp.int32)
        # Bytes and blocks are padded with zeros.
        zero = sum(threshold <= 0 for threshold in _thresholds(self.signed))
        codes = codes.astype(jnp.uint8)
        if self.paired:
            codes = _pack(codes, page.shape, zero)
        else:
            codes = from_blocks(codes, page.shape)
        scales = jnp.where(bits(largest) == 0, largest, divisors)
        return Quantized(codes, scales)

    def decode(
        self, stored: Quantized[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        if self.paired:
            codes = _unpack(stored.codes, shape, self.block)
        else:
            codes = to_blocks(stored.codes, self.block).astype(jnp.int32)
        numbers = lookup(codes, _map(self.signed).view(np.int32).tolist(), jnp.int32)
        return from_blocks(from_bits(numbers) * stored.scales[:, None], shape)


@functools.cache
def linear_map() -> np.ndarray:
    """Returns the 16 multiples of 1/16 up to 1, without 0.

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023.
    """
    numbers = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    numbers.flags.writeable = False
    return numbers


def _map(signed: bool) -> np.ndarray:
    return dynamic_map(True, decades=3) if signed else linear_map()


@functools.cache
def _thresholds(signed: bool) -> tuple[float, ...]:
    """Returns the least float32 that torchao rounds up to each but the lowest."""
    # It compares differences: `x - down >= (up - down) * 0.5`, each rounded to float32.
    numbers, thresholds = _map(signed), []
    for down, up in zip(numbers[:-1], numbers[1:], strict=True):
        half = (up - down) * np.float32(0.5)
        x = np.float32((np.float64(down) + np.float64(up)) / 2)
        while x - down >= half:
            x = np.nextafter(x, down)
        while x - down < half:
            x = np.nextafter(x, up)
        thresholds.append(float(x))
    return tuple(thresholds)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // 2)) if shape else ()


def _pairs_run_on(shape: tuple[int, ...]) -> bool:
    """Returns whether pairs along the last axis are pairs of the flattened moment."""
    return not shape or shape[-1] % 2 == 0 or math.prod(shape[:-1]) == 1


def _pack(
    codes: UInt8[Array, "blocks block"], shape: tuple[int, ...], fill: int
) -> UInt8[Array, "*packed"]:
    if not _pairs_run_on(shape):
        rows = from_blocks(codes, shape).reshape(-1, shape[-1])
        codes = jnp.pad(rows, ((0, 0), (0, 1)), constant_values=fill)
    pairs = (codes[:, ::2] << np.uint8(4)) | codes[:, 1::2]
    return from_blocks(pairs, _packed(shape))


def _unpack(
    packed: UInt8[Array, "*packed"], shape: tuple[int, ...], block: int
) -> Int32[Array, "blocks block"]:
    run_on = _pairs_run_on(shape)
    width = block // 2 if run_on else packed.shape[-1]
    rows = to_blocks(packed, width).astype(jnp.int32)
    # A last axis of two would take 64 times the space on a TPU; elsewhere it vectorizes
    # better than padding between the columns.
    between = lambda rows: interleave([rows >> np.int32(4), rows & np.int32(15)], 1)
    codes = lax.platform_dependent(rows, tpu=between, default=_repeat)
    return codes if run_on else to_blocks(codes[:, : shape[-1]], block)


def _repeat(rows: Int32[Array, "rows half"]) -> Int32[Array, "rows whole"]:
    count, half = rows.shape
    twice = jnp.broadcast_to(rows[:, :, None], (count, half, 2)).reshape(
        count, 2 * half
    )
    column = lax.broadcasted_iota(jnp.int32, twice.shape, 1)
    return (twice >> (4 - 4 * (column & np.int32(1)))) & np.int32(15)
