"""How a leaf is cut on a GPU, or a CPU: a page is a range of the flattened leaf.

A transfer copies one range. So leading axes collapse into rows, and where a row is too
long, or is no whole number of a codec's blocks, the leaf is seen flat.
"""

import dataclasses
import math

from paged_optax.codecs import Codec, axis_of_blocks, codes_of, packed_along
from paged_optax.engine.pages import (
    MOST_INDEX,
    TOO_LONG,
    Pages,
    Storage,
    block_of,
    many_pages,
    page_entries,
    single,
)


def in_rows(
    shape: tuple[int, ...], moments: tuple[Storage, ...], page_size: int
) -> Pages:
    """Cuts the flattened leaf, at rows where a page holds one."""
    itemsize = max(x.itemsize for x in moments)
    values = math.prod(shape)
    if any(x.on_host for x in moments):
        page_size = many_pages(values * itemsize, page_size)
    if values * itemsize <= page_size:
        return single(shape)
    columns = shape[-1] if len(shape) > 1 else 1
    units = [_unit_of_rows(x.codec, columns) for x in moments]
    unit = math.lcm(*units)
    rows = values // columns
    view: tuple[int, ...] = (rows, columns) if len(shape) > 1 else shape
    flat = [_unit_of_values(x.codec, shape) for x in moments]
    if max(view) >= MOST_INDEX:
        unit = math.lcm(*flat)
        if not (columns := _folded(values, unit, page_size // itemsize)):
            return dataclasses.replace(single(shape), refused=TOO_LONG)
        rows, units, unit = values // columns, [1], 1
        view = rows, columns
    axis, extent, bytes_each = 0, rows, columns * itemsize
    if unit * bytes_each > page_size and values < MOST_INDEX:
        if all(flat):
            units, unit = flat, math.lcm(*flat)
            view, extent, bytes_each = (values,), values, itemsize
        elif all(axis_of_blocks(x.codec) == -2 or block_of(x) == 1 for x in moments):
            # Blocks along columns: pages are strips, which a kernel transfers.
            axis, extent, bytes_each = 1, columns, rows * itemsize
            units = [packed_along(x.codec, -1) for x in moments]
            unit = math.lcm(*units)
    size, count = page_entries(extent, unit, bytes_each, page_size)
    if count == 1:
        return single(shape)  # its rows are not enough for whole blocks
    if len(set(units)) > 1:
        unit = math.gcd(unit, extent)  # without blocks, a unit must divide the axis
    return Pages(shape, view, axis, size, count, unit=unit)


def _folded(values: int, unit: int, most: int) -> int:
    """Columns for a vector whose values are too many to count; 0 if there are none.

    They are a multiple of the unit. A unit of 0: the codec stores no flat vector.
    """
    found = range(unit, most + 1, unit) if unit else ()
    exact = (n for n in found if values % n == 0 and values // n < MOST_INDEX)
    return next(exact, 0)


def _unit_of_rows(codec: Codec | None, columns: int) -> int:
    """Rows of the flattened matrix that are whole blocks and whole words."""
    if codec is None:
        return 1
    blocks = codec.block // math.gcd(codec.block, columns)
    if axis_of_blocks(codec) == -2:
        blocks = codec.block
    return math.lcm(blocks, packed_along(codec, -2))


def _unit_of_values(codec: Codec | None, shape: tuple[int, ...]) -> int:
    """Values of the flat moment that are whole blocks and words; 0: it is not flat."""
    if codec is None:
        return 1
    codes = codes_of(codec.stored(shape)).shape
    together, left = divmod(math.prod(shape), max(1, math.prod(codes)))
    if left or axis_of_blocks(codec) == -2 or packed_along(codec, -2) > 1:
        return 0
    return math.lcm(codec.block, together)
