"""Cuts of a leaf into pages, on a GPU or a CPU, and on a TPU.

On a GPU a page is a range of the flattened leaf, which one transfer copies. Leading
axes collapse into rows. If the rows of a whole codec block exceed a page, the leaf is
viewed flat. If blocks lie along columns, pages are strips of columns, which a kernel
transfers.

On a TPU a page is whole tiles. In host memory a reshape may only join axes that are
adjacent there (`paged_optax.backend.tiling`). A page is a range along the most major
axis, along several leading axes viewed as one, or along the lanes.
"""

import dataclasses
import math
from collections.abc import Iterator

from paged_optax.backend import tiling
from paged_optax.codecs import (
    Codec,
    axis_of_blocks,
    codes_per_word,
    get_codes,
    values_per_entry,
)
from paged_optax.engine.pages import (
    CODEC_PAGE,
    LEAST_PAGE,
    MOST_INDEX,
    TOO_LONG,
    MomentFormat,
    Pages,
    page_entries,
    page_size_in,
    single,
)
from paged_optax.engine.transfers import PIECES, pieces_of

#: The fewest pages of a leaf that travel both ways.
FEWEST = 3

# Scales of a moment that has at least this many travel in pages on a TPU too, even if
# that makes pages larger.
_MANY_SCALES = 2**18


def in_rows(
    shape: tuple[int, ...],
    moments: tuple[MomentFormat, ...],
    page_size: int,
    by_latency: bool = False,
    spare_bytes: int = 0,
) -> Pages:
    """Cuts the flattened leaf, at rows if a page holds one.

    `by_latency`: True if latency decides the size, within `page_size`. If kernels would
    transfer the first and the last page, a page may have twice that size, within
    `spare_bytes`.
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
    larger = min(spare_bytes, 2 * page_size)
    if larger > page_size and pieces_of(size // unit) == 1:
        # Such as 167 rows of words, of the eighth part of Llama 3's embedding.
        cuts = (page_entries(axis_size, n * unit, bytes_each, larger) for n in PIECES)
        exact = (x for x in cuts if math.prod(x) == axis_size)
        size, count = next(exact, (size, count))
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


def in_tiles(
    shape: tuple[int, ...], moments: tuple[MomentFormat, ...], page_size: int
) -> Pages:
    """Cuts along the most major axes that make pages small enough, or the lanes."""
    itemsize = max([x.itemsize for x in moments])
    requested, leaf_bytes = page_size, math.prod(shape) * itemsize
    if any(x.block > 1 for x in moments):
        page_size = min(page_size, CODEC_PAGE)
    page_size = page_size_in(leaf_bytes, page_size)
    if leaf_bytes <= page_size:
        return single(shape, tiled=True)
    larger: list[Pages] = []
    views = list(_views(shape))
    if any(x.block > 1 and axis_of_blocks(x.codec) is None for x in moments):
        # If blocks run through rows, cuts into whole rows come first: (1024, 16, 64)
        # takes 3 s to compile then, and 9 s in parts of each row (libtpu 0.0.52).
        views.sort(key=lambda candidate: candidate[1] != 0)
    for view, axis in views:
        unit = math.lcm(*[_unit(x, shape, view, axis) for x in moments])
        if not 0 < unit < view[axis] or view[axis] >= MOST_INDEX:
            continue
        bytes_each = math.prod(view) // view[axis] * itemsize
        size, count = _smallest_remainder(view[axis], unit, bytes_each, page_size)
        pages = Pages(shape, view, axis, size, count, tiled=True)
        if count == 1 or not all(_has_last(x, pages) for x in moments):
            continue
        if pages.entries * itemsize <= page_size:
            return pages
        larger.append(pages)
    if larger:
        return min(larger, key=lambda pages: pages.entries)
    one_page = single(shape, tiled=True)
    if leaf_bytes <= max(requested, 2 * CODEC_PAGE):
        return one_page
    return dataclasses.replace(one_page, refused=_reason(moments, shape))


def _reason(moments: tuple[MomentFormat, ...], shape: tuple[int, ...]) -> str:
    """Returns why a TPU cannot cut a leaf, and the way out."""
    if max(shape) >= MOST_INDEX:
        return TOO_LONG
    block = math.lcm(*[x.block for x in moments])
    smallest = min(_codes(x, shape)[1] for x in moments)
    tile = tiling.LANES
    if len(shape) < 2:
        tile *= tiling.SUBLANES * max(1, 4 // smallest)
    elif block > 1:
        tile *= 8  # so many codes may share a word
    pad = f"pad its longest axis to a multiple of {math.lcm(tile, block)}"
    if any(x.on_host and _codes(x, shape)[1] < 2 for x in moments):
        if len(shape) < 2:
            pad = "make it a matrix, or store it without a codec"
        return f"a TPU slices no bytes in host memory, and its codes are bytes: {pad}"
    boundary = "a tile and with a block" if block > 1 else "a tile"
    return f"a TPU slices whole tiles, and no page of it ends with {boundary}: {pad}"


def _views(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields views, and the axis of each that may be sliced."""
    order = tiling.minor_to_major(shape)
    lanes, major = order[0], order[-1]
    yield shape, major
    if lanes != major:
        yield shape, lanes
    for axes in range(len(shape) - 1, 1, -1):
        if tiling.view_layout(shape, axes) is not None:
            merged = len(shape) - axes + 1
            yield (math.prod(shape[:merged]), *shape[merged:]), 0


