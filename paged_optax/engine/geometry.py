"""How leaves are cut on each kind of backend, and which leaves share their pages.

A page holds a part of one leaf. Like leaves may share a page, which then holds the
same part of each. They travel together, one is read while another is written, and what
a codec stores is computed of all of them at once, so that XLA compiles that once:

- Small leaves share a page, such as 16 adapters of (4096, 16).
- Leaves of a single moment go two by two where pages go both ways at once, because no
  moment is read and written at once. Leaves whose moments differ in size go two by two
  as well, such as moments in bfloat16 beside master weights.
- On a GPU, leaves of a codec of blocks go seven by seven. A leaf's 1,100 instructions
  take 0.3 CPU-seconds to compile if it is alone, and 0.11 if four leaves share pages
  (H200, jax 0.12.0.1). Eight by eight would take 4 MiB more of memory, and more than 32
  in all.

An update of several leaves waits for the gradients of all. So no leaf of more than
256 MiB shares its pages, such as embeddings and output matrices, whose gradients come
first and last.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.codecs import axis_of_blocks, codes_per_word
from paged_optax.engine.page_shapes import in_rows, in_tiles
from paged_optax.engine.page_size import (
    SHARED_PAGE,
    SMALL_PAGE,
    coded_page_size,
    whole_on_cpu,
)
from paged_optax.engine.pages import (
    MomentFormat,
    Pages,
    block_of,
    joined_along,
    single,
)

# How many small leaves share a page at most, and the bytes of the largest leaf that
# shares one.
_MOST_LEAVES = 32
_LARGEST_LEAF = 256 * 2**20

# Each program of a codec takes long to compile: as many leaves share one as leave pages
# of 1 MiB.
_CODED_LEAVES = 7

# Norms and biases on the device need not be isolated. What XLA may compute of all of
# them at once is little, and on a GPU each isolated one waits for the host twice.
_UNISOLATED = 64 * 2**10


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How one leaf is cut, on each kind of backend.

    Attributes:
      gpu: On a GPU.
      tpu: On a TPU.
      cpu: On a CPU. It has no link, and leaves that share pages would only be copied.
    """

    gpu: Pages
    tpu: Pages
    cpu: Pages

    def on(self, platform: str) -> Pages:
        """The pages on a platform, `"gpu"` or `"tpu"`; for a CPU those of a GPU."""
        # What is planned on a CPU is planned for a machine that has a link.
        return self.tpu if platform == "tpu" else self.gpu


def uncut(shape: tuple[int, ...]) -> Geometry:
    """A leaf that is updated whole on every backend."""
    pages = Pages(shape, shape, 0, 1, 0)
    return Geometry(pages, dataclasses.replace(pages, tiled=len(shape) > 1), pages)


