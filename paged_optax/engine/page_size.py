"""How large a page is.

A user says how large a page may be. A page is smaller where a leaf is small, where
several leaves share it, and where a codec makes temporary arrays of it. On a GPU a page
of a codec of blocks is larger where a layerwise step has memory to spare
(`paged_optax.layerwise.layer_optimizer`). `paged_optax.engine.geometry.cut` applies
these rules, and divides a page among the leaves that share it. In which shapes a page
comes is in `paged_optax.engine.page_shapes`.

One size is for every card of a kind of backend, because pages are cut when an update is
traced, and it may be compiled for another card. A card's own size is the argument
`page_size` of `paged_optax.paged`. What a size depends on is an argument of `cut`,
whose results are cached; `PagedTransformation.geometry` in `paged_optax.transform`
calls it.
"""

from paged_optax.engine.pages import MomentFormat

#: Bytes of a page if a user asks for no other: long transfers, and little scratch.
DEFAULT_PAGE_SIZE = "16MiB"

# A leaf of n pages takes (n + 1) / n of the link's time (`paged_optax.engine.loop`). So
# it has this many, unless they would be so small that latency counts.
_PAGES = 16
_LEAST_PAGE = 2**20

#: Bytes of a page that several leaves share, and of one that small leaves share.
SHARED_PAGE = 8 * 2**20
SMALL_PAGE = 4 * 2**20

# Bytes of the pages of a leaf's moments, together, if a codec stores them in blocks:
# XLA:GPU keeps several times as much of them in memory.
_CODED_PAGES = 16 * 2**20

# A page costs XLA:GPU about ten kernels, however large it is. Beside layers' weights
# that are on the device a larger one is little: see
# `paged_optax.layerwise.layer_optimizer`. If nothing of it travels, it may have so many
# times the size that was asked for.
_LARGER_ON_DEVICE = 16

#: Bytes of a page, or of a part of one, that a TPU computes a codec on.
#
# XLA:TPU computes a page of this size in its vector memory. Pages of 16 MiB take 92 MiB
# of scratch, for (50257, 768) in eight bits. A larger page also takes longer to
# compile: (32128, 1024) takes 15 s in pages of 2 MiB, and 6 s in pages of 1 MiB (libtpu
# 0.0.52).
CODEC_PAGE = 2**20

# On a CPU nothing travels, and XLA runs a loop over pages in one thread: on two cores
# AdamW takes 2.3 times as long (jax 0.10.2 and 0.12.0.1). So a leaf is updated whole,
# unless pages are smaller than this, as in tests. Codecs, and remainders of master
# weights, make temporary arrays as large as what is updated at once: with these only
# pages of the default size are whole leaves. A codec of blocks always has pages.
_WHOLE_ON_CPU = 2**20
_WHOLE_ON_CPU_IF_CONVERTED = 16 * 2**20


def page_size_in(size_of_leaf: int, page_size: int) -> int:
    """The page size that cuts a leaf into as many pages as it should have."""
    count = min(_PAGES, max(1, size_of_leaf // _LEAST_PAGE))
    return min(page_size, -(-size_of_leaf // count))


def page_entries(
    extent: int, unit: int, bytes_each: int, page_size: int
) -> tuple[int, int]:
    """Entries of a page, and how many pages there are."""
    largest = max(unit, page_size // bytes_each // unit * unit)
    fewest = -(-extent // largest)
    for count in range(fewest, 2 * fewest + 1):
        if extent % count == 0 and extent // count % unit == 0:
            return extent // count, count
    size = -(-extent // (fewest * unit)) * unit
    return size, -(-extent // size)


def coded_page_size(
    moments: tuple[MomentFormat, ...], page_size: int, spare_bytes: int
) -> int:
    """Bytes of one moment's page on a GPU, where a codec stores moments in blocks."""
    on_host = any(x.on_host for x in moments)
    least = min(page_size, _CODED_PAGES // max(2, len(moments)))
    most = page_size if on_host else _LARGER_ON_DEVICE * page_size
    return max(least, min(most, spare_bytes))


def whole_on_cpu(page_size: int, *, converted: bool) -> bool:
    """Whether a CPU updates a leaf whole, given the size of a page that is asked for.

    `converted` tells whether temporary arrays as large as what is updated are made.
    """
    return page_size >= (_WHOLE_ON_CPU_IF_CONVERTED if converted else _WHOLE_ON_CPU)
