"""How leaves are cut into pages, on a backend of rows and on one of tiles.

A page holds a piece of one leaf. Like leaves may share a page, which then holds the
same piece of each. They travel together, one is read while another is written, and what
a codec stores is computed of all of them at once, so that XLA compiles that once:

- Small leaves share a page, such as 16 adapters of (4096, 16).
- Leaves of a single moment go two by two, for no moment is read and written at once;
  so do those of moments in eight bits and master weights, which are of several sizes.
- On a GPU, eight-bit leaves go four by four: their program has 600 instructions, and
  XLA compiles a leaf's by itself in 0.2 s, or 0.4 s where pages go both ways.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from paged_optax.codecs import axis_of_blocks
from paged_optax.engine.pages import Geometry, Kept, Pages, block_of
from paged_optax.engine.rows import in_rows
from paged_optax.engine.tiles import in_tiles

# Bytes of a page that several leaves share, and of one that small leaves share.
_SHARED_PAGE = 8 * 2**20
_SMALL_PAGE = 4 * 2**20
_MOST_LEAVES = 32

# Bytes of the pages of a leaf's moments, together, if a codec stores them in blocks:
# XLA:GPU keeps several times as much of them in memory.
_CODED_PAGES = 16 * 2**20
_CODED_LEAVES = 4


def uncut(shape: tuple[int, ...]) -> Geometry:
    """A leaf that is updated whole on every backend."""
    pages = Pages(shape, shape, 0, 1, 0)
    return Geometry(pages, dataclasses.replace(pages, tiled=len(shape) > 1))


@functools.cache
def cut(
    shape: tuple[int, ...], moments: tuple[Kept, ...], page_size: int, like: int = 1
) -> Geometry:
    """Cuts leaves into pages of at most `page_size` bytes, if their layout allows it.

    Pages hold whole blocks and whole words of every moment. Where the smallest such
    page is larger than asked, it is the page. A page count that divides the leaf is
    preferred, down to half the asked size. A leaf has at least 16 pages, unless they
    would be smaller than 1 MiB.

    Args:
      shape: The leaf's shape.
      moments: The moments that share the leaf's pages.
      page_size: The most bytes of one moment's page, as the transformation sees it.
      like: So many leaves are like this one, and may share pages.

    Returns:
      The geometry.

    Example:
      >>> pages = cut((4096, 4096), (Kept(4), Kept(4)), 8 * 2**20).on("gpu")
      >>> pages.count, pages.size, pages.leaves
      (16, 256, 1)

      Eight small ones share two pages:

      >>> pages = cut((512, 512), (Kept(4), Kept(4)), 8 * 2**20, like=8).on("gpu")
      >>> pages.count, pages.size, pages.leaves
      (1, 512, 4)

      A matrix that a TPU lays out by columns is cut there by columns:

      >>> found = cut((768, 50257), (Kept(4),), 16 * 2**20)
      >>> found.on("gpu").axis, found.on("tpu").axis
      (0, 1)
    """
    coded = any(block_of(x) > 1 for x in moments)
    # Nothing of the same size travels the other way but another leaf's moment.
    sizes = [x.codec is None for x in moments if x.on_host]
    alternate = len(sizes) == 1 or len({*sizes}) > 1
    if coded:
        page_size = min(page_size, _CODED_PAGES // max(2, len(moments)))
    find = functools.partial(_shared, shape, moments, page_size, like)
    by_two = 2 if alternate else 1
    return Geometry(
        find(in_rows, _CODED_LEAVES if coded else by_two), find(in_tiles, by_two)
    )


def _shared(
    shape: tuple[int, ...],
    moments: tuple[Kept, ...],
    page_size: int,
    like: int,
    way: Callable[[tuple[int, ...], tuple[Kept, ...], int], Pages],
    wanted: int,
) -> Pages:
    """Cuts leaves that share pages: as many as wanted, or more where they are small."""
    alone = way(shape, moments, page_size)
    if like == 1 or not math.prod(shape) or not shape:
        return alone
    least = _even(like, max(1, like // wanted))
    page_size = min(page_size, _SHARED_PAGE)
    pages = way(shape, moments, max(1, page_size // least))
    itemsize = max(x.itemsize for x in moments)
    page_bytes = pages.entries * itemsize
    most = 1
    if pages.count == 1:
        most = min(_MOST_LEAVES, min(page_size, _SMALL_PAGE) // page_bytes)
    leaves = _even(like, -(-like // max(least, most)))
    too_large = page_bytes * leaves > 2 * page_size
    joins = all(_joins(x, pages, leaves) for x in moments)
    if leaves == 1 or too_large or not joins:
        return alone
    return pages.shared(leaves)


def _even(like: int, parts: int) -> int:
    """Leaves of the largest part."""
    return -(-like // parts)


def together(pages: Pages, like: int) -> list[slice]:
    """Which of so many like leaves share pages.

    Example:
      >>> pages = cut((512, 512), (Kept(4), Kept(4)), 8 * 2**20, like=6).on("gpu")
      >>> [range(6)[part] for part in together(pages, like=6)]
      [range(0, 3), range(3, 6)]
    """
    return [slice(i, i + pages.leaves) for i in range(0, like, pages.leaves)]


def _joins(kept: Kept, pages: Pages, leaves: int) -> bool:
    """Whether pages of several leaves, one after the other, are stored as each is."""
    codec = kept.codec
    if pages.refused:
        return False
    if codec is None:
        return True
    flat = block_of(kept) > 1 and axis_of_blocks(codec) is None
    if codec.draws or (flat and pages.axis):
        return False
    sizes = {pages.size, pages.extent % pages.size or pages.size}
    return all(
        joined_along(one, many, leaves) is not None
        for size in sizes
        for one, many in zip(
            jax.tree.leaves(codec.stored(pages.page(size))),
            jax.tree.leaves(codec.stored(pages.page(size, leaves))),
            strict=True,
        )
    )


def joined_along(
    one: jax.ShapeDtypeStruct, many: jax.ShapeDtypeStruct, leaves: int
) -> int | None:
    """The axis along which arrays of one shape make one of another; None: none."""
    if leaves == 1 or len(one.shape) != len(many.shape):
        return None
    axes = [i for i, n in enumerate(one.shape) if n != many.shape[i]]
    if len(axes) != 1 or many.shape[axes[0]] != leaves * one.shape[axes[0]]:
        return None
    return axes[0]