@functools.cache
def cut(
    shape: tuple[int, ...],
    moments: tuple[MomentFormat, ...],
    page_size: int,
    like_leaves: int = 1,
    spare_bytes: int = 0,
    isolate: bool = False,
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
      like_leaves: So many leaves, this one too, are alike and may share pages.
      spare_bytes: Of one moment's page: for so many the device has memory anyway.
      isolate: Whether leaves are isolated though there is memory.

    Returns:
      The geometry.
    """
    in_blocks = any(block_of(x) > 1 for x in moments)
    on_host = any(x.on_host for x in moments)
    if isolate:
        # Half of a moment in float32, so that a leaf has two pages at least. A leaf of
        # one page is in no loop of pages, and isolated by one for which the host waits.
        spare_bytes = min(spare_bytes, 2 * math.prod(shape))
    spare_bytes = spare_bytes if spare_bytes >= page_size else 0
    # No moment is read and written at once. Where a leaf has a single one, or some that
    # differ in size, another leaf's moment travels the other way.
    sizes = [_stored_bytes(x, shape) for x in moments if x.on_host]
    alternate = 2 if len(sizes) == 1 or len({*sizes}) > 1 else 1
    share = functools.partial(_shared, shape, moments, like_leaves)
    at_least = lambda leaf_count: _even(like_leaves, max(1, like_leaves // leaf_count))
    on_tpu = share(page_size, in_tiles, at_least(alternate))
    if in_blocks:
        least = _even(like_leaves, -(-like_leaves // _CODED_LEAVES))
        on_gpu = share(coded_page_size(moments, page_size, spare_bytes), in_rows, least)
        page_size = coded_page_size(moments, page_size, 0)
    else:
        # Where pages go in turn, no leaf need alternate with another.
        least = at_least(alternate if GPU_FETCHES_AHEAD else 1)
        on_gpu = share(page_size, in_rows, least)
    # XLA may compute leaves at once that are not isolated: they are small, or there is
    # memory.
    little = in_blocks and on_gpu.count == 1 and 4 * math.prod(shape) <= _UNISOLATED
    if not on_host and (little or (spare_bytes and not isolate)):
        on_gpu = dataclasses.replace(on_gpu, isolated=False)
    # A codec converts, and so do remainders, which have fewer bits than the moments
    # beside them.
    converted = any(x.codec for x in moments) or len({x.itemsize for x in moments}) > 1
    whole = whole_on_cpu(page_size, converted=converted)
    one_page = whole and not in_blocks and not on_gpu.refused
    on_cpu = single(shape) if one_page else in_rows(shape, moments, page_size)
    return Geometry(on_gpu, on_tpu, on_cpu)


def _stored_bytes(moment: MomentFormat, shape: tuple[int, ...]) -> int:
    if moment.codec is None:
        return math.prod(shape) * moment.itemsize
    stored = jax.tree.leaves(moment.codec.stored(shape))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in stored)


def _shared(
    shape: tuple[int, ...],
    moments: tuple[MomentFormat, ...],
    like_leaves: int,
    page_size: int,
    way: Callable[[tuple[int, ...], tuple[MomentFormat, ...], int], Pages],
    least: int,
) -> Pages:
    """Cuts leaves that share pages: so many at least, or more where they are small."""
    unshared = way(shape, moments, page_size)
    itemsize = max([x.itemsize for x in moments])
    size_of_leaf = math.prod(shape) * itemsize
    if like_leaves == 1 or not shape or not 0 < size_of_leaf <= _LARGEST_LEAF:
        return unshared
    page_size = min(page_size, SHARED_PAGE)
    pages = way(shape, moments, max(1, page_size // least))
    page_bytes = pages.entries * itemsize
    most = 1
    if pages.count == 1:
        most = min(_MOST_LEAVES, min(page_size, SMALL_PAGE) // page_bytes)
    leaf_count = _even(like_leaves, -(-like_leaves // max(least, most)))
    too_large = page_bytes * leaf_count > 2 * page_size
    joins = all(_joins(x, pages, leaf_count) for x in moments)
    if leaf_count == 1 or too_large or not joins:
        return unshared
    return dataclasses.replace(pages, leaf_count=leaf_count)


def _even(like_leaves: int, groups: int) -> int:
    """Leaves of the largest of so many groups."""
    return -(-like_leaves // groups)


def sharing(pages: Pages, like_leaves: int) -> list[slice]:
    """Which of so many like leaves share pages."""
    return [
        slice(i, i + pages.leaf_count) for i in range(0, like_leaves, pages.leaf_count)
    ]


def _joins(moment: MomentFormat, pages: Pages, leaf_count: int) -> bool:
    """Whether pages of several leaves, one after the other, are stored as each is."""
    codec = moment.codec
    if pages.refused:
        return False
    if codec is None:
        return True
    sizes = {pages.size, pages.extent % pages.size or pages.size}
    return not codec.draws and all(
        _is_whole(moment, pages, size)
        and all(
            joined_along(one, many, leaf_count) is not None
            for one, many in zip(
                jax.tree.leaves(codec.stored(pages.page(size))),
                jax.tree.leaves(codec.stored(pages.page(size, leaf_count))),
                strict=True,
            )
        )
        for size in sizes
    )


def _is_whole(moment: MomentFormat, pages: Pages, size: int) -> bool:
    """Whether a page of this size ends with a word and with a block.

    Else the next leaf would begin within the page's last word or block.
    """
    packed = math.lcm(*(codes_per_word(moment.codec, axis) for axis in (-1, -2)))
    blocks, along = block_of(moment), axis_of_blocks(moment.codec)
    if blocks > 1 and along is None:
        # Of several ranges of the flattened leaf, scales would be in another order.
        ends = not pages.axis and math.prod(pages.page(size)) % blocks == 0
    else:
        # A codec leaves axes of one entry out, and numbers the others anew.
        in_pages = (
            along is None or 1 in pages.view or pages.axis == len(pages.view) + along
        )
        ends = not in_pages or size % blocks == 0
    return ends and size % packed == 0
