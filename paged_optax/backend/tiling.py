"""Array layouts of XLA:TPU, and the slices it supports in host memory.

XLA:GPU and XLA:CPU lay every array out row by row. XLA:TPU tiles the two minor
dimensions, 8 sublanes by 128 lanes, and chooses the two that leave the least padding: a
matrix of 50257 columns is laid out by columns, an attention kernel `[2048, 32, 64]` has
its first axis in the lanes. XLA:TPU refuses to reshape or transpose such an array in
host memory ("Bitcast changes dimensionality", "Only handling bitcasts") or aborts
("minor_to_major field contains 4 elements, but shape has 2 dimensions"). Pages are
therefore slices along existing axes.

The rules reproduce the compiler's; `tests/backend/test_tiling.py` compares them for
random shapes (libtpu 0.0.52).
"""

import functools
import math
from typing import Literal

from paged_optax.backend.types import Shape

LANES = 128
SUBLANES = 8

AxisRole = Literal["lanes", "sublanes", "major"]


@functools.cache
def minor_to_major(shape: Shape, itemsize: int = 4) -> tuple[int, ...]:
    """Returns the axes of an array in XLA:TPU's layout, from minor to major.

    The lanes' axis is first, then the sublanes' axis, then the others from the last on.
    Among layouts of equal size, the one nearest to row-major is returned.

    Example:
      >>> minor_to_major((768, 50257)), minor_to_major((2048, 32, 64))
      ((0, 1), (0, 2, 1))
    """
    axes = range(len(shape) - 1, -1, -1)
    if len(shape) < 2:
        return tuple(axes)
    candidates = ((lanes, sublanes) for lanes in axes for sublanes in axes)
    lanes, sublanes = min(
        (pair for pair in candidates if pair[0] != pair[1]),
        key=lambda pair: tiled_bytes(shape, itemsize, pair),
    )
    return (lanes, sublanes, *(i for i in axes if i not in (lanes, sublanes)))


def tiled_bytes(
    shape: Shape, itemsize: int, order: tuple[int, ...] | None = None
) -> int:
    """Returns the bytes of an array in XLA:TPU's layout, padding included.

    `order` starts with the axes of the lanes and the sublanes; None: XLA's choice.
    """
    # Values of fewer than 32 bits share a word with those of the next sublanes.
    packed = max(1, 4 // itemsize)
    if len(shape) < 2:
        tile = min(SUBLANES, _power_of_two(-(-math.prod(shape) // LANES)))
        return itemsize * _up(math.prod(shape), LANES * max(packed, tile))
    lanes, sublanes, *_ = minor_to_major(shape, itemsize) if order is None else order
    height = max(packed, min(SUBLANES, _power_of_two(shape[sublanes])))
    remaining = (n for i, n in enumerate(shape) if i not in (lanes, sublanes))
    tiles = _up(shape[lanes], LANES) * _up(shape[sublanes], height)
    return itemsize * tiles * math.prod(remaining)


def view_layout(shape: Shape, axes: int, itemsize: int = 4) -> tuple[int, ...] | None:
    """Returns the layout of an array with its first axes collapsed to `axes` axes.

    None if the view is no bitcast: the collapsed axes are not adjacent in memory, or
    rows end within a tile.

    Example:
      >>> view_layout((3, 1280, 640), 2), view_layout((3, 1284, 640), 2)
      ((1, 0), None)
    """
    order, merged = minor_to_major(shape, itemsize), len(shape) - axes
    if merged <= 0:
        return None if merged else order
    if order[::-1][: merged + 1] != tuple(range(merged + 1)):
        return None
    tile = SUBLANES * max(1, 4 // itemsize)
    if merged == len(shape) - 2 and shape[merged] % tile:
        return None
    return (*(i - merged for i in order if i > merged), 0)


def role(order: tuple[int, ...], axis: int) -> AxisRole:
    """Returns the role of an axis in a layout from minor to major."""
    place = order.index(axis)
    return "lanes" if place == 0 else "sublanes" if place == 1 else "major"


def can_slice(
    view: Shape, order: tuple[int, ...], axis: int, size: int, itemsize: int
) -> bool:
    """Returns whether XLA:TPU reads and writes slices of an array in host memory.

    Slices start at multiples of `size`; the last ends with the array. Slices along the
    lanes are whole tiles ("Updating the lane dimension is only supported when the lane
    update size is a multiple of LaneCount"). Slices along the sublanes have a multiple
    of 8 rows; the last is written in pieces (`sublane_sizes`), which are no single rows
    of 16-bit values. Arrays of bytes are copied whole for every slice. Slices along two
    axes abort ("Check failed: update_detail.higher_dimensions_multiplied").
    """
    axis_size = view[axis]
    if itemsize < 2:
        return False
    if size >= axis_size:
        return True
    if len(view) == 1:
        # A vector is laid out in tiles of 1024 words.
        tile = SUBLANES * LANES * max(1, 4 // itemsize)
        return size % tile == 0 and axis_size % tile == 0
    packed = max(1, 4 // itemsize)
    tiles = {"lanes": (LANES, LANES), "sublanes": (SUBLANES, packed), "major": (1, 1)}
    step, end = tiles[role(order, axis)]
    return size % step == 0 and axis_size % end == 0


def sublane_sizes(size: int) -> list[int]:
    """Splits rows into a multiple of 8 and powers of two: 23 is 16, 4, 2 and 1.

    XLA:TPU writes no other sizes to the host (libtpu 0.0.52: "Updating the sublane
    dimension across multiple lane chunks is only supported when the sublane update size
    is a multiple of the chunk sublane size").
    """
    return [n for n in (size // 8 * 8, size & 4, size & 2, size & 1) if n]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
