"""Values in blocks, their exact arithmetic, and several codes in one word of 32 bits.

The first code is in a word's lowest bits. On a TPU neighbours along an axis are brought
together, and parted, by its matrix units: a product with a matrix of zeros and powers
of two.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import BFloat16, Float32, Int32, Shaped

from paged_optax.backend.tiling import LANES, SUBLANES, minor_to_major, role

MAGNITUDE = np.int32(0x7FFFFFFF)
SMALLEST_NORMAL = np.int32(0x00800000)
#: The least magnitude that torchao divides a block by.
SMALLEST_ABSMAX = np.float32(1e-12)


def bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The bit pattern; for numbers that are not negative it orders as they do."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The number with this bit pattern."""
    return lax.bitcast_convert_type(x, jnp.float32)


def block_count(shape: tuple[int, ...], block: int) -> int:
    """Blocks in a moment of this shape, the last one perhaps not full."""
    return -(-math.prod(shape) // block)


def to_blocks(x: Shaped[Array, "*shape"], block: int) -> Shaped[Array, "blocks block"]:
    """The flattened values in rows of one block, the last one filled with zeros."""
    flat = x.reshape(-1)
    missing = -flat.size % block
    if missing:
        flat = jnp.pad(flat, (0, missing))
    return flat.reshape(-1, block)


def from_blocks(
    x: Shaped[Array, "blocks block"], shape: tuple[int, ...]
) -> Shaped[Array, "*shape"]:
    """Undoes `to_blocks`."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def block_absmax(x: Float32[Array, "blocks block"]) -> Float32[Array, " blocks"]:
    """The largest magnitude of each block; NaN where one of its values is NaN."""
    # Magnitudes are compared by their bit patterns. As numbers, backends that flush
    # denormal ones to zero (XLA:CPU, XLA:TPU) would not find the largest of those, and
    # XLA:CPU's maximum over the rows of a matrix passes NaN over (jax 0.10.2,
    # 0.12.0.1).
    return from_bits(jnp.max(bits(x) & MAGNITUDE, axis=1))


def divide(
    x: Float32[Array, "*#shape"], y: Float32[Array, "*#shape"] | np.float32
) -> Float32[Array, "*shape"]:
    """Divides with one rounding, under `jit` too."""
    # XLA turns a division by a constant or by a broadcast into a multiplication by its
    # reciprocal, which rounds twice and flushes the reciprocals of numbers above 2^126
    # (checked on CPU with jax 0.10.2 and 0.12.0.1). This divisor looks like neither.
    return x / jnp.where(jnp.isnan(x), x, y)


def lookup(
    index: Int32[Array, "*shape"], entries: Sequence[int | float], dtype: type
) -> Array:
    """Looks a small table up without a gather, which a TPU does one by one.

    The table has a power of two entries. Of an index out of range only low bits count.
    """
    # Each bit of the index halves what is left of the table.
    rest: list[Array] = [jnp.asarray(entry, dtype) for entry in entries]
    bit = 1
    while len(rest) > 1:
        high = (index & np.int32(bit)) != 0
        pairs = zip(rest[::2], rest[1::2], strict=True)
        rest = [jnp.where(high, odd, even) for even, odd in pairs]
        bit *= 2
    return jnp.broadcast_to(rest[0], index.shape)


def pack(codes: Int32[Array, "*shape"], axis: int, bits: int) -> Int32[Array, "*words"]:
    """Puts codes of 4 or 8 bits that follow each other along an axis into one word.

    Zeros fill the last word up. The axis is counted from the front.
    """
    packed = 32 // bits
    codes = _filled(codes, axis, packed)

    def by_groups(codes: Array) -> Array:
        words = codes.shape[axis] // packed
        groups = codes.reshape(
            *codes.shape[:axis], words, packed, *codes.shape[axis + 1 :]
        )
        shift = lax.broadcasted_iota(jnp.int32, groups.shape, axis + 1)
        return lax.reduce(
            groups << (shift * np.int32(bits)),
            np.int32(0),
            lax.bitwise_or,
            (axis + 1,),
        )

    # Along the lanes, slices with strides move each lane by itself: they took 16 s to
    # compile for one moment of [1, 197, 1024], and padding between the codes 6 s. The
    # products take 2 (v5e, libtpu 0.0.52).
    def by_products(codes: Array) -> Array:
        extent, group = codes.shape[axis] // packed, _group(codes.shape[axis], packed)
        codes = _filled(codes, axis, group * packed).astype(jnp.bfloat16)
        word, code = _places(group, group * packed)
        place = code - word * packed
        # In two halves of 16 bits, whose sums float32 holds exactly.
        halves = []
        for first in (0, packed // 2):
            power = (1 << ((place - first) * bits).clip(0, 15)).astype(jnp.bfloat16)
            taken = (place >= first) & (place < first + packed // 2)
            matrix = jnp.where(taken, power, 0).astype(jnp.bfloat16)
            halves.append(_product(matrix, codes, axis))
        words = halves[0] | (halves[1] << np.int32(16))
        return lax.slice_in_dim(words, 0, extent, axis=axis)

    def by_strides(codes: Array) -> Array:
        end = codes.shape[axis]
        word = jnp.zeros((), jnp.int32)
        for i in range(packed):
            part = lax.slice_in_dim(codes, i, end, packed, axis)
            word = word | (part << np.int32(bits * i))
        return word

    on_tpu = by_strides if _in_sublanes(codes.shape, axis, packed) else by_products
    return lax.platform_dependent(codes, tpu=on_tpu, default=by_groups)


def unpack(
    words: Int32[Array, "*words"], axis: int, bits: int, extent: int
) -> Int32[Array, "*shape"]:
    """Undoes `pack`; `extent` is how many codes there are along the axis."""
    packed, mask = 32 // bits, np.int32(2**bits - 1)

    def by_groups(words: Array) -> Array:
        shape = (*words.shape[: axis + 1], packed, *words.shape[axis + 1 :])
        groups = jnp.broadcast_to(jnp.expand_dims(words, axis + 1), shape)
        shift = lax.broadcasted_iota(jnp.int32, shape, axis + 1)
        codes = (groups >> (shift * np.int32(bits))) & mask
        entries = words.shape[axis] * packed
        return codes.reshape(*words.shape[:axis], entries, *words.shape[axis + 1 :])

    def by_products(words: Array) -> Array:
        return interleave(
            [(words >> np.int32(bits * i)) & mask for i in range(packed)], axis
        )

    def by_strides(words: Array) -> Array:
        # Zeros go between the codes: a short axis of their own would take much space.
        codes = jnp.zeros((), jnp.int32)
        for i in range(packed):
            between = [(0, 0, 0)] * words.ndim
            between[axis] = (i, packed - 1 - i, packed - 1)
            part = (words >> np.int32(bits * i)) & mask
            codes = codes | lax.pad(part, np.int32(0), between)
        return codes

    shape = (*words.shape[:axis], extent, *words.shape[axis + 1 :])
    on_tpu = by_strides if _in_sublanes(shape, axis, packed) else by_products
    codes = lax.platform_dependent(words, tpu=on_tpu, default=by_groups)
    return lax.slice_in_dim(codes, 0, extent, axis=axis)


def interleave(
    parts: Sequence[Int32[Array, "*shape"]], axis: int
) -> Int32[Array, "*longer"]:
    """The first entries of each part along an axis, then the second ones, for a TPU.

    Entries are numbers from 0 to 255.
    """
    extent = parts[0].shape[axis]
    group = _group(extent, 1)
    entry, place = _places(group * len(parts), group)
    total = jnp.zeros((), jnp.int32)
    for i, part in enumerate(parts):
        matrix = (entry == place * len(parts) + i).astype(jnp.bfloat16)
        part = _filled(part, axis, group).astype(jnp.bfloat16)
        total = total + _product(matrix, part, axis)
    return lax.slice_in_dim(total, 0, extent * len(parts), axis=axis)


def _in_sublanes(shape: tuple[int, ...], axis: int, packed: int) -> bool:
    """Whether an axis lies in a TPU's sublanes, of codes and of their words."""
    words = (*shape[:axis], -(-shape[axis] // packed), *shape[axis + 1 :])
    return all(role(minor_to_major(x), axis) == "sublanes" for x in (shape, words))


def _group(extent: int, packed: int) -> int:
    """How many words a product makes, or takes: whole tiles, no more than are there."""
    words = -(-extent // packed)
    return min(LANES, max(1, -(-words // SUBLANES)) * SUBLANES)


def _places(rows: int, columns: int) -> list[Int32[Array, "rows columns"]]:
    return [lax.broadcasted_iota(jnp.int32, (rows, columns), i) for i in (0, 1)]


def _product(
    matrix: BFloat16[Array, "rows columns"],
    values: BFloat16[Array, "*shape"],
    axis: int,
) -> Int32[Array, "*longer"]:
    """Multiplies each group of entries along an axis by a matrix."""
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    rows, columns = matrix.shape
    count = values.shape[axis] // columns
    groups = values.reshape(*before, count, columns, *after)
    # Exact: factors of eight bits are bfloat16, and sums stay below 2^16, where float32
    # holds every integer.
    product = lax.dot_general(
        groups,
        matrix,
        (((axis + 1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    product = jnp.moveaxis(product.astype(jnp.int32), -1, axis + 1)
    return product.reshape(*before, count * rows, *after)


def _filled(
    x: Int32[Array, "*shape"], axis: int, multiple: int
) -> Int32[Array, "*longer"]:
    """The array with zeros at the end of an axis, up to a multiple."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    return lax.pad(
        x, np.int32(0), [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    )
