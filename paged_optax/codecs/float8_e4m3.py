"""Moments in eight-bit floating point, as torchao stores them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from paged_optax.codecs import blocks
from paged_optax.codecs.codec import Noise, Quantized

_LARGEST = np.float32(448)  # of float8_e4m3fn
_SMALLEST = np.float32(2.0**-9)


@dataclasses.dataclass(frozen=True)
class Float8E4M3:
    """Stores each value as `float8_e4m3fn` of a scaled value: 1 + 4/256 bytes.

    The scale of 256 values is their largest magnitude, at least 1e-12, over 448, the
    largest float8: codes and scales are those of torchao's `AdamFp8`. A block that
    holds NaN or an infinity decodes to NaN.

    One rule for moments without a sign is not torchao's. A positive number is never
    stored as zero. It is stored at least as the least float8, 2^-9: see `DynamicInt8`.

    Attributes:
      signed: Whether the moment has negative values: True for first moments, False for
        second moments.
      rounds_to_zero: Whether positive numbers of a second moment may be stored as zero,
        as in torchao. Those of a first moment always may.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = Float8E4M3()
      >>> page = jnp.array([-448.0, 0.0, 17.0, 100.0])
      >>> codec.decode(codec.encode(page), page.shape).tolist()
      [-448.0, 0.0, 16.0, 96.0]

    References:
      Micikevicius et al., `FP8 Formats for Deep Learning
      <https://arxiv.org/abs/2209.05433>`_, 2022; torchao's
      `torchao/optim/subclass_fp8.py <https://github.com/pytorch/ao>`_.
    """

    signed: bool = True
    rounds_to_zero: bool = False
    name = "float8_e4m3"
    block = 256
    draws = False

    def stored(self, shape: tuple[int, ...]) -> Quantized[jax.ShapeDtypeStruct]:
        """float8 codes of the moment's shape, a float32 scale for each block."""
        return Quantized(
            jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((blocks.count(shape, self.block),), jnp.float32),
        )

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized[Array]:
        """Stores a page."""
        values = blocks.split(page, self.block)
        largest = jnp.maximum(blocks.absmax(values), blocks.SMALLEST_ABSMAX)
        scales = blocks.divide(largest, _LARGEST)
        scaled = blocks.divide(values, scales[:, None])
        if not (self.signed or self.rounds_to_zero):
            least = jnp.maximum(scaled, _SMALLEST)
            scaled = jnp.where(blocks.bits(values) > 0, least, scaled)
        codes = scaled.astype(jnp.float8_e4m3fn)
        return Quantized(blocks.join(codes, page.shape), scales)

    def decode(
        self, stored: Quantized[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Gives a page back."""
        numbers = blocks.split(stored.codes, self.block).astype(jnp.float32)
        return blocks.join(numbers * stored.scales[:, None], shape)