def _unit(
    moment: MomentFormat, shape: tuple[int, ...], view: tuple[int, ...], axis: int
) -> int:
    """Returns the fewest entries in whole blocks, words and tiles; 0: none fit."""
    blocks, along = 1, axis_of_blocks(moment.codec)
    if along is not None:
        blocks = moment.block if axis == len(view) + along else 1
    elif moment.codec is not None:
        after = math.prod(view[axis + 1 :])
        blocks = moment.block // math.gcd(moment.block, after)
    codes, itemsize, packed = _codes(moment, shape)
    per_entry = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    if not moment.on_host:
        return math.lcm(blocks, per_entry)
    order = tiling.view_layout(codes, len(view), itemsize)
    if order is None or itemsize < 2:
        return 0
    rows = tiling.SUBLANES * max(1, 4 // itemsize)
    tile = rows * tiling.LANES
    if len(view) > 1:
        tiles = {"lanes": tiling.LANES, "sublanes": rows, "major": 1}
        tile = tiles[tiling.role(order, axis)]
    if along == -1 and axis == len(view) - 2:
        # Many scales travel in pages too. Their lanes are the moment's rows.
        scales = (*shape[:-1], shape[-1] // moment.block)
        in_pages = math.prod(scales) >= _MANY_SCALES
        if in_pages and tiling.view_layout(scales, len(view)) is not None:
            blocks = math.lcm(blocks, tiling.LANES)
    return math.lcm(blocks, tile * per_entry)


def _codes(
    moment: MomentFormat, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Returns the shape, itemsize and values an entry of a moment's codes."""
    if moment.codec is None:
        return shape, moment.itemsize, (1,) * len(shape)
    codes = get_codes(moment.codec.stored(shape))
    return codes.shape, codes.dtype.itemsize, values_per_entry(moment.codec, shape)


def _has_last(moment: MomentFormat, pages: Pages) -> bool:
    """Returns whether all pages, the last too, are whole blocks and tiles."""
    axis, left = pages.axis, pages.axis_size % pages.size
    if axis_of_blocks(moment.codec) is None and left and axis:
        after = math.prod(pages.view[axis + 1 :])
        if left * after % moment.block:
            return False
    if not moment.on_host:
        return True
    codes, itemsize, packed = _codes(moment, pages.leaf)
    order = tiling.view_layout(codes, len(pages.view), itemsize)
    assert order is not None
    merged = len(codes) - len(order) + 1
    view = (math.prod(codes[:merged]), *codes[merged:])
    per_entry = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    return tiling.can_slice(view, order, axis, pages.size // per_entry, itemsize)


def _smallest_remainder(
    axis_size: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """Returns `page_entries`, with the smallest last page.

    XLA:TPU compiles the last page separately. A smaller one compiles sooner.
    """
    size, count = page_entries(axis_size, unit, bytes_each, page_size)
    if axis_size % size:
        sizes = range(size // unit * unit, size // 2, -unit)
        size = min(sizes, key=lambda n: axis_size % n)
        count = -(-axis_size // size)
    return size, count
