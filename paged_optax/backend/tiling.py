"""How XLA:TPU lays arrays out, and what it can slice of one in host memory.

XLA:GPU and XLA:CPU lay every array out row by row. XLA:TPU tiles the two minor
dimensions, 8 sublanes by 128 lanes, and takes for them the two that leave the least
space empty: a matrix of 50257 columns lies column by column, an attention kernel
`[2048, 32, 64]` has its first axis in the lanes. A reshape or a transposition of such
an array in host memory is refused ("Bitcast changes dimensionality", "Only handling
bitcasts") or ends the process ("minor_to_major field contains 4 elements, but shape has
2 dimensions"). So pages are cut along axes that are there.

The rule was read off the compiler; `tests/backend/test_tiling.py` compares it with the
compiler for random shapes (libtpu 0.0.52).
"""

import functools
import math
from typing import Literal

LANES = 128
SUBLANES = 8

AxisRole = Literal["lanes", "sublanes", "major"]


@functools.cache
def minor_to_major(shape: tuple[int, ...], itemsize: int = 4) -> tuple[int, ...]:
    """The axes of an array as XLA:TPU lays it out, the one of the lanes first.

    Then come the axis of the sublanes, and the others from the last on. Among ways that
    take the same space, it is the one nearest to row by row.

    Example:
      >>> minor_to_major((768, 50257)), minor_to_major((50257, 768))
      ((0, 1), (1, 0))
      >>> minor_to_major((2048, 32, 64))
      (0, 2, 1)
    """
    axes = range(len(shape) - 1, -1, -1)
    if len(shape) < 2:
        return tuple(axes)
    pairs = ((lanes, sublanes) for lanes in axes for sublanes in axes)
    lanes, sublanes = min(
        (pair for pair in pairs if pair[0] != pair[1]),
        key=lambda pair: tiled_bytes(shape, itemsize, pair),
    )
    return (lanes, sublanes, *(i for i in axes if i not in (lanes, sublanes)))


def tiled_bytes(
    shape: tuple[int, ...], itemsize: int, order: tuple[int, ...] | None = None
) -> int:
    """Bytes of an array as XLA:TPU lays it out, with what its tiles leave empty.

    `order` begins with the axes of the lanes and of the sublanes; None: its own.
    """
    # Values of fewer than 32 bits share a word with those of the next sublanes.
    packed = max(1, 4 // itemsize)
    if len(shape) < 2:
        tile = min(SUBLANES, _power_of_two(-(-math.prod(shape) // LANES)))
        return itemsize * _up(math.prod(shape), LANES * max(packed, tile))
    lanes, sublanes, *_ = minor_to_major(shape, itemsize) if order is None else order
    height = max(packed, min(SUBLANES, _power_of_two(shape[sublanes])))
    others = (n for i, n in enumerate(shape) if i not in (lanes, sublanes))
    tiles = _up(shape[lanes], LANES) * _up(shape[sublanes], height)
    return itemsize * tiles * math.prod(others)


def view_layout(
    shape: tuple[int, ...], axes: int, itemsize: int = 4
) -> tuple[int, ...] | None:
    """The layout of an array whose first axes are seen as one: a view of `axes` axes.

    None where such a view is no bitcast: axes that do not follow each other in memory,
    or rows that end within a tile.

    Example:
      >>> view_layout((3, 1280, 640), 2)
      (1, 0)
      >>> view_layout((3, 1284, 640), 2), view_layout((3, 768, 50257), 2)
      (None, None)
    """
    order, joined = minor_to_major(shape, itemsize), len(shape) - axes
    if joined <= 0:
        return None if joined else order
    if order[::-1][: joined + 1] != tuple(range(joined + 1)):
        return None
    tile = SUBLANES * max(1, 4 // itemsize)
    if joined == len(shape) - 2 and shape[joined] % tile:
        return None
    return (*(i - joined for i in order if i > joined), 0)


def role(order: tuple[int, ...], axis: int) -> AxisRole:
    """What an axis is in a layout, given as `minor_to_major` or `view_layout` do."""
    place = order.index(axis)
    return "lanes" if place == 0 else "sublanes" if place == 1 else "major"


def can_slice(
    view: tuple[int, ...], order: tuple[int, ...], axis: int, size: int, itemsize: int
) -> bool:
    """Whether XLA:TPU reads and writes slices of an array in host memory.

    `view` is the shape that is sliced, of the layout `order`, along `axis`, in slices
    of `size` entries. They start at multiples of `size`; the last one ends with the
    array.

    Lanes go by whole tiles ("Updating the lane dimension is only supported when the
    lane update size is a multiple of LaneCount"). Along the sublanes a slice has a
    multiple of 8 rows. The last one is written in several pieces, see `sublane_sizes`;
    if values have 16 bits, none may be a single row. Arrays of bytes are copied whole,
    into another tiling and back, for every slice. Slices along two axes end the process
    ("Check failed: update_detail.higher_dimensions_multiplied").
    """
    extent = view[axis]
    if itemsize < 2:
        return False
    if size >= extent:
        return True
    if len(view) == 1:
        # A vector is laid out in tiles of 1024 words.
        tile = SUBLANES * LANES * max(1, 4 // itemsize)
        return size % tile == 0 and extent % tile == 0
    match role(order, axis):
        case "lanes":
            return size % LANES == 0 and extent % LANES == 0
        case "sublanes":
            packed = max(1, 4 // itemsize)
            return size % SUBLANES == 0 and extent % packed == 0
        case _:
            return True


def sublane_sizes(size: int) -> list[int]:
    """A number of rows as multiples of 8, and powers of two: 23 is 16, 4, 2 and 1.

    XLA:TPU writes no others to the host (libtpu 0.0.52: "Updating the sublane dimension
    across multiple lane chunks is only supported when the sublane update size is a
    multiple of the chunk sublane size").
    """
    return [n for n in (size // 8 * 8, size & 4, size & 2, size & 1) if n]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
