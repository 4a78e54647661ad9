"""Moments in bfloat16, and in float8 as torchao stores them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import BFloat16, Float32, UInt32

from paged_optax.codecs.codec import Noise, Quantized, get_strides, quantized_types
from paged_optax.codecs.packing import (
    SMALLEST_ABSMAX,
    bits,
    block_absmax,
    divide,
    from_blocks,
    to_blocks,
)

_UPPER_HALF = np.uint32(0xFFFF0000)

_LARGEST = np.float32(448)  # of float8_e4m3fn
_SMALLEST = np.float32(2.0**-9)


@dataclasses.dataclass(frozen=True)
class BFloat16Codec:
    r"""Stores the upper half of each float32: 2 bytes a value.

    With :math:`\beta_2 = 0.999` a moment changes by about a thousandth of itself in a
    step, and adjacent bfloat16 numbers differ by at least 1/256 of themselves, so that
    a moment rounded to nearest never changes. Stochastic rounding takes the neighbour
    farther from zero with a probability of the dropped digits over the gap, which
    preserves the mean.

    Attributes:
      stochastic: If True, rounds stochastically.
      seed: The seed of stochastic rounding, with moment and step.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from paged_optax.codecs import draw
      >>> codec = BFloat16Codec(stochastic=True)
      >>> noise = draw(jax.random.key(0), step=0)
      >>> page = jnp.full((10000,), 1 + 1 / 1024)
      >>> mean = codec.decode(codec.encode(page, noise), page.shape).mean()
      >>> abs(float(mean) - (1 + 1 / 1024)) < 1e-4
      True

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015.
    """

    stochastic: bool = False
    seed: int = 0
    block = 1
    signed = True

    @property
    def draws(self) -> bool:
        """True if `encode` needs noise."""
        return self.stochastic

    def stored(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Returns a bfloat16 array of the moment's shape."""
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> BFloat16[Array, "*shape"]:
        """Rounds a page to bfloat16; infinities and NaN are kept."""
        nearest = page.astype(jnp.bfloat16)
        if not self.stochastic:
            return nearest
        assert noise is not None
        pattern = lax.bitcast_convert_type(page, jnp.uint32)
        pattern = (pattern + _sixteen_bits(noise, page.shape)) & _UPPER_HALF
        rounded = lax.bitcast_convert_type(pattern, jnp.float32)
        # This conversion is exact. A carry could turn NaN into a number.
        return jnp.where(jnp.isnan(page), nearest, rounded.astype(jnp.bfloat16))

    def decode(
        self, stored: BFloat16[Array, "*shape"], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        return stored.astype(jnp.float32)


def _sixteen_bits(noise: Noise, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Returns sixteen random bits a value: a hash of its offset, keyed by two words.

    A dozen integer operations, compared with about seventy of Threefry. Shifts and
    multipliers are Wellons' `triple32`.

    References:
      Wellons, `Prospecting for Hash Functions
      <https://nullprogram.com/blog/2018/07/31/>`_, 2018.
    """
    x = jnp.full(shape, noise.start)
    for axis, stride in enumerate(noise.strides or get_strides(shape)):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        x = x + index * np.uint32(stride % 2**32)
    x = x ^ noise.words[0]
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    # The second word enters after the first round, so that two keys do not permute one
    # sequence.
    x = x ^ noise.words[1]
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x >> np.uint32(16)


@dataclasses.dataclass(frozen=True)
class Float8E4M3:
    """Stores each value as `float8_e4m3fn` of a scaled value: 1 + 4/256 bytes.

    The scale of 256 values is their largest magnitude, at least 1e-12, over 448, the
    largest float8. Codes and scales equal torchao's `AdamFp8`, except that a positive
    number of an unsigned moment is never stored as zero, but at least as 2^-9, the
    least float8: see `DynamicInt8`. A block with NaN or an infinity decodes to NaN.

    Attributes:
      signed: True for first moments, False for second moments.
      rounds_to_zero: If True, positive numbers of a second moment may be stored as
        zero, as in torchao.

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

    def stored(self, shape: tuple[int, ...]) -> Quantized:
        """Returns float8 codes, and a float32 scale for each block."""
        return quantized_types(shape, self.block, jnp.float8_e4m3fn)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized:
        """Stores a page."""
        values = to_blocks(page, self.block)
        largest = jnp.maximum(block_absmax(values), SMALLEST_ABSMAX)
        scales = divide(largest, _LARGEST)
        scaled = divide(values, scales[:, None])
        # A positive second moment is never stored as zero: see `DynamicInt8`.
        if not (self.signed or self.rounds_to_zero):
            clipped = jnp.maximum(scaled, _SMALLEST)
            scaled = jnp.where(bits(values) > 0, clipped, scaled)
        codes = scaled.astype(jnp.float8_e4m3fn)
        return Quantized(from_blocks(codes, page.shape), scales)

    def decode(
        self, stored: Quantized, shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        numbers = to_blocks(stored.codes, self.block).astype(jnp.float32)
        return from_blocks(numbers * stored.scales[:, None], shape)
