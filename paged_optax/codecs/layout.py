"""How codes and scales lie in memory that is sliced and divided.

Codes share words of 32 bits, along the axis that a TPU puts in its sublanes. Scales
have the moment's axes if a row, or a column, is whole blocks, and blocks run along it.

A state is arrays, and codes of another map mean other numbers. The name of their field
tells which map it is (`paged_optax.codecs.identity`). Their dtype says more where it
can. Codes of a map with negative numbers are signed integers, and other codes are
unsigned. Eight-bit floats have a float8 dtype. In words they are unsigned integers,
and their scales are integers that hold the bits of float32.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, PyTree

from paged_optax.backend import tiling
from paged_optax.backend.platforms import on_tpu
from paged_optax.codecs.codec import Codec, Noise, Quantized
from paged_optax.codecs.dynamic_int4 import DynamicInt4
from paged_optax.codecs.packing import pack, unpack

Leaf = TypeVar("Leaf")

# Blocks run through the flattened moment if at most so many rows are whole blocks,
_FEW_ROWS = 8

# and if a row has fewer values than this. A longer one does not fit a page of a TPU's
# tiles.
_WIDE = 2**14

# An axis of at least so many entries may be filled up to whole words: that costs less
# than three in a hundred.
_LEAST_FILLED = 128


@dataclasses.dataclass(frozen=True, repr=False)
class Arranged:
    """Stores what a codec does, differently arranged.

    The first code of a word has its lowest bits.

    Attributes:
      codec: The codec, which stores one code a byte.
      axis: The axis along which codes share a word, -1 or -2; None where each keeps
        its byte.
      blocks: The axis along which blocks run, -1 or -2. Along it the scales have one
        entry for each block. None if blocks run through the flattened moment.
    """

    codec: Codec
    axis: int | None
    blocks: int | None

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

    @property
    def packed(self) -> int:
        """Codes in one word."""
        return 32 // _bits(self.codec)

    def __repr__(self) -> str:
        return repr(self.codec)

    def stored(self, shape: tuple[int, ...]) -> PyTree[jax.ShapeDtypeStruct]:
        """The codec's codes and scales, in their other shapes."""
        plain = self.codec.stored(shape)
        entries, dtype = list(codes_of(plain).shape), codes_of(plain).dtype
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
        # The scales of a flattened matrix do not divide as the matrix does. With the
        # matrix's own dimensions they are paged and divided as it is, and no way of
        # dividing changes what it holds.
        if self.blocks is not None:
            blocks = list(shape)
            blocks[self.blocks] //= self.block
        # In words the codes' dtype no longer tells float8: that of the scales does.
        if floats and self.axis is not None and dtype == jnp.float32:
            dtype = jnp.int32
        return Quantized(codes, jax.ShapeDtypeStruct(tuple(blocks), dtype))

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> PyTree[Array]:
        """Stores a page."""
        # Axes of one entry are left out: see `_reshaped`.
        page_shape, shape = page.shape, _without_units(page.shape)
        page = _reshaped(page, jax.ShapeDtypeStruct(shape, page.dtype))
        arranged = self.arrange(self.codec.encode(self._transposed(page), noise), shape)
        return _reshaped(arranged, self.stored(page_shape))

    def decode(
        self, stored: PyTree[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Gives a page back."""
        page_shape, shape = shape, _without_units(shape)
        stored = _reshaped(stored, self.stored(shape))
        transposed = (*shape[:-2], *shape[:-3:-1]) if self.blocks == -2 else shape
        page = self._transposed(
            self.codec.decode(self.plain(stored, shape), transposed)
        )
        return page.reshape(page_shape)

    def _transposed(self, x: Array) -> Array:
        """The moment with the axis of its blocks last, or back."""
        return jnp.swapaxes(x, -1, -2) if self.blocks == -2 else x

    def arrange(self, encoded: PyTree[Array], shape: tuple[int, ...]) -> PyTree[Array]:
        """The codes and scales of a moment of this shape, arranged.

        If blocks run along columns, they are those of the transposed moment.
        """
        like, codes = self.stored(shape), self._transposed(codes_of(encoded))
        if self.axis is not None:
            # By way of bytes without a sign, which would fill the word's higher bits.
            codes = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
            codes = pack(codes, codes.ndim + self.axis, _bits(self.codec))
        codes = lax.bitcast_convert_type(codes, codes_of(like).dtype)
        if not isinstance(encoded, Quantized):
            return codes
        transposed = list(like.scales.shape)
        if self.blocks == -2:
            transposed[-2:] = transposed[:-3:-1]
        scales = self._transposed(encoded.scales.reshape(transposed))
        return Quantized(codes, lax.bitcast_convert_type(scales, like.scales.dtype))

    def plain(self, stored: PyTree[Array], shape: tuple[int, ...]) -> PyTree[Array]:
        """Undoes `arrange`."""
        like, codes = self.codec.stored(shape), codes_of(stored)
        if self.axis is not None:
            words = lax.bitcast_convert_type(codes, jnp.int32)
            axis = words.ndim + self.axis
            codes = unpack(words, axis, _bits(self.codec), shape[axis])
            codes = codes.astype(jnp.uint8)
        codes = self._transposed(lax.bitcast_convert_type(codes, codes_of(like).dtype))
        if not isinstance(stored, Quantized):
            return codes
        scales = lax.bitcast_convert_type(stored.scales, like.scales.dtype)
        return Quantized(codes, self._transposed(scales).reshape(-1))


def _without_units(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of one entry, but of two axes at least."""
    if len(shape) < 3:
        return shape
    return (*([n for n in shape[:-1] if n > 1] or [1]), shape[-1])


def _reshaped(tree: PyTree[Array], like: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """Arrays in the shapes of others; a TPU computes nothing in the old shapes."""
    if jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, like):
        return tree
    tree = jax.tree.map(lambda x, y: x.reshape(y.shape), tree, like)
    # XLA:TPU puts an axis of one entry in the sublanes, seven eighths of them empty,
    # and takes 6 s to compile there what it compiles in 1.5 s without that axis ((1,
    # 197, 1024) in float8, libtpu 0.0.52). So a barrier follows.
    return on_tpu(lax.optimization_barrier, tree)


def arranged(
    codec: Codec, shape: tuple[int, ...], whole: tuple[int, ...] | None = None
) -> Codec:
    """The codec as it stores a moment, or one device's part of one, of this shape.

    A vector is cut into pages at any value: it keeps a byte a code.

    Args:
      codec: The codec.
      shape: The shape, of the part where there are several.
      whole: The shape of the whole moment. A part is arranged as the whole is, if it
        can be: the state then does not depend on how the moment is divided. None:
        `shape` is that of the whole moment.

    Example:
      >>> from paged_optax.codecs import named
      >>> codec = arranged(named("dynamic_int8", signed=True), (64, 512))
      >>> codec.stored((64, 512)).codes
      ShapeDtypeStruct(shape=(16, 512), dtype=int32)
      >>> codec.stored((64, 512)).scales
      ShapeDtypeStruct(shape=(64, 2), dtype=float32)
    """
    unpaired = codec
    if isinstance(codec, DynamicInt4):
        unpaired = dataclasses.replace(codec, paired=False)
    stored = unpaired.stored(shape)
    codes = codes_of(stored)
    bytewise = codes.dtype.itemsize == 1
    words = blocks = None
    if codes.shape == shape and len(shape) > 1:
        packed = 32 // _bits(unpaired)
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
    return Arranged(codec if words is None else unpaired, words, blocks)


def _axis_of_words(shape: tuple[int, ...], packed: int) -> int | None:
    """The axis along which codes share words."""
    # XLA:TPU cannot slice an array of bytes in host memory: for each page it copies all
    # of it to the device and back, in another tiling (libtpu 0.0.52). Words of 32 bits
    # it slices like float32. Along the sublanes codes share words in its own packed
    # layouts too: words then lie as the moment does, so that no page is turned from one
    # layout into another, and unpacking moves nothing across lanes. The last two axes
    # alone decide, so that a layer of a stack is stored as the stack is.
    sublanes = tiling.minor_to_major(shape[-2:])[1] - 2
    if _in_words(shape, sublanes, packed):
        return sublanes
    other = -3 - sublanes
    return None if shape[other] % packed else other


def _in_words(shape: tuple[int, ...], axis: int, packed: int) -> bool:
    """Whether an axis is whole words, or may be filled up to whole words."""
    # If each layer of a stack were filled up to whole words, the rows of all layers
    # could not be seen as one axis.
    one_layer = axis == -1 or math.prod(shape[:-2]) == 1
    return not shape[axis] % packed or (one_layer and shape[axis] >= _LEAST_FILLED)


def _axis_of_blocks(shape: tuple[int, ...], block: int) -> int | None:
    """The axis that blocks run along; None: through the flattened moment.

    It is -1 if a row is whole blocks. Else it is -2 if a column is whole blocks, and
    the moment may not be flattened: its rows are long, or many make whole blocks.
    """
    rows, columns = shape[-2:]
    if not columns % block:
        return -1
    # A row of 50257 values is no whole number of blocks, and blocks that run on from
    # row to row fit no page of a TPU's tiles: it took 86 s to compile, and 617 MiB of
    # scratch. If a column is whole blocks they run along the columns, as they do in
    # PyTorch, whose layers keep the transposed matrix.
    few = block // math.gcd(block, columns) <= _FEW_ROWS and columns < _WIDE
    return None if few or rows % block else -2


def unarranged(
    codec: Codec, stored: PyTree[Array], shape: tuple[int, ...] | None = None
) -> PyTree[Array]:
    """Codes and scales as the codec itself stores them.

    Mostly the moment's shape follows from the arrays, and need not be given. If blocks
    run along columns, they are those of the transposed moment.

    Args:
      codec: The codec.
      stored: What `arranged(codec, shape)` stores of a moment.
      shape: The moment's shape; None: the one that is arranged so.

    Raises:
      ValueError: If no shape is arranged so, or several are.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_optax.codecs import named
      >>> codec, page = named("dynamic_int8", signed=True), jnp.ones((64, 512))
      >>> unarranged(codec, arranged(codec, page.shape).encode(page)).codes.shape
      (64, 512)
    """
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    codes, packed = codes_of(stored), 32 // _bits(codec)
    # Moments whose codes have this shape: a code an entry, a pair, or a word of them.
    pairs = [(*codes.shape[:-1], 2 * codes.shape[-1] - odd) for odd in (0, 1)]
    shapes = [codes.shape, *pairs, *_unpacked(codes.shape, packed)]
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


def _unpacked(shape: tuple[int, ...], packed: int) -> Iterator[tuple[int, ...]]:
    """The shapes of codes that words of this shape can hold."""
    if len(shape) < 2:
        return
    for missing in range(packed):
        yield (*shape[:-1], shape[-1] * packed - missing)
        yield (*shape[:-2], shape[-2] * packed - missing, shape[-1])


def axis_of_blocks(codec: Codec | None) -> int | None:
    """The axis of a codec's blocks, where scales have the moment's dimensions."""
    return codec.blocks if isinstance(codec, Arranged) else None


def codes_per_word(codec: Codec | None, axis: int) -> int:
    """How many codes share a word along an axis, -1 or -2."""
    if isinstance(codec, Arranged) and codec.axis == axis:
        return codec.packed
    return 1


def values_per_entry(codec: Codec | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many values of a moment one entry of its codes holds, along each axis."""
    packed = [1] * len(shape)
    if isinstance(codec, Arranged) and codec.axis is not None:
        packed[codec.axis] = codec.packed
    elif codec is not None and codes_of(codec.stored(shape)).shape != shape:
        packed[-1] = 2  # pairs of four bits
    return tuple(packed)


@overload
def codes_of(stored: Quantized[Leaf]) -> Leaf: ...


@overload
def codes_of(stored: Leaf) -> Leaf: ...


def codes_of(stored: PyTree) -> PyTree:
    """The codes, or the array itself."""
    return stored.codes if isinstance(stored, Quantized) else stored


def _bits(codec: Codec) -> int:
    return getattr(codec, "bits", 8)
