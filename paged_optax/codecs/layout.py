"""Arrangement of codes and scales in memory that is sliced and sharded.

Codes share 32-bit words along the axis that a TPU puts in its sublanes. Scales have the
moment's axes if rows, or columns, are whole blocks.

The field of the codes names the codec (`paged_optax.codecs.identity`), and the dtype
distinguishes maps further: codes of a map with negative numbers are signed integers,
other codes unsigned, eight-bit floats float8. In words float8 codes are unsigned
integers, and their scales integers with the bits of float32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, PyTree

from paged_optax.backend import tiling
from paged_optax.backend.platforms import on_platforms
from paged_optax.backend.types import Shape
from paged_optax.codecs.codec import Codec, Noise, Quantized
from paged_optax.codecs.packing import pack, unpack

# Blocks run through the flattened moment if at most this number of rows is whole
# blocks, and rows are shorter than `_WIDE`: longer ones do not fit a page of a TPU's
# tiles.
_FEW_ROWS = 8
_WIDE = 2**14
# The least entries of an axis that is padded to whole words, at a cost below 3%.
_LEAST_FILLED = 128


@dataclasses.dataclass(frozen=True, repr=False)
class Arranged:
    """Rearranges the codes and scales of a codec.

    The first code of a word has its lowest bits.

    Attributes:
      codec: The codec, which stores a code in each byte.
      axis: The axis along which codes share a word, -1 or -2; None: one byte a code.
      blocks: The axis along which blocks run, -1 or -2, with one scale for each block;
        None: blocks run through the flattened moment.
      block, signed, draws, seed: Attributes of the codec.
    """

    codec: Codec
    axis: int | None
    blocks: int | None
    block: int
    signed: bool
    draws: bool
    seed: int

    @property
    def packed(self) -> int:
        """Codes in one word."""
        return 32 // _bits(self.codec)

    def __repr__(self) -> str:
        return repr(self.codec)

    def stored(self, shape: Shape) -> PyTree[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the rearranged codes and scales."""
        plain = self.codec.stored(shape)
        entries, dtype = list(get_codes(plain).shape), get_codes(plain).dtype
        floats = jnp.issubdtype(dtype, jnp.floating)
        if self.axis is not None:
            entries[self.axis] = -(-entries[self.axis] // self.packed)
            dtype = jnp.int32 if self.signed and not floats else jnp.uint32
        elif dtype.itemsize == 1 and not floats:
            dtype = jnp.int8 if self.signed else jnp.uint8
        codes = jax.ShapeDtypeStruct(tuple(entries), dtype)
        if not isinstance(plain, Quantized):
            return codes
        dtype, blocks = plain.scales.dtype, list(plain.scales.shape)
        # With the matrix's dimensions, scales are paged and sharded as the matrix is.
        if self.blocks is not None:
            blocks = list(shape)
            blocks[self.blocks] //= self.block
        # In words the scales' dtype, not the codes', identifies float8.
        if floats and self.axis is not None and dtype == jnp.float32:
            dtype = jnp.int32
        return Quantized(codes, jax.ShapeDtypeStruct(tuple(blocks), dtype))

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> PyTree[Array]:
        """Stores a page."""
        # Axes of one entry are removed: see `_reshaped`.
        page_shape, shape = page.shape, _without_units(page.shape)
        page = _reshaped(page, jax.ShapeDtypeStruct(shape, page.dtype))
        arranged = self.arrange(self.codec.encode(self._transposed(page), noise), shape)
        return _reshaped(arranged, self.stored(page_shape))

    def decode(self, stored: PyTree[Array], shape: Shape) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        page_shape, shape = shape, _without_units(shape)
        stored = _reshaped(stored, self.stored(shape))
        transposed = (*shape[:-2], *shape[:-3:-1]) if self.blocks == -2 else shape
        page = self._transposed(
            self.codec.decode(self.plain(stored, shape), transposed)
        )
        return page.reshape(page_shape)

    def _transposed(self, x: Array) -> Array:
        """Swaps the last two axes if blocks run along columns."""
        return jnp.swapaxes(x, -1, -2) if self.blocks == -2 else x

    def arrange(self, encoded: PyTree[Array], shape: Shape) -> PyTree[Array]:
        """Rearranges the codes and scales of a moment of this shape.

        If blocks run along columns, these are of the transposed moment.
        """
        like, codes = self.stored(shape), self._transposed(get_codes(encoded))
        if self.axis is not None:
            # A sign would fill the word's higher bits.
            codes = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
            codes = pack(codes, codes.ndim + self.axis, _bits(self.codec))
        codes = lax.bitcast_convert_type(codes, get_codes(like).dtype)
        if not isinstance(encoded, Quantized):
            return codes
        transposed = list(like.scales.shape)
        if self.blocks == -2:
            transposed[-2:] = transposed[:-3:-1]
        scales = self._transposed(encoded.scales.reshape(transposed))
        return Quantized(codes, lax.bitcast_convert_type(scales, like.scales.dtype))

    def plain(self, stored: PyTree[Array], shape: Shape) -> PyTree[Array]:
        """Undoes `arrange`."""
        like, codes = self.codec.stored(shape), get_codes(stored)
        if self.axis is not None:
            words = lax.bitcast_convert_type(codes, jnp.int32)
            axis = words.ndim + self.axis
            codes = unpack(words, axis, _bits(self.codec), shape[axis])
            codes = codes.astype(jnp.uint8)
        codes = self._transposed(lax.bitcast_convert_type(codes, get_codes(like).dtype))
        if not isinstance(stored, Quantized):
            return codes
        scales = lax.bitcast_convert_type(stored.scales, like.scales.dtype)
        return Quantized(codes, self._transposed(scales).reshape(-1))


def _without_units(shape: Shape) -> Shape:
    """Returns the shape without axes of one entry, but with two axes at least."""
    if len(shape) < 3:
        return shape
    return (*([n for n in shape[:-1] if n > 1] or [1]), shape[-1])


def _reshaped(tree: PyTree[Array], like: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    if jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, like):
        return tree
    tree = jax.tree.map(lambda x, y: x.reshape(y.shape), tree, like)
    # XLA:TPU puts an axis of one entry in the sublanes and compiles for 6 s instead of
    # 1.5 ((1, 197, 1024) in float8, libtpu 0.0.52), unless a barrier follows the
    # reshape.
    return on_platforms("tpu", lax.optimization_barrier, tree)


def arranged(codec: Codec, shape: Shape, whole: Shape | None = None) -> Codec:
    """Returns the codec as it stores a moment, or a shard, of this shape.

    Vectors are sliced into pages at any value, and have one byte a code. A shard is
    arranged as the `whole` moment is where possible, so that the state does not depend
    on the sharding.

    Example:
      >>> from paged_optax.codecs import named
      >>> codec = arranged(named("dynamic_int8", signed=True), (64, 512))
      >>> codec.stored((64, 512)).codes
      ShapeDtypeStruct(shape=(16, 512), dtype=int32)
      >>> codec.stored((64, 512)).scales
      ShapeDtypeStruct(shape=(64, 2), dtype=float32)
    """
    stored = codec.stored(shape)
    codes = get_codes(stored)
    bytewise = codes.dtype.itemsize == 1
    words = blocks = None
    if len(shape) > 1:
        packed = 32 // _bits(codec)
        if bytewise:
            words = _axis_of_words(whole or shape, packed)
            if words is None or not _in_words(shape, words, packed):
                words = _axis_of_words(shape, packed)
        if isinstance(stored, Quantized):
            blocks = _axis_of_blocks(whole or shape, codec.block)
            if blocks is None or shape[blocks] % codec.block:
                blocks = _axis_of_blocks(shape, codec.block)
    if words is None and blocks is None and not bytewise:
        return codec
    seed = getattr(codec, "seed", 0)
    return Arranged(codec, words, blocks, codec.block, codec.signed, codec.draws, seed)


def _axis_of_words(shape: Shape, packed: int) -> int | None:
    # XLA:TPU copies a whole array of bytes in host memory to the device and back for
    # each page (libtpu 0.0.52); 32-bit words it slices like float32. Words along the
    # sublanes have the moment's layout, and unpacking moves nothing across lanes. Only
    # the last two axes decide, so that a layer is stored as its stack is.
    sublanes = tiling.minor_to_major(shape[-2:])[1] - 2
    if _in_words(shape, sublanes, packed):
        return sublanes
    other = -3 - sublanes
    return None if shape[other] % packed else other


def _in_words(shape: Shape, axis: int, packed: int) -> bool:
    # With padding in each layer of a stack, the layers' rows could not be collapsed.
    one_layer = axis == -1 or math.prod(shape[:-2]) == 1
    return not shape[axis] % packed or (one_layer and shape[axis] >= _LEAST_FILLED)


def _axis_of_blocks(shape: Shape, block: int) -> int | None:
    rows, columns = shape[-2:]
    if not columns % block:
        return -1
    # Blocks across rows of 50257 values fit no page of a TPU's tiles: 86 s to compile,
    # and 617 MiB of scratch. Along columns they run as in PyTorch, which stores the
    # transposed matrix.
    few = block // math.gcd(block, columns) <= _FEW_ROWS and columns < _WIDE
    return None if few or rows % block else -2


def unarranged(
    codec: Codec, stored: PyTree[Array], shape: Shape | None = None
) -> PyTree[Array]:
    """Returns codes and scales as the codec itself stores them.

    If blocks run along columns, these are of the transposed moment.

    Args:
      codec: The codec.
      stored: A moment that `arranged(codec, shape)` stored.
      shape: The moment's shape; None: the only shape with such arrays.

    Raises:
      ValueError: If no shape has such arrays, or several have.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_optax.codecs import named
      >>> codec, page = named("dynamic_int8", signed=True), jnp.ones((64, 512))
      >>> unarranged(codec, arranged(codec, page.shape).encode(page)).codes.shape
      (64, 512)
    """
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    codes, packed = get_codes(stored), 32 // _bits(codec)
    # Moments with codes of this shape: one, or a word of them in an entry.
    shapes = [codes.shape]
    for missing in range(packed) if codes.ndim > 1 else ():
        *stack, rows, columns = codes.shape
        shapes += [(*stack, rows, columns * packed - missing)]
        shapes += [(*stack, rows * packed - missing, columns)]
    shapes = [
        x
        for x in (dict.fromkeys(shapes) if shape is None else [shape])
        if describe(arranged(codec, x).stored(x)) == describe(stored)
    ]
    if len(shapes) != 1:
        raise ValueError(
            f"stored={jax.tree.map(jax.typeof, stored)} is how {codec!r} stores a"
            f" moment of {len(shapes)} shapes {shapes[:3]}: pass its own as shape=."
        )
    (shape,) = shapes
    codec = arranged(codec, shape)
    return codec.plain(stored, shape) if isinstance(codec, Arranged) else stored


def axis_of_blocks(codec: Codec | None) -> int | None:
    """Returns the axis of a codec's blocks, or None."""
    return codec.blocks if isinstance(codec, Arranged) else None


def values_per_entry(codec: Codec | None, shape: Shape) -> tuple[int, ...]:
    """Returns the number of values in an entry of the codes, for each axis."""
    packed = [1] * len(shape)
    if isinstance(codec, Arranged) and codec.axis is not None:
        packed[codec.axis] = codec.packed
    return tuple(packed)


def get_codes(stored: PyTree) -> PyTree:
    """Returns the codes, or the array itself."""
    return stored.codes if isinstance(stored, Quantized) else stored


def _bits(codec: Codec) -> int:
    return getattr(codec, "bits", 8)
