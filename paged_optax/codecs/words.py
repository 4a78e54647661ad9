"""Codes of one byte, four in a word.

XLA:TPU cannot slice an array of bytes in host memory: for each page it copies all of
it to the device and back, in another tiling (libtpu 0.0.52). Words of 32 bits it
slices like float32. So the engine stores bytes in words wherever rows are whole ones.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, Shaped, UInt8

from paged_optax.codecs.codec import Codec, Noise, Quantized


@dataclasses.dataclass(frozen=True, repr=False)
class InWords:
    """Stores what a codec does, the bytes of each row in words.

    The first byte is the lowest, as in the memory of any machine at hand: NumPy's
    `words.view("uint8")` has the codec's own bytes and shape. Unsigned codes make
    `uint32`, others `int32`, so that a state tells them apart by itself.

    Attributes:
      codec: The codec, of codes of one byte.
    """

    codec: Codec

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
        """A quarter of the columns, of four bytes each."""
        found = self.codec.stored(shape)
        codes = _codes(found)
        unsigned = jnp.issubdtype(codes.dtype, jnp.unsignedinteger)
        return _with_codes(
            found,
            jax.ShapeDtypeStruct(
                (*codes.shape[:-1], codes.shape[-1] // 4),
                jnp.uint32 if unsigned else jnp.int32,
            ),
        )

    def encode(self, page: Float32[Array, "*shape"], noise: Noise | None = None) -> Any:
        """Stores a page."""
        found = self.codec.encode(page, noise)
        codes = lax.bitcast_convert_type(_codes(found), jnp.uint8)
        words = lax.platform_dependent(
            codes.reshape(-1, codes.shape[-1]), tpu=_every_fourth, default=_bitcast
        )
        like = _codes(self.stored(page.shape))
        words = lax.bitcast_convert_type(words, like.dtype)
        return _with_codes(found, words.reshape(like.shape))

    def decode(self, stored: Any, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        """Gives a page back."""
        like = _codes(self.codec.stored(shape))
        words = lax.bitcast_convert_type(_codes(stored), jnp.int32)
        codes = lax.platform_dependent(
            words.reshape(-1, words.shape[-1]), tpu=_put_between, default=_bytes
        )
        codes = lax.bitcast_convert_type(codes.reshape(like.shape), like.dtype)
        return self.codec.decode(_with_codes(stored, codes), shape)


def in_words(codec: Codec, shape: tuple[int, ...]) -> Codec:
    """The codec with which a moment's bytes are stored in words, if they can be.

    A vector is cut into pages at any value, and stays in bytes.

    Args:
      codec: The codec.
      shape: The moment's shape.

    Example:
      >>> from paged_optax.codecs import named
      >>> codec = in_words(named("dynamic_int8", signed=True), (64, 128))
      >>> codec.stored((64, 128)).codes
      ShapeDtypeStruct(shape=(64, 32), dtype=uint32)
    """
    codes = _codes(codec.stored(shape))
    if len(shape) < 2 or codes.dtype.itemsize != 1 or codes.shape[-1] % 4:
        return codec
    return InWords(codec)


def _codes(stored: Any) -> Any:
    return stored.codes if isinstance(stored, Quantized) else stored


def _with_codes(stored: Any, codes: Any) -> Any:
    if isinstance(stored, Quantized):
        return Quantized(codes, stored.scales)
    return codes


def _bitcast(codes: UInt8[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    rows, columns = codes.shape
    return lax.bitcast_convert_type(codes.reshape(rows, columns // 4, 4), jnp.int32)


def _bytes(words: Int32[Array, "rows words"]) -> UInt8[Array, "rows columns"]:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)


# A last axis of four would take 32 times the space on a TPU.


def _every_fourth(codes: UInt8[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    wide = codes.astype(jnp.int32)
    return _any_of([wide[:, i::4] << np.int32(8 * i) for i in range(4)])


def _put_between(words: Int32[Array, "rows words"]) -> UInt8[Array, "rows columns"]:
    zero, rest = np.int32(0), (0, 0, 0)
    codes = [(words >> np.int32(8 * i)) & np.int32(255) for i in range(4)]
    wide = [lax.pad(x, zero, (rest, (i, 3 - i, 3))) for i, x in enumerate(codes)]
    return _any_of(wide).astype(jnp.uint8)


def _any_of(words: list[Shaped[Array, "rows words"]]) -> Any:
    first, second, third, fourth = words
    return (first | second) | (third | fourth)
