"""Cuts of leaves for each backend, and groups of leaves that share pages.

A page holds a part of one leaf. Leaves of one shape may share a page, which then holds
the same part of each: they travel in one transfer order, and XLA compiles the codec's
computation once for all.

- Small leaves share a page, such as 16 adapters of (4096, 16).
- Leaves of a single moment share pages in pairs if pages travel both ways, because no
  moment is read and written at the same time. The same holds for leaves whose moments
  differ in size, such as bfloat16 moments with float32 master weights.
- On a GPU, up to six leaves without a codec share pages by default: a loop begins and
  ends less often.
- On a GPU, seven leaves of a codec of blocks share pages. The 1,100 instructions of a
  leaf take 0.3 CPU-seconds to compile for one leaf, and 0.11 if four leaves share pages
  (H200, jax 0.12.0.1). Eight leaves would take 4 MiB more, and exceed 32 MiB in all.

An update of several leaves waits for the gradients of all. Leaves of more than 256 MiB
therefore share no pages: gradients of embeddings and output matrices come first and
last.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from paged_optax.backend.memory import nbytes
from paged_optax.backend.platforms import (
    GPU_FETCHES_AHEAD,
    GPU_HAS_STREAMS_BY_DIRECTION,
)
from paged_optax.backend.types import Shape
from paged_optax.codecs import axis_of_blocks, values_per_entry
from paged_optax.engine.page_cuts import (
    FEWEST,
    LEAST_PAGE,
    in_rows,
    in_tiles,
    smallest_unit,
)
from paged_optax.engine.pages import (
    MomentFormat,
    Pages,
    joined_along,
    single,
)

# The largest page by default, and bytes of a page that several leaves share, and of a
# page that small leaves share.
_LARGEST_PAGE = 16 * 2**20
_SHARED_PAGE = 8 * 2**20
_SMALL_PAGE = 4 * 2**20

# Most small leaves that share a page, and bytes of the largest leaf that shares one.
_MOST_LEAVES = 32
_LARGEST_LEAF = 256 * 2**20

# Leaves of a codec of blocks that share pages: as many as leave pages of 1 MiB.
_CODED_LEAVES = 7

# A loop's first page is read, and its last one written, while the other direction is
# idle. Eight leaves of 2048x2048 take 8.8 ms alone, and 7.6 ms if four share pages
# (H200, by `tests/helpers/step_model.py`), and Lion's 4.1 ms for 4.4 in pairs. The most
# leaves are the root of these bytes over a leaf's: GPT-2 takes 30.9 ms, with twelve
# leaves 32.6.
_FEW_LEAVES = 6
_FEW_BYTES = 256 * 2**20

# Norms and biases on the device are not isolated. XLA may compute all of them at once
# in little memory, and on a GPU each isolated leaf waits for the host twice.
_UNISOLATED = 64 * 2**10


# Bytes of the pages of all moments of a leaf, if a codec stores them in blocks. XLA:GPU
# keeps several times as much in memory.
_CODED_PAGES = 16 * 2**20

# A page costs XLA:GPU about ten kernels, at any size. Larger pages are cheap next to
# the layers' weights on the device (`paged_optax.layerwise.layer_optimizer`). A page
# that does not travel may exceed `page_size` by this factor.
_DEVICE_FACTOR = 16

# A CPU has no link, and XLA:CPU runs a loop over pages in one thread: on two cores
# AdamW takes 2.3 times as long (jax 0.10.2 and 0.12.0.1). A CPU updates a leaf whole,
# unless pages are smaller than this, as in tests. Codecs, and remainders of master
# weights, make temporary arrays as large as the update: these leaves are whole only
# with pages of the default size. A codec of blocks always has pages.
_WHOLE_ON_CPU = 2**20
_WHOLE_ON_CPU_IF_CONVERTED = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Pages of one leaf on each kind of backend."""

    gpu: Pages
    tpu: Pages
    cpu: Pages  # without a link: leaves that share pages would only be copied

    def on(self, platform: str) -> Pages:
        """Returns the pages on `"gpu"` or `"tpu"`; a GPU's for `"cpu"`."""
        # A plan on a CPU is a plan for a machine that has a link.
        return self.tpu if platform == "tpu" else self.gpu


def uncut(shape: Shape) -> Geometry:
    """Returns a leaf that is updated whole on every backend."""
    pages = Pages(shape, shape, 0, 1, 0)
    return Geometry(pages, dataclasses.replace(pages, tiled=len(shape) > 1), pages)


