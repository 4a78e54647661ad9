"""Moments as they are."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from paged_optax.codecs.codec import Noise


@dataclasses.dataclass(frozen=True)
class Float32Codec:
    """Stores float32 as float32: 4 bytes a value, nothing lost."""

    block = 1
    signed = True
    draws = False

    def stored(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """A float32 array of the moment's shape."""
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Float32[Array, "*shape"]:
        """The page."""
        return page

    def decode(
        self, stored: Float32[Array, "*shape"], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """The page."""
        return stored
