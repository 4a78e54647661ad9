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
from paged_optax.backend.types import Shape
from paged_optax.codecs import Codec, axis_of_blocks, get_codes, values_per_entry
from paged_optax.engine.pages import (
    CODEC_PAGE,
    MOST_INDEX,
    TOO_LONG,
    MomentFormat,
    Pages,
    Ratios,
    single,
)
from paged_optax.engine.transfers import PIECES, pieces_of

#: The fewest pages of a leaf that travel both ways.
FEWEST = 3

# A leaf of n pages takes (n + 1) / n of the link's time (`paged_optax.engine.loop`).
# Each leaf has at most this many pages, unless they would exceed `page_size`, and none
# of fewer bytes, because latency would dominate their transfers.
_PAGES = 16
LEAST_PAGE = 2**20

# Scales of a moment that has at least this many travel in pages on a TPU too, even if
# that makes pages larger.
_MANY_SCALES = 2**18


def in_rows(
    shape: Shape,
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
        choose = _fastest_page if by_latency else _page_size_in
        page_size = choose(values * itemsize, page_size)
    if values * itemsize <= page_size:
        return single(shape)
    columns = shape[-1] if len(shape) > 1 else 1
    view: Shape = (values // columns, columns) if len(shape) > 1 else shape
    axis, units = 0, [smallest_unit(x, shape, view, 0) for x in moments]
    flat = [_unit_of_values(x, shape) for x in moments]
    if max(view) >= MOST_INDEX:
        columns = _folded(values, math.lcm(*flat), page_size // itemsize)
        if not columns:
            return dataclasses.replace(single(shape), refused=TOO_LONG)
        view, units = (values // columns, columns), [1]
    elif math.lcm(*units) * columns * itemsize > page_size and values < MOST_INDEX:
        if all(flat):
            view, units = (values,), flat
        elif all(axis_of_blocks(x.codec) == -2 or x.block == 1 for x in moments):
            axis, units = 1, [smallest_unit(x, shape, view, 1) for x in moments]
    unit, axis_size = math.lcm(*units), view[axis]
    bytes_each = values // axis_size * itemsize
    size, count = _page_entries(axis_size, unit, bytes_each, page_size)
    larger = min(spare_bytes, 2 * page_size)
    if larger > page_size and pieces_of(size // unit) == 1:
        # Such as 167 rows of words, of the eighth part of Llama 3's embedding.
        cuts = (_page_entries(axis_size, n * unit, bytes_each, larger) for n in PIECES)
        exact = (x for x in cuts if math.prod(x) == axis_size)
        size, count = next(exact, (size, count))
    if count == 1:
        return single(shape)  # too few rows for whole blocks
    if len(set(units)) > 1:
        unit = math.gcd(unit, axis_size)  # without blocks, a unit must divide the axis
    return Pages(shape, view, axis, size, count, unit=unit)


def _fastest_page(leaf_bytes: int, page_size: int) -> int:
    """Returns the page size, in bytes, with which a leaf is updated soonest.

    A moment of S bytes in n pages takes S / r * (n + 1) / n + n * t, if a link moves r
    bytes a second and a page takes t seconds beyond its bytes: the best page has the
    root of S * r * t bytes. An H200 has 47 GB/s and 22 us (jax 0.11.2), so that r * t
    is 1 MiB, which is assumed of every GPU.
    """
    size = min(-(-leaf_bytes // FEWEST), math.isqrt(leaf_bytes * LEAST_PAGE))
    return min(page_size, max(size, _page_size_in(leaf_bytes, page_size)))


def _folded(values: int, unit: int, maximum: int) -> int:
    """Returns columns for a vector of too many values to count; 0 if none fit.

    They are a multiple of the unit. A unit of 0: the codec stores no flat vector.
    """
    columns = range(unit, maximum + 1, unit) if unit else ()
    exact = (n for n in columns if values % n == 0 and values // n < MOST_INDEX)
    return next(exact, 0)


def ratios_of_codes(codec: Codec | None, shape: Shape, view: Shape) -> Ratios:
    """Returns for each axis of a leaf's view the values of an entry of the codes."""
    values = values_per_entry(codec, shape)[-len(view) :]
    merged = len(view) - len(values)
    return (*[(1, 1)] * merged, *[(1, n) for n in values])


def ratios_of_scales(codec: Codec | None, view: Shape, axis: int) -> Ratios:
    """Returns for each axis of a leaf's view the values of a scale.

    Scales have the leaf's axes, or those before the `axis` that is cut and one of
    blocks.
    """
    block, along = 1 if codec is None else codec.block, axis_of_blocks(codec)
    if along is not None:
        ratios = [(1, 1)] * len(view)
        ratios[along] = 1, block
        return tuple(ratios)
    after = math.prod(view[axis + 1 :])
    common = math.gcd(after, block)
    return (*[(1, 1)] * axis, (after // common, block // common))


def smallest_unit(moment: MomentFormat, shape: Shape, view: Shape, axis: int) -> int:
    """Returns the fewest entries in whole blocks and words."""
    codes = ratios_of_codes(moment.codec, shape, view)
    scales = ratios_of_scales(moment.codec, view, axis)
    return math.lcm(*[b // math.gcd(a, b) for a, b in (codes[axis], scales[axis])])


def _unit_of_values(moment: MomentFormat, shape: Shape) -> int:
    """Returns the fewest values of the flat moment in whole blocks; 0: never flat."""
    packed = values_per_entry(moment.codec, shape)
    padded = any(n % k for n, k in zip(shape, packed, strict=True))
    if padded or axis_of_blocks(moment.codec) == -2 or any(k > 1 for k in packed[:-1]):
        return 0
    return smallest_unit(moment, shape, (math.prod(shape),), 0)


def in_tiles(shape: Shape, moments: tuple[MomentFormat, ...], page_size: int) -> Pages:
    """Cuts along the most major axes that make pages small enough, or the lanes."""
    itemsize = max([x.itemsize for x in moments])
    requested, leaf_bytes = page_size, math.prod(shape) * itemsize
    if any(x.block > 1 for x in moments):
        page_size = min(page_size, CODEC_PAGE)
    page_size = _page_size_in(leaf_bytes, page_size)
    if leaf_bytes <= page_size:
        return single(shape, tiled=True)
    larger: list[Pages] = []
    views = list(_views(shape))
    if any(x.block > 1 and axis_of_blocks(x.codec) is None for x in moments):
        # If blocks run through rows, cuts into whole rows come first: (1024, 16, 64)
        # takes 3 s to compile then, and 9 s in parts of each row (libtpu 0.0.52).
        views.sort(key=lambda candidate: candidate[1] != 0)
    for view, axis in views:
        unit = math.lcm(*[_unit_in_tiles(x, shape, view, axis) for x in moments])
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


def _reason(moments: tuple[MomentFormat, ...], shape: Shape) -> str:
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


def _views(shape: Shape) -> Iterator[tuple[Shape, int]]:
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


def _unit_in_tiles(moment: MomentFormat, shape: Shape, view: Shape, axis: int) -> int:
    """Returns the fewest entries in whole blocks, words and tiles; 0: none fit."""
    unit = smallest_unit(moment, shape, view, axis)
    if not moment.on_host:
        return unit
    codes, itemsize = _codes(moment, shape)
    order = tiling.view_layout(codes, len(view), itemsize)
    if order is None or itemsize < 2:
        return 0
    rows = tiling.SUBLANES * max(1, 4 // itemsize)
    tile = rows * tiling.LANES
    if len(view) > 1:
        tiles = {"lanes": tiling.LANES, "sublanes": rows, "major": 1}
        tile = tiles[tiling.role(order, axis)]
    if axis_of_blocks(moment.codec) == -1 and axis == len(view) - 2:
        # Many scales travel in pages too. Their lanes are the moment's rows.
        scales = (*shape[:-1], shape[-1] // moment.block)
        in_pages = math.prod(scales) >= _MANY_SCALES
        if in_pages and tiling.view_layout(scales, len(view)) is not None:
            unit = math.lcm(unit, tiling.LANES)
    _, per_entry = ratios_of_codes(moment.codec, shape, view)[axis]
    return math.lcm(unit, tile * per_entry)


def _codes(moment: MomentFormat, shape: Shape) -> tuple[Shape, int]:
    """Returns the shape and itemsize of a moment's codes."""
    if moment.codec is None:
        return shape, moment.itemsize
    codes = get_codes(moment.codec.stored(shape))
    return codes.shape, codes.dtype.itemsize


def _has_last(moment: MomentFormat, pages: Pages) -> bool:
    """Returns whether all pages, the last too, are whole blocks and tiles."""
    axis, left = pages.axis, pages.axis_size % pages.size
    _, blocks = ratios_of_scales(moment.codec, pages.view, axis)[axis]
    if axis_of_blocks(moment.codec) is None and axis and left % blocks:
        return False
    if not moment.on_host:
        return True
    codes, itemsize = _codes(moment, pages.leaf)
    order = tiling.view_layout(codes, len(pages.view), itemsize)
    assert order is not None
    merged = len(codes) - len(order) + 1
    view = (math.prod(codes[:merged]), *codes[merged:])
    _, per_entry = ratios_of_codes(moment.codec, pages.leaf, pages.view)[axis]
    return tiling.can_slice(view, order, axis, pages.size // per_entry, itemsize)


def _smallest_remainder(
    axis_size: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """Returns `_page_entries`, with the smallest last page.

    XLA:TPU compiles the last page separately. A smaller one compiles sooner.
    """
    size, count = _page_entries(axis_size, unit, bytes_each, page_size)
    if axis_size % size:
        sizes = range(size // unit * unit, size // 2, -unit)
        size = min(sizes, key=lambda n: axis_size % n)
        count = -(-axis_size // size)
    return size, count


def _page_size_in(leaf_bytes: int, page_size: int) -> int:
    count = min(_PAGES, max(1, leaf_bytes // LEAST_PAGE))
    return min(page_size, -(-leaf_bytes // count))


def _page_entries(
    axis_size: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """Returns the entries of a page, and the number of pages."""
    largest = max(unit, page_size // bytes_each // unit * unit)
    fewest = -(-axis_size // largest)
    for count in range(fewest, 2 * fewest + 1):
        if axis_size % count == 0 and axis_size // count % unit == 0:
            return axis_size // count, count
    size = -(-axis_size // (fewest * unit)) * unit
    return size, -(-axis_size // size)
