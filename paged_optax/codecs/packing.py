"""Blocks of values, exact arithmetic, and codes packed into 32-bit words.

The first code is in a word's lowest bits. On a TPU, codes along an axis are packed and
unpacked by its matrix units: a product with a matrix of zeros and powers of two.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import BFloat16, Float32, Int32, Shaped

from paged_optax.backend.tiling import LANES, SUBLANES, minor_to_major, role
from paged_optax.backend.types import Shape

MAGNITUDE = np.int32(0x7FFFFFFF)
SMALLEST_NORMAL = np.int32(0x00800000)
#: The least magnitude that torchao divides a block by.
SMALLEST_ABSMAX = np.float32(1e-12)


def bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns the bit patterns, in the order of the numbers if none is negative."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the numbers with these bit patterns."""
    return lax.bitcast_convert_type(x, jnp.float32)


def to_blocks(x: Shaped[Array, "*shape"], block: int) -> Shaped[Array, "blocks block"]:
    """Returns the flattened values in rows of one block, padded with zeros."""
    flat = x.reshape(-1)
    missing = -flat.size % block
    if missing:
        flat = jnp.pad(flat, (0, missing))
    return flat.reshape(-1, block)


def from_blocks(
    x: Shaped[Array, "blocks block"], shape: Shape
) -> Shaped[Array, "*shape"]:
    """Undoes `to_blocks`."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def block_absmax(x: Float32[Array, "blocks block"]) -> Float32[Array, " blocks"]:
    """Returns the largest magnitude of each block, NaN if it has NaN."""
    # Bit patterns are compared: XLA:CPU and XLA:TPU flush denormal numbers to zero, and
    # XLA:CPU's maximum over the rows of a matrix ignores NaN (jax 0.10.2, 0.12.0.1).
    return from_bits(jnp.max(bits(x) & MAGNITUDE, axis=1))


def divide(
    x: Float32[Array, "*#shape"], y: Float32[Array, "*#shape"] | np.float32
) -> Float32[Array, "*shape"]:
    """Divides with one rounding, under `jit` too."""
    # XLA replaces a division by a constant or a broadcast by a multiplication with the
    # reciprocal, which rounds twice and flushes reciprocals of numbers above 2^126
    # (CPU, jax 0.10.2 and 0.12.0.1). This divisor is neither.
    return x / jnp.where(jnp.isnan(x), x, y)


def lookup(index: Int32[Array, "*shape"], entries: Sequence[int]) -> Array:
    """Indexes a small int32 table without a gather, which is sequential on a TPU.

    The table's size is a power of two; higher bits of an index are ignored.
    """
    # Each bit of the index halves the table.
    rest: list[Array] = [jnp.asarray(entry, jnp.int32) for entry in entries]
    bit = 1
    while len(rest) > 1:
        high = (index & np.int32(bit)) != 0
        pairs = zip(rest[::2], rest[1::2], strict=True)
        rest = [jnp.where(high, odd, even) for even, odd in pairs]
        bit *= 2
    return jnp.broadcast_to(rest[0], index.shape)


def pack(codes: Int32[Array, "*shape"], axis: int, bits: int) -> Int32[Array, "*words"]:
    """Packs codes of 4 or 8 bits, consecutive along an axis, into words.

    The last word is padded with zeros. The axis is nonnegative.
    """
    packed = 32 // bits
    codes = _filled(codes, axis, packed)

    def by_groups(codes: Array) -> Array:
        before, after = codes.shape[:axis], codes.shape[axis + 1 :]
        groups = codes.reshape(*before, codes.shape[axis] // packed, packed, *after)
        shift = lax.broadcasted_iota(jnp.int32, groups.shape, axis + 1)
        codes = groups << (shift * np.int32(bits))
        return lax.reduce(codes, np.int32(0), lax.bitwise_or, (axis + 1,))

    # Along the lanes, strided slices compile for 16 s for a moment of [1, 197, 1024],
    # padding between codes for 6 s, and products for 2 s (v5e, libtpu 0.0.52).
    def by_products(codes: Array) -> Array:
        words, group = codes.shape[axis] // packed, _group(codes.shape[axis], packed)
        codes = _filled(codes, axis, group * packed).astype(jnp.bfloat16)
        word, code = _places(group, group * packed)
        place = code - word * packed
        # In halves of 16 bits, whose sums are exact in float32.
        halves = []
        for first in (0, packed // 2):
            power = (1 << ((place - first) * bits).clip(0, 15)).astype(jnp.bfloat16)
            taken = (place >= first) & (place < first + packed // 2)
            matrix = jnp.where(taken, power, 0).astype(jnp.bfloat16)
            halves.append(_product(matrix, codes, axis))
        total = halves[0] | (halves[1] << np.int32(16))
        return lax.slice_in_dim(total, 0, words, axis=axis)

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
    words: Int32[Array, "*words"], axis: int, bits: int, axis_size: int
) -> Int32[Array, "*shape"]:
    """Undoes `pack`; `axis_size` is the number of codes along the axis."""
    packed, mask = 32 // bits, np.int32(2**bits - 1)

    def by_groups(words: Array) -> Array:
        shape = (*words.shape[: axis + 1], packed, *words.shape[axis + 1 :])
        groups = jnp.broadcast_to(jnp.expand_dims(words, axis + 1), shape)
        shift = lax.broadcasted_iota(jnp.int32, shape, axis + 1)
        codes = (groups >> (shift * np.int32(bits))) & mask
        entries = words.shape[axis] * packed
        return codes.reshape(*words.shape[:axis], entries, *words.shape[axis + 1 :])

    def by_products(words: Array) -> Array:
        parts = [(words >> np.int32(bits * i)) & mask for i in range(packed)]
        entries = words.shape[axis]
        group = _group(entries, 1)
        entry, place = _places(group * packed, group)
        codes = jnp.zeros((), jnp.int32)
        for i, part in enumerate(parts):
            matrix = (entry == place * packed + i).astype(jnp.bfloat16)
            part = _filled(part, axis, group).astype(jnp.bfloat16)
            codes = codes + _product(matrix, part, axis)
        return lax.slice_in_dim(codes, 0, entries * packed, axis=axis)

    def by_strides(words: Array) -> Array:
        # With zeros between the codes: a short axis would need much padding.
        codes = jnp.zeros((), jnp.int32)
        for i in range(packed):
            between = [(0, 0, 0)] * words.ndim
            between[axis] = (i, packed - 1 - i, packed - 1)
            part = (words >> np.int32(bits * i)) & mask
            codes = codes | lax.pad(part, np.int32(0), between)
        return codes

    shape = (*words.shape[:axis], axis_size, *words.shape[axis + 1 :])
    on_tpu = by_strides if _in_sublanes(shape, axis, packed) else by_products
    codes = lax.platform_dependent(words, tpu=on_tpu, default=by_groups)
    return lax.slice_in_dim(codes, 0, axis_size, axis=axis)


def _in_sublanes(shape: Shape, axis: int, packed: int) -> bool:
    """Returns whether an axis of codes and words is in a TPU's sublanes."""
    words = (*shape[:axis], -(-shape[axis] // packed), *shape[axis + 1 :])
    return all(role(minor_to_major(x), axis) == "sublanes" for x in (shape, words))


def _group(axis_size: int, packed: int) -> int:
    """Returns the words of one product: whole tiles, at most the words there are."""
    words = -(-axis_size // packed)
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
    # Exact: 8-bit factors in bfloat16, and sums below 2^16 in float32.
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
    """Pads an axis with zeros to a multiple."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    padding = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, np.int32(0), padding)
