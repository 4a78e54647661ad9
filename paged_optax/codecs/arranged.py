"""What a codec stores, arranged for memory that is sliced and divided.

**Bytes in words.** XLA:TPU cannot slice an array of bytes in host memory: for each page
it copies all of it to the device and back, in another tiling (libtpu 0.0.52). Words of
32 bits it slices like float32.

**Scales by columns.** The scales of a flattened matrix do not divide as the matrix
does. Where a row is whole blocks, they are an array `[blocks of a row, *rows]`, whose
dimensions are the matrix's own: it is paged by the same rows and divided over the same
devices, and no way of dividing changes what it holds.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, UInt8

from paged_optax.codecs import blocks
from paged_optax.codecs.codec import Codec, Noise, Quantized


@dataclasses.dataclass(frozen=True, repr=False)
class Arranged:
    """Stores what a codec does, differently arranged.

    Of a word the first byte is the lowest, as in the memory of any machine at hand:
    NumPy's `words.view("uint8")` has the codec's own bytes and shape. Unsigned codes
    make `uint32`, others `int32`, so that a state tells them apart by itself.

    Attributes:
      codec: The codec.
      in_words: Whether four codes of a byte are one word.
      by_columns: Whether scales are `[blocks of a row, *rows]`.
    """

    codec: Codec
    in_words: bool
    by_columns: bool

    @property
    def block(self) -> int:
        """The codec's own."""
        return self.codec.block

    @property
    def signed(self) -> bool:
        """The codec's own."""
        return self.codec.signed

    @property
    def draws(self) -> bool:
        """The codec's own."""
        return self.codec.draws

    @property
    def seed(self) -> int:
        """The codec's own, 0 where it has none."""
        return getattr(self.codec, "seed", 0)

    def __repr__(self) -> str:
        return repr(self.codec)

    def stored(self, shape: tuple[int, ...]) -> Any:
        """The codec's codes and scales, in their other shapes."""
        found = self.codec.stored(shape)
        codes = codes_of(found)
        if self.in_words:
            unsigned = jnp.issubdtype(codes.dtype, jnp.unsignedinteger)
            codes = jax.ShapeDtypeStruct(
                (*codes.shape[:-1], codes.shape[-1] // 4),
                jnp.uint32 if unsigned else jnp.int32,
            )
        if not isinstance(found, Quantized):
            return codes
        scales = found.scales
        if self.by_columns:
            columns = (shape[-1] // self.block, *shape[:-1])
            scales = jax.ShapeDtypeStruct(columns, scales.dtype)
        return Quantized(codes, scales)

    def encode(self, page: Float32[Array, "*shape"], noise: Noise | None = None) -> Any:
        """Stores a page."""
        found = self.codec.encode(page, noise)
        codes = codes_of(found)
        if self.in_words:
            like = codes_of(self.stored(page.shape))
            codes = lax.bitcast_convert_type(codes, jnp.uint8)
            words = lax.platform_dependent(
                codes.reshape(-1, codes.shape[-1]), tpu=_every_fourth, default=_bitcast
            )
            codes = lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)
        if not isinstance(found, Quantized):
            return codes
        scales = found.scales
        if self.by_columns:
            scales = jnp.moveaxis(scales.reshape(*page.shape[:-1], -1), -1, 0)
        return Quantized(codes, scales)

    def decode(self, stored: Any, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        """Gives a page back."""
        codes = codes_of(stored)
        if self.in_words:
            like = codes_of(self.codec.stored(shape))
            words = lax.bitcast_convert_type(codes, jnp.int32)
            codes = lax.platform_dependent(
                words.reshape(-1, words.shape[-1]), tpu=_put_between, default=_bytes
            )
            codes = lax.bitcast_convert_type(codes.reshape(like.shape), like.dtype)
        if not isinstance(stored, Quantized):
            return self.codec.decode(codes, shape)
        scales = stored.scales
        if self.by_columns:
            scales = jnp.moveaxis(scales, 0, -1).reshape(-1)
        return self.codec.decode(Quantized(codes, scales), shape)


def arranged(codec: Codec, shape: tuple[int, ...]) -> Codec:
    """The codec as it stores a moment, or one device's part of one, of this shape.

    A vector is cut into pages at any value, and stays as it is.

    Args:
      codec: The codec.
      shape: The shape.

    Example:
      >>> from paged_optax.codecs import named
      >>> codec = arranged(named("dynamic_int8", signed=True), (64, 512))
      >>> codec.stored((64, 512)).codes
      ShapeDtypeStruct(shape=(64, 128), dtype=uint32)
      >>> codec.stored((64, 512)).scales
      ShapeDtypeStruct(shape=(2, 64), dtype=float32)
    """
    stored = codec.stored(shape)
    codes = codes_of(stored)
    if len(shape) < 2:
        return codec
    in_words = codes.dtype.itemsize == 1 and not codes.shape[-1] % 4
    by_columns = isinstance(stored, Quantized) and not shape[-1] % codec.block
    if not (in_words or by_columns):
        return codec
    return Arranged(codec, in_words, by_columns)


def are_by_columns(codec: Codec) -> bool:
    """Whether a codec's scales have the dimensions of the moment."""
    return isinstance(codec, Arranged) and codec.by_columns


def codes_of(stored: Any) -> Any:
    """The codes, or the array itself."""
    return stored.codes if isinstance(stored, Quantized) else stored


def _bitcast(codes: UInt8[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    rows, columns = codes.shape
    return lax.bitcast_convert_type(codes.reshape(rows, columns // 4, 4), jnp.int32)


def _bytes(words: Int32[Array, "rows words"]) -> UInt8[Array, "rows columns"]:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)


# A last axis of four would take 32 times the space on a TPU.


def _every_fourth(codes: UInt8[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    wide = codes.astype(jnp.int32)
    parts = [wide[:, i::4] << np.int32(8 * i) for i in range(4)]
    return functools.reduce(lax.bitwise_or, parts)


def _put_between(words: Int32[Array, "rows words"]) -> UInt8[Array, "rows columns"]:
    codes = [(words >> np.int32(8 * i)) & np.int32(255) for i in range(4)]
    return blocks.interleaved(codes).astype(jnp.uint8)
