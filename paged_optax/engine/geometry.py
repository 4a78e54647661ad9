"""How one leaf is cut into pages, on a backend of rows and on one of tiles.

On a GPU a page must be a range of the flattened leaf, for a transfer copies one range:
leading axes collapse into rows, and where a row is too long, or is no whole number of a
codec's blocks, the leaf is seen flat. On a TPU nothing may be reshaped in host memory
but axes that follow each other there (`paged_optax.backend.tiling`): a page is a range
along the most major axis, or along as many of them as cut fine enough, or along the
lanes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from paged_optax.backend import tiling
from paged_optax.codecs import Codec, axis_of_blocks, codes_of, packed_along

#: Bytes of a page, or of a piece of one, that a TPU computes a codec on.
#
# XLA:TPU keeps what it computes of a page of this size in its vector memory: of
# (50257, 768) in eight bits, pages of 16 MiB take 92 MiB of scratch. And the larger a
# page, the longer what computes on it takes to compile: (32128, 1024) in pages of 2 MiB
# 15 s, of 1 MiB 6 s (libtpu 0.0.52).
PIECE = 2**20

# Scales of a moment that go in pages on a TPU, though pages may have to be larger.
_MANY_SCALES = 2**18

# A leaf of n pages takes (n + 1) / n of the link's time (`paged_optax.engine.run`). So
# it has this many, unless they would be so small that latency counts.
_PAGES = 16
_LEAST_PAGE = 2**20

# Slices start at entries counted in 32 bits.
_MOST_INDEX = 2**31
_TOO_LONG = (
    "slices start at entries counted in 32 bits, and its longest axis has more: make it"
    " a matrix of shorter axes"
)


class Kept(NamedTuple):
    """How one moment of a leaf is kept.

    Attributes:
      itemsize: Bytes of a value as the transformation sees it.
      codec: What stores it, or None.
      on_host: Whether it is in host memory.
    """

    itemsize: int
    codec: Codec | None = None
    on_host: bool = True


@dataclasses.dataclass(frozen=True)
class Pages:
    """How one leaf is cut.

    The leaf, seen under the shape `view`, is sliced along `axis`, `size` entries a
    page; what does not fill a page is a last, smaller one.

    Attributes:
      leaf: The leaf's shape.
      view: A shape that holds the same values in the same order, and costs nothing.
      axis: The axis to slice.
      size: Entries of a page along it.
      count: Pages, smaller last ones included; 0 where leaves of several shapes are
        updated together and travel whole.
      unit: Entries along `axis` that a loop's own variable counts as one. A page is a
        multiple of them.
      tiled: Whether arrays lie in a TPU's tiles.
      refused: Why the leaf cannot be cut although it is larger than a page; else empty.
    """

    leaf: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    size: int
    count: int
    unit: int = 1
    tiled: bool = False
    refused: str = ""

    @property
    def entries(self) -> int:
        """Values of one full page."""
        return math.prod(self.page(self.size)) if self.view else 1

    @property
    def extent(self) -> int:
        """Entries along the axis that is cut."""
        return self.view[self.axis] if self.view else 1

    def page(self, size: int) -> tuple[int, ...]:
        """The shape of a page of `size` entries."""
        if not self.count or not self.view:
            return self.view
        return (*self.view[: self.axis], size, *self.view[self.axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How one leaf is cut, on either kind of backend.

    Attributes:
      rows: On a GPU or CPU.
      tiles: On a TPU.
    """

    rows: Pages
    tiles: Pages

    def on(self, platform: str) -> Pages:
        """The pages on a platform: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self.tiles if platform == "tpu" else self.rows


def uncut(shape: tuple[int, ...]) -> Geometry:
    """A leaf that is updated whole on every backend."""
    pages = Pages(shape, shape, 0, 1, 0)
    return Geometry(pages, dataclasses.replace(pages, tiled=len(shape) > 1))


@functools.cache
def cut(shape: tuple[int, ...], moments: tuple[Kept, ...], page_size: int) -> Geometry:
    """Cuts a leaf into pages of at most `page_size` bytes, if its layout allows it.

    Pages hold whole blocks and whole words of every moment. Where the smallest such
    page is larger than asked, it is the page. A page count that divides the leaf is
    preferred, down to half the asked size. A leaf without a codec of blocks has 16
    pages, unless they would be smaller than 1 MiB.

    Args:
      shape: The leaf's shape.
      moments: The moments that share the leaf's pages.
      page_size: The most bytes of one moment's page, as the transformation sees it.

    Returns:
      The geometry.

    Example:
      >>> pages = cut((4096, 4096), (Kept(4), Kept(4)), 8 * 2**20).on("gpu")
      >>> pages.count, pages.size
      (16, 256)

      A matrix that a TPU lays out by columns is cut there by columns:

      >>> found = cut((768, 50257), (Kept(4),), 16 * 2**20)
      >>> found.on("gpu").axis, found.on("tpu").axis
      (0, 1)
    """
    return Geometry(_rows(shape, moments, page_size), _tiles(shape, moments, page_size))


def _single(shape: tuple[int, ...], *, tiled: bool = False) -> Pages:
    extent = shape[0] if shape else 1
    return Pages(shape, shape, 0, extent, 1, tiled=tiled and len(shape) > 1)


def _many(size_of_leaf: int, page_size: int) -> int:
    """The page size that cuts a leaf into as many pages as it should have."""
    count = min(_PAGES, max(1, size_of_leaf // _LEAST_PAGE))
    return min(page_size, -(-size_of_leaf // count))


def _rows(shape: tuple[int, ...], moments: tuple[Kept, ...], page_size: int) -> Pages:
    """Cuts the flattened leaf, at rows where a page holds one."""
    itemsize = max(x.itemsize for x in moments)
    values = math.prod(shape)
    if not any(_block(x) > 1 for x in moments):
        page_size = _many(values * itemsize, page_size)
    if values * itemsize <= page_size:
        return _single(shape)
    columns = shape[-1] if len(shape) > 1 else 1
    units = [_unit_of_rows(x.codec, columns) for x in moments]
    unit = math.lcm(*units)
    rows = values // columns
    view: tuple[int, ...] = (rows, columns) if len(shape) > 1 else shape
    flat = [_unit_of_values(x.codec, shape) for x in moments]
    if max(view) >= _MOST_INDEX:
        unit = math.lcm(*flat)
        if not (columns := _folded(values, unit, page_size // itemsize)):
            return dataclasses.replace(_single(shape), refused=_TOO_LONG)
        rows, units, unit = values // columns, [1], 1
        view = rows, columns
    axis, extent, bytes_each = 0, rows, columns * itemsize
    if unit * bytes_each > page_size and values < _MOST_INDEX:
        if all(flat):
            units, unit = flat, math.lcm(*flat)
            view, extent, bytes_each = (values,), values, itemsize
        elif all(axis_of_blocks(x.codec) == -2 or _block(x) == 1 for x in moments):
            # Blocks along columns: pages are strips, which a kernel transfers.
            axis, extent, bytes_each = 1, columns, rows * itemsize
            units = [packed_along(x.codec, -1) for x in moments]
            unit = math.lcm(*units)
    size, count = _divide(extent, unit, bytes_each, page_size)
    if count == 1:
        return _single(shape)  # its rows are not enough for whole blocks
    if len(set(units)) > 1:
        unit = math.gcd(unit, extent)  # a moment of no blocks has no other whole units
    return Pages(shape, view, axis, size, count, unit=unit)


def _folded(values: int, unit: int, most: int) -> int:
    """Columns for a vector whose values are too many to count; 0 if there are none.

    They are whole units of values that are never parted; 0: its values have no order.
    """
    found = range(unit, most + 1, unit) if unit else ()
    exact = (n for n in found if values % n == 0 and values // n < _MOST_INDEX)
    return next(exact, 0)


def _unit_of_rows(codec: Codec | None, columns: int) -> int:
    """Rows of the flattened matrix that are whole blocks and whole words."""
    if codec is None:
        return 1
    blocks = codec.block // math.gcd(codec.block, columns)
    if axis_of_blocks(codec) == -2:
        blocks = codec.block
    return math.lcm(blocks, packed_along(codec, -2))


def _block(kept: Kept) -> int:
    return 1 if kept.codec is None else kept.codec.block


def _unit_of_values(codec: Codec | None, shape: tuple[int, ...]) -> int:
    """Values of the flat moment that are whole blocks and words; 0: it is not flat."""
    if codec is None:
        return 1
    codes = codes_of(codec.stored(shape)).shape
    together, left = divmod(math.prod(shape), max(1, math.prod(codes)))
    if left or axis_of_blocks(codec) == -2 or packed_along(codec, -2) > 1:
        return 0
    return math.lcm(codec.block, together)


def _divide(extent: int, unit: int, bytes_each: int, page_size: int) -> tuple[int, int]:
    """Entries of a page, and how many pages there are."""
    largest = max(unit, page_size // bytes_each // unit * unit)
    fewest = -(-extent // largest)
    for count in range(fewest, 2 * fewest + 1):
        if extent % count == 0 and extent // count % unit == 0:
            return extent // count, count
    size = -(-extent // (fewest * unit)) * unit
    return size, -(-extent // size)


def _divide_with_least_rest(
    extent: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """As `_divide`; where a last page is smaller, the smallest.

    XLA:TPU compiles the last page by itself, the sooner the smaller it is.
    """
    size, count = _divide(extent, unit, bytes_each, page_size)
    if extent % size:
        sizes = range(size // unit * unit, size // 2, -unit)
        size = min(sizes, key=lambda n: extent % n)
        count = -(-extent // size)
    return size, count


def _tiles(shape: tuple[int, ...], moments: tuple[Kept, ...], page_size: int) -> Pages:
    """Cuts along the most major axes that make pages small enough, or the lanes."""
    itemsize = max(x.itemsize for x in moments)
    asked, size_of_leaf = page_size, math.prod(shape) * itemsize
    if any(_block(x) > 1 for x in moments):
        page_size = min(page_size, PIECE)
    page_size = _many(size_of_leaf, page_size)
    if size_of_leaf <= page_size:
        return _single(shape, tiled=True)
    found: list[Pages] = []
    ways = list(_ways(shape))
    if any(_block(x) > 1 and axis_of_blocks(x.codec) is None for x in moments):
        # Whole rows first, where blocks run through them: of parts of each row
        # (1024, 16, 64) takes 9 s to compile, not 3 (libtpu 0.0.52).
        ways.sort(key=lambda way: way[1] != 0)
    for view, axis in ways:
        unit = math.lcm(*(_unit_of_tiles(x, shape, view, axis) for x in moments))
        if not 0 < unit < view[axis] or view[axis] >= _MOST_INDEX:
            continue
        others = math.prod(view) // view[axis]
        bytes_each = others * itemsize
        size, count = _divide_with_least_rest(view[axis], unit, bytes_each, page_size)
        pages = Pages(shape, view, axis, size, count, tiled=True)
        if count == 1 or not all(_has_last(x, pages) for x in moments):
            continue
        if pages.entries * itemsize <= page_size:
            return pages
        found.append(pages)
    if found:
        return min(found, key=lambda pages: pages.entries)
    single = _single(shape, tiled=True)
    if size_of_leaf <= max(asked, 2 * PIECE):
        return single
    return dataclasses.replace(single, refused=_reason(moments, shape))


def _reason(moments: tuple[Kept, ...], shape: tuple[int, ...]) -> str:
    """Why a TPU cannot cut a leaf, and what to do."""
    if max(shape) >= _MOST_INDEX:
        return _TOO_LONG
    block = math.lcm(*map(_block, moments))
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
        if tiling.viewed(shape, axes) is not None:
            joined = len(shape) - axes + 1
            yield (math.prod(shape[:joined]), *shape[joined:]), 0


def _unit_of_tiles(
    kept: Kept, shape: tuple[int, ...], view: tuple[int, ...], axis: int
) -> int:
    """Entries along an axis that are whole blocks, words and tiles; 0: none are."""
    blocks, along = 1, axis_of_blocks(kept.codec)
    if along is not None:
        blocks = _block(kept) if axis == len(view) + along else 1
    elif kept.codec is not None:
        after = math.prod(view[axis + 1 :])
        blocks = _block(kept) // math.gcd(_block(kept), after)
    codes, itemsize, packed = _codes(kept, shape)
    together = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    if not kept.on_host:
        return math.lcm(blocks, together)
    order = tiling.viewed(codes, len(view), itemsize)
    if order is None or itemsize < 2:
        return 0
    rows = tiling.SUBLANES * max(1, 4 // itemsize)
    tile = rows * tiling.LANES
    if len(view) > 1:
        tiles = {"lanes": tiling.LANES, "sublanes": rows, "major": 1}
        tile = tiles[tiling.role(order, axis)]
    if along == -1 and axis == len(view) - 2:
        # So many scales go in pages too. Their lanes are the moment's rows.
        scales = (*shape[:-1], shape[-1] // _block(kept))
        many = math.prod(scales) >= _MANY_SCALES
        if many and tiling.viewed(scales, len(view)) is not None:
            blocks = math.lcm(blocks, tiling.LANES)
    return math.lcm(blocks, tile * together)


def _codes(
    kept: Kept, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """The array that keeps a moment: its shape, itemsize, and values in one of its."""
    if kept.codec is None:
        return shape, kept.itemsize, (1,) * len(shape)
    codes = codes_of(kept.codec.stored(shape))
    packed = [1] * len(shape)
    packed[-2:] = [packed_along(kept.codec, axis) for axis in (-2, -1)][-len(shape) :]
    if math.prod(packed) == 1 and codes.shape != shape:
        packed[-1] = 2  # pairs of four bits
    return codes.shape, codes.dtype.itemsize, tuple(packed)


def _has_last(kept: Kept, pages: Pages) -> bool:
    """Whether a moment's slices, the last one too, are whole blocks and tiles."""
    axis, left = pages.axis, pages.extent % pages.size
    if axis_of_blocks(kept.codec) is None and left and axis:
        after = math.prod(pages.view[axis + 1 :])
        if left * after % _block(kept):
            return False
    if not kept.on_host:
        return True
    codes, itemsize, packed = _codes(kept, pages.leaf)
    order = tiling.viewed(codes, len(pages.view), itemsize)
    assert order is not None
    joined = len(codes) - len(order) + 1
    view = (math.prod(codes[:joined]), *codes[joined:])
    together = packed[axis - len(view)] if len(view) > 1 else packed[-1]
    return tiling.can_slice(view, order, axis, pages.size // together, itemsize)
