"""Moments in bfloat16, rounded to nearest or stochastically."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import BFloat16, Float32, UInt32

from paged_optax.codecs.codec import Noise, strides_of

_KEPT = np.uint32(0xFFFF0000)


@dataclasses.dataclass(frozen=True)
class BFloat16Codec:
    r"""Stores the upper half of each float32: 2 bytes a value.

    With :math:`\beta_2 = 0.999` a moment changes by about a thousandth of itself in a
    step. Neighbouring bfloat16 numbers are at least 1/256 of themselves apart. So a
    moment that is rounded to the nearest one does not change. Stochastic rounding takes
    the neighbour farther from zero with a probability equal to the digits it drops, as
    a part of the gap. The mean is then right.

    Attributes:
      stochastic: Whether to round stochastically.
      seed: What the random bits of a paged state follow from, beside moment and step;
        of use where `stochastic`.

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
        """Whether `encode` needs noise."""
        return self.stochastic

    def stored(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """A bfloat16 array of the moment's shape."""
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> BFloat16[Array, "*shape"]:
        """Rounds a page.

        Args:
          page: The values. Infinities and NaN stay what they are.
          noise: What stochastic rounding draws from.

        Returns:
          The page in bfloat16.

        Raises:
          ValueError: If stochastic rounding is given no noise.
        """
        nearest = page.astype(jnp.bfloat16)
        if not self.stochastic:
            return nearest
        if noise is None:
            raise ValueError(
                "bfloat16 with stochastic rounding needs noise: pass"
                " encode(page, draw(key, step, start))."
            )
        dropped = lax.bitcast_convert_type(page, jnp.uint32) + _sixteen_bits(
            noise, page.shape
        )
        rounded = lax.bitcast_convert_type(dropped & _KEPT, jnp.float32)
        # Nothing is left to round. A carry could turn NaN into a number.
        return jnp.where(jnp.isnan(page), nearest, rounded.astype(jnp.bfloat16))

    def decode(
        self, stored: BFloat16[Array, "*shape"], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """The page in float32."""
        return stored.astype(jnp.float32)


def _sixteen_bits(noise: Noise, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Sixteen random bits a value: a hash of its position, keyed by two words.

    A dozen integer operations, against some seventy of Threefry. Shifts and
    multipliers are Wellons' `triple32`; the second word enters after the first round,
    so that two keys do not give one sequence in another order.

    References:
      Wellons, `Prospecting for Hash Functions
      <https://nullprogram.com/blog/2018/07/31/>`_, 2018.
    """
    x = jnp.full(shape, noise.start)
    for axis, stride in enumerate(noise.strides or strides_of(shape)):
        position = lax.broadcasted_iota(jnp.uint32, shape, axis)
        x = x + position * np.uint32(stride % 2**32)
    x = x ^ noise.words[0]
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x = x ^ noise.words[1]
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x >> np.uint32(16)
