"""Moments in four bits, as torchao stores them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from paged_optax.codecs.codec import Noise, Quantized, quantized_types
from paged_optax.codecs.dynamic_int8 import dynamic_map
from paged_optax.codecs.packing import (
    SMALLEST_ABSMAX,
    bits,
    block_absmax,
    divide,
    from_bits,
    from_blocks,
    lookup,
    to_blocks,
)


@dataclasses.dataclass(frozen=True)
class DynamicInt4:
    """Stores half a byte a value: 0.5 + 4/128 bytes in words of eight codes.

    First moments use the signed dynamic map of three decades. Second moments use the 16
    multiples of 1/16, without zero. Codes and scales equal torchao's `Adam4bit`. The
    scale of 128 values is their largest magnitude, at least 1e-12. The nearest code is
    stored; of two equally near ones, the higher.

    Unlike in torchao, a block of zeros always has scale zero, as in a fresh torchao
    state. torchao stores it again with scale 1e-12, so that zeros of a second moment
    become 6.25e-14.

    A code takes a byte here; `layout` packs the codes of matrices into words. If a
    block has NaN or an infinity, its scale and all its values decode to NaN or an
    infinity.

    Attributes:
      signed: If True, the map has negative numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = DynamicInt4(signed=False)
      >>> codec.encode(jnp.array([1.0, 0.5, 0.1])).codes.tolist()
      [15, 7, 1]

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023; torchao's
      `torchao/optim/subclass_4bit.py <https://github.com/pytorch/ao>`_.
    """

    signed: bool = True
    name = "dynamic_int4"
    block = 128
    draws = False
    bits = 4

    def stored(self, shape: tuple[int, ...]) -> Quantized:
        """Returns uint8 codes, and a float32 scale for each block."""
        return quantized_types(shape, self.block, jnp.uint8)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized:
        """Stores a page."""
        values = to_blocks(page, self.block)
        largest = block_absmax(values)
        divisors = jnp.maximum(largest, SMALLEST_ABSMAX)
        scaled = divide(values, divisors[:, None])
        codes = jnp.zeros(values.shape, jnp.int32)
        # The code is the number of thresholds that the value reaches.
        for threshold in _thresholds(self.signed):
            codes = codes + (scaled >= np.float32(threshold)).astype(jnp.int32)
        codes = from_blocks(codes.astype(jnp.uint8), page.shape)
        scales = jnp.where(bits(largest) == 0, largest, divisors)
        return Quantized(codes, scales)

    def decode(
        self, stored: Quantized, shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        codes = to_blocks(stored.codes, self.block).astype(jnp.int32)
        numbers = lookup(codes, int4_map(self.signed).view(np.int32).tolist())
        return from_blocks(from_bits(numbers) * stored.scales[:, None], shape)


def int4_map(signed: bool) -> np.ndarray:
    """Returns three signed decades, or the 16 multiples of 1/16 up to 1, without 0."""
    if signed:
        return dynamic_map(True, decades=3)
    return np.arange(1, 17, dtype=np.float32) / np.float32(16)


@functools.cache
def _thresholds(signed: bool) -> tuple[float, ...]:
    """Returns the least float32 that torchao rounds up to each but the lowest."""
    # It compares differences: `x - down >= (up - down) * 0.5`, each rounded to float32.
    numbers, thresholds = int4_map(signed), []
    for down, up in zip(numbers[:-1], numbers[1:], strict=True):
        half = (up - down) * np.float32(0.5)
        x = np.float32((np.float64(down) + np.float64(up)) / 2)
        while x - down >= half:
            x = np.nextafter(x, down)
        while x - down < half:
            x = np.nextafter(x, up)
        thresholds.append(float(x))
    return tuple(thresholds)
