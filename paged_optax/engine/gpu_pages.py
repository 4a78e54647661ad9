"""Pages on a GPU or a CPU: ranges of the flattened leaf, which one transfer copies.

Leading axes collapse into rows. If the rows of a whole codec block exceed a page, the
leaf is viewed flat. If blocks lie along columns, pages are strips of columns, which a
kernel transfers.
"""

import dataclasses
import math

from paged_optax.codecs import Codec, axis_of_blocks, codes_per_word, get_codes
from paged_optax.engine.pages import (
    LEAST_PAGE,
    MOST_INDEX,
    TOO_LONG,
    MomentFormat,
    Pages,
    page_entries,
    page_size_in,
    single,
)

#: The fewest pages of a leaf that travel both ways.
FEWEST = 3


def in_rows(
    shape: tuple[int, ...],
    moments: tuple[MomentFormat, ...],
    page_size: int,
    by_latency: bool = False,
) -> Pages:
    """Cuts the flattened leaf, at rows if a page holds one.

    `by_latency`: True if latency decides the size, within `page_size`.
    """
    itemsize = max([x.itemsize for x in moments])
    values = math.prod(shape)
    if any(x.on_host for x in moments):
        choose = _fastest_page if by_latency else page_size_in
        page_size = choose(values * itemsize, page_size)
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
    axis, axis_size, bytes_each = 0, rows, columns * itemsize
    if unit * bytes_each > page_size and values < MOST_INDEX:
        if all(flat):
            units, unit = flat, math.lcm(*flat)
            view, axis_size, bytes_each = (values,), values, itemsize
        elif all(axis_of_blocks(x.codec) == -2 or x.block == 1 for x in moments):
            axis, axis_size, bytes_each = 1, columns, rows * itemsize
            units = [codes_per_word(x.codec, -1) for x in moments]
            unit = math.lcm(*units)
    size, count = page_entries(axis_size, unit, bytes_each, page_size)
    if count == 1:
        return single(shape)  # too few rows for whole blocks
    if len(set(units)) > 1:
        unit = math.gcd(unit, axis_size)  # without blocks, a unit must divide the axis
    return Pages(shape, view, axis, size, count, unit=unit)


def _fastest_page(leaf_bytes: int, page_size: int) -> int:
    r"""Returns the page size, in bytes, with which a leaf is updated soonest.

    .. math::
        \mathrm{time}(n) = \frac{S}{r} \cdot \frac{n + 1}{n} + n t, \qquad
        n = \sqrt{S / (r t)}, \qquad
        S / n = \sqrt{S \cdot r t},

    for a moment of :math:`S` bytes in :math:`n` pages, on a link that moves :math:`r`
    bytes a second in each direction, if each page takes :math:`t` seconds beyond its
    bytes. An H200 has 47 GB/s and 22 us (jax 0.11.2: 45 us for two moments), so that
    :math:`r t` is 1 MiB, which is assumed of every GPU. Pages are no smaller than
    without latency, see `page_size_in`.
    """
    size = min(-(-leaf_bytes // FEWEST), math.isqrt(leaf_bytes * LEAST_PAGE))
    return min(page_size, max(size, page_size_in(leaf_bytes, page_size)))


def _folded(values: int, unit: int, maximum: int) -> int:
    """Returns columns for a vector of too many values to count; 0 if none fit.

    They are a multiple of the unit. A unit of 0: the codec stores no flat vector.
    """
    columns = range(unit, maximum + 1, unit) if unit else ()
    exact = (n for n in columns if values % n == 0 and values // n < MOST_INDEX)
    return next(exact, 0)


def _unit_of_rows(codec: Codec | None, columns: int) -> int:
    """Returns the fewest rows of the flattened matrix in whole blocks and words."""
    if codec is None:
        return 1
    blocks = codec.block // math.gcd(codec.block, columns)
    if axis_of_blocks(codec) == -2:
        blocks = codec.block
    return math.lcm(blocks, codes_per_word(codec, -2))


def _unit_of_values(codec: Codec | None, shape: tuple[int, ...]) -> int:
    """Returns the fewest values of the flat moment in whole blocks; 0: never flat."""
    if codec is None:
        return 1
    codes = get_codes(codec.stored(shape)).shape
    merged, left = divmod(math.prod(shape), max(1, math.prod(codes)))
    if left or axis_of_blocks(codec) == -2 or codes_per_word(codec, -2) > 1:
        return 0
    return math.lcm(codec.block, merged)
