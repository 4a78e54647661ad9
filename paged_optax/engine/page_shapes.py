"""In which shapes a leaf is cut: rows on a GPU or a CPU, tiles on a TPU.

On a GPU, or a CPU, a page is a range of the flattened leaf, because a transfer copies
one range. Leading axes collapse into rows. Where as many rows as have whole blocks of a
codec are more than a page, the leaf is seen flat. If the blocks lie along columns,
pages are strips instead, of some columns each, which a kernel transfers.

On a TPU a page is whole tiles. In host memory a reshape may only join axes that follow
each other there (`paged_optax.backend.tiling`). A page is a range along the most major
axis, along several leading axes seen as one, or along the lanes.
"""

import dataclasses
import math
from collections.abc import Iterator

from paged_optax.backend import tiling
from paged_optax.codecs import (
    Codec,
    axis_of_blocks,
    codes_of,
    codes_per_word,
    values_per_entry,
)
from paged_optax.engine.page_size import CODEC_PAGE, page_entries, page_size_in
from paged_optax.engine.pages import (
    MOST_INDEX,
    TOO_LONG,
    MomentFormat,
    Pages,
    block_of,
    single,
)


def in_rows(
    shape: tuple[int, ...], moments: tuple[MomentFormat, ...], page_size: int
) -> Pages:
    """Cuts the flattened leaf, at rows where a page holds one."""
    itemsize = max([x.itemsize for x in moments])
    values = math.prod(shape)
    if any(x.on_host for x in moments):
        page_size = page_size_in(values * itemsize, page_size)
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
            units = [codes_per_word(x.codec, -1) for x in moments]
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
    columns = range(unit, most + 1, unit) if unit else ()
    exact = (n for n in columns if values % n == 0 and values // n < MOST_INDEX)
    return next(exact, 0)


def _unit_of_rows(codec: Codec | None, columns: int) -> int:
    """Rows of the flattened matrix that are whole blocks and whole words."""
    if codec is None:
        return 1
    blocks = codec.block // math.gcd(codec.block, columns)
    if axis_of_blocks(codec) == -2:
        blocks = codec.block
    return math.lcm(blocks, codes_per_word(codec, -2))


def _unit_of_values(codec: Codec | None, shape: tuple[int, ...]) -> int:
    """Values of the flat moment that are whole blocks and words; 0: it is not flat."""
    if codec is None:
        return 1
    codes = codes_of(codec.stored(shape)).shape
    together, left = divmod(math.prod(shape), max(1, math.prod(codes)))
    if left or axis_of_blocks(codec) == -2 or codes_per_word(codec, -2) > 1:
        return 0
    return math.lcm(codec.block, together)


# If a moment has at least so many scales, they go in pages on a TPU too, even if pages
# must be larger for that.
_MANY_SCALES = 2**18


def in_tiles(
    shape: tuple[int, ...], moments: tuple[MomentFormat, ...], page_size: int
) -> Pages:
    """Cuts along the most major axes that make pages small enough, or the lanes."""
    itemsize = max([x.itemsize for x in moments])
    asked, size_of_leaf = page_size, math.prod(shape) * itemsize
    if any(block_of(x) > 1 for x in moments):
        page_size = min(page_size, CODEC_PAGE)
    page_size = page_size_in(size_of_leaf, page_size)
    if size_of_leaf <= page_size:
        return single(shape, tiled=True)
    larger: list[Pages] = []
    ways = list(_ways(shape))
    if any(block_of(x) > 1 and axis_of_blocks(x.codec) is None for x in moments):
        # If blocks run through rows, cuts into whole rows come first: (1024, 16, 64)
        # takes 3 s to compile then, and 9 s in parts of each row (libtpu 0.0.52).
        ways.sort(key=lambda way: way[1] != 0)
    for view, axis in ways:
        unit = math.lcm(*[_unit_of_tiles(x, shape, view, axis) for x in moments])
        if not 0 < unit < view[axis] or view[axis] >= MOST_INDEX:
            continue
        others = math.prod(view) // view[axis]
        bytes_each = others * itemsize
        size, count = _divide_with_least_rest(view[axis], unit, bytes_each, page_size)
        pages = Pages(shape, view, axis, size, count, tiled=True)
        if count == 1 or not all(_has_last(x, pages) for x in moments):
            continue
        if pages.entries * itemsize <= page_size:
            return pages
        larger.append(pages)
    if larger:
        return min(larger, key=lambda pages: pages.entries)
    one_page = single(shape, tiled=True)
    if size_of_leaf <= max(asked, 2 * CODEC_PAGE):
        return one_page
    return dataclasses.replace(one_page, refused=_reason(moments, shape))


def _reason(moments: tuple[MomentFormat, ...], shape: tuple[int, ...]) -> str:
    """Why a TPU cannot cut a leaf, and what to do."""
    if max(shape) >= MOST_INDEX:
        return TOO_LONG
    block = math.lcm(*map(block_of, moments))
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
    ends = "a tile and with a block" if block > 1 else "a tile"
    return f"a TPU slices whole tiles, and no page of it ends with {ends}: {pad}"


def _ways(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Views, and the axis of each that may be sliced."""
    order = tiling.minor_to_major(shape)
    lanes, major = order[0], order[-1]
    yield shape, major
    if lanes != major:
        yield shape, lanes
    for axes in range(len(shape) - 1, 1, -1):
        if tiling.view_layout(shape, axes) is not None:
            joined = len(shape) - axes + 1
            yield (math.prod(shape[:joined]), *shape[joined:]), 0


def _unit_of_tiles(
    moment: MomentFormat, shape: tuple[int, ...], view: tuple[int, ...], axis: int
) -> int:
    """Entries along an axis that are whole blocks, words and tiles; 0: none are."""
    blocks, along = 1, axis_of_blocks(moment.codec)
    if along is not None:
        blocks = block_of(moment) if axis == len(view) + along else 1
    elif moment.codec is not None:
        after = math.prod(view[axis + 1 :])
        blocks = block_of(moment) // math.gcd(block_of(moment), after)
    codes, itemsize, packed = _codes(moment, shape)
    together = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    if not moment.on_host:
        return math.lcm(blocks, together)
    order = tiling.view_layout(codes, len(view), itemsize)
    if order is None or itemsize < 2:
        return 0
    rows = tiling.SUBLANES * max(1, 4 // itemsize)
    tile = rows * tiling.LANES
    if len(view) > 1:
        tiles = {"lanes": tiling.LANES, "sublanes": rows, "major": 1}
        tile = tiles[tiling.role(order, axis)]
    if along == -1 and axis == len(view) - 2:
        # So many scales go in pages too. Their lanes are the moment's rows.
        scales = (*shape[:-1], shape[-1] // block_of(moment))
        in_pages = math.prod(scales) >= _MANY_SCALES
        if in_pages and tiling.view_layout(scales, len(view)) is not None:
            blocks = math.lcm(blocks, tiling.LANES)
    return math.lcm(blocks, tile * together)


def _codes(
    moment: MomentFormat, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """The array that keeps a moment: its shape, itemsize, and values an entry."""
    if moment.codec is None:
        return shape, moment.itemsize, (1,) * len(shape)
    codes = codes_of(moment.codec.stored(shape))
    return codes.shape, codes.dtype.itemsize, values_per_entry(moment.codec, shape)


def _has_last(moment: MomentFormat, pages: Pages) -> bool:
    """Whether a moment's slices, the last one too, are whole blocks and tiles."""
    axis, left = pages.axis, pages.extent % pages.size
    if axis_of_blocks(moment.codec) is None and left and axis:
        after = math.prod(pages.view[axis + 1 :])
        if left * after % block_of(moment):
            return False
    if not moment.on_host:
        return True
    codes, itemsize, packed = _codes(moment, pages.leaf)
    order = tiling.view_layout(codes, len(pages.view), itemsize)
    assert order is not None
    joined = len(codes) - len(order) + 1
    view = (math.prod(codes[:joined]), *codes[joined:])
    together = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    return tiling.can_slice(view, order, axis, pages.size // together, itemsize)


def _divide_with_least_rest(
    extent: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """Divides as `divide` does, and makes a smaller last page as small as it can be.

    XLA:TPU compiles the last page by itself. A smaller one compiles sooner.
    """
    size, count = page_entries(extent, unit, bytes_each, page_size)
    if extent % size:
        sizes = range(size // unit * unit, size // 2, -unit)
        size = min(sizes, key=lambda n: extent % n)
        count = -(-extent // size)
    return size, count