@functools.cache
def cut(
    shape: Shape,
    moments: tuple[MomentFormat, ...],
    page_size: int | None = None,
    like_leaves: int = 1,
    spare_bytes: int = 0,
    isolate: bool = False,
) -> Geometry:
    """Cuts leaves into pages of at most `page_size` bytes, if their layout allows it.

    Pages hold whole blocks and whole words of every moment. If the smallest such page
    exceeds `page_size`, it is the page. A page count that divides the leaf is
    preferred, down to half the size. A leaf has at least 16 pages, unless they would be
    smaller than 1 MiB. `page_size` counts bytes as the transformation sees them; None:
    chosen for each leaf, by latency on a GPU. There are `like_leaves` of this kind. The
    device has memory for `spare_bytes` of one moment's page anyway; with `isolate`
    leaves are isolated nevertheless.
    """
    by_latency = page_size is None
    page_size = _LARGEST_PAGE if page_size is None else page_size
    rows = functools.partial(in_rows, by_latency=by_latency)
    in_blocks = any(x.block > 1 for x in moments)
    on_host = any(x.on_host for x in moments)
    if isolate:
        # Half of a moment in float32, so that a leaf has two pages at least. A leaf of
        # one page is in no loop of pages, and isolated by a loop that the host awaits.
        spare_bytes = min(spare_bytes, 2 * math.prod(shape))
    spare_bytes = spare_bytes if spare_bytes >= page_size else 0
    # No moment is read and written at the same time. If a leaf has a single one, or
    # moments of several sizes, another leaf's moment travels the other way.
    sizes = [
        nbytes(x.codec.stored(shape)) if x.codec else math.prod(shape) * x.itemsize
        for x in moments
        if x.on_host
    ]
    alternate = 2 if len(sizes) == 1 or len({*sizes}) > 1 else 1
    # A codec converts, and so do remainders, which have fewer bits than the moments.
    converted = any(x.codec for x in moments) or len({x.itemsize for x in moments}) > 1
    share = functools.partial(_shared, shape, moments, like_leaves)
    at_least = lambda leaf_count: -(-like_leaves // max(1, like_leaves // leaf_count))
    at_most = lambda leaf_count: -(-like_leaves // -(-like_leaves // leaf_count))
    on_tpu = share(page_size, in_tiles, at_least(alternate))
    if in_blocks:
        minimum = at_most(_CODED_LEAVES)
        smallest = min(page_size, _CODED_PAGES // max(2, len(moments)))
        largest = page_size if on_host else _DEVICE_FACTOR * page_size
        larger = max(smallest, min(largest, spare_bytes))
        in_spare = functools.partial(rows, spare_bytes=spare_bytes)
        on_gpu, page_size = share(larger, in_spare, minimum), smallest
    else:
        # Serial pages need no other leaf.
        minimum, maximum = at_least(alternate if GPU_FETCHES_AHEAD else 1), page_size
        leaf_bytes = math.prod(shape) * max([x.itemsize for x in moments])
        in_pages = leaf_bytes >= 2 * LEAST_PAGE and GPU_HAS_STREAMS_BY_DIRECTION
        if by_latency and in_pages and not converted:
            few = at_most(
                max(1, min(_FEW_LEAVES, math.isqrt(_FEW_BYTES // leaf_bytes)))
            )
            minimum = max(minimum, few)
            if minimum > 1:
                maximum = min(page_size, minimum * -(-leaf_bytes // FEWEST))
        on_gpu = share(maximum, rows, minimum)
    # XLA may compute leaves that are not isolated at once: they are small, or there is
    # memory.
    little = in_blocks and on_gpu.count == 1 and 4 * math.prod(shape) <= _UNISOLATED
    if not on_host and (little or (spare_bytes and not isolate)):
        on_gpu = dataclasses.replace(on_gpu, isolated=False)
    full = page_size >= (_WHOLE_ON_CPU_IF_CONVERTED if converted else _WHOLE_ON_CPU)
    one_page = full and not in_blocks and not on_gpu.refused
    on_cpu = single(shape) if one_page else rows(shape, moments, page_size)
    return Geometry(on_gpu, on_tpu, on_cpu)


def _shared(
    shape: Shape,
    moments: tuple[MomentFormat, ...],
    like_leaves: int,
    page_size: int,
    in_pages: Callable[[Shape, tuple[MomentFormat, ...], int], Pages],
    minimum: int,
) -> Pages:
    """Cuts leaves of which `minimum` share pages, or more if they are small."""
    unshared = in_pages(shape, moments, page_size)
    itemsize = max([x.itemsize for x in moments])
    leaf_bytes = math.prod(shape) * itemsize
    if like_leaves == 1 or not shape or not 0 < leaf_bytes <= _LARGEST_LEAF:
        return unshared
    page_size = min(page_size, _SHARED_PAGE)
    pages = in_pages(shape, moments, max(1, page_size // minimum))
    page_bytes = pages.entries * itemsize
    maximum = 1
    if pages.count == 1:
        maximum = min(_MOST_LEAVES, min(page_size, _SMALL_PAGE) // page_bytes)
    # The leaves of the largest of several even groups.
    leaf_count = -(-like_leaves // -(-like_leaves // max(minimum, maximum)))
    too_large = page_bytes * leaf_count > 2 * page_size
    joins = all(_joins(x, pages, leaf_count) for x in moments)
    if leaf_count == 1 or too_large or not joins:
        return unshared
    return dataclasses.replace(pages, leaf_count=leaf_count)


def sharing(pages: Pages, like_leaves: int) -> list[slice]:
    """Returns the groups of leaves that share pages."""
    return [
        slice(i, i + pages.leaf_count) for i in range(0, like_leaves, pages.leaf_count)
    ]


def _joins(moment: MomentFormat, pages: Pages, leaf_count: int) -> bool:
    """Returns whether joined pages of several leaves are stored as each page is."""
    codec = moment.codec
    if codec is None or pages.refused:
        return not pages.refused
    along = axis_of_blocks(codec)
    unit = smallest_unit(moment, pages.leaf, pages.view, pages.axis)
    # A codec drops axes of one entry, and renumbers the others.
    blocks = moment.block if along is not None and 1 in pages.view else 1
    unit = math.lcm(unit, blocks, *values_per_entry(codec, pages.leaf))
    # Scales of several ranges of the flattened leaf would be in another order.
    in_order = along is not None or moment.block == 1 or not pages.axis
    # Else the next leaf would begin within the page's last word or block.
    whole = all(size % unit == 0 for size in pages.sizes)
    stored = lambda size, n: jax.tree.leaves(codec.stored(pages.page(size, n)))
    return (in_order and whole and not codec.draws) and all(
        joined_along(one, many, leaf_count) is not None
        for size in pages.sizes
        for one, many in zip(stored(size, 1), stored(size, leaf_count), strict=True)
    )
