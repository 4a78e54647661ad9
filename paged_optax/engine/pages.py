"""Pages of a leaf, and their addresses.

Page sizes (`paged_optax.engine.sharing.cut`) do not depend on the card: pages are cut
during tracing, and the program may be compiled for another card.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Int

from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.backend.types import ArrayOrShape, Shape
from paged_optax.codecs import Codec

#: Slices start at entries counted in 32 bits.
MOST_INDEX = 2**31
TOO_LONG = (
    "slices start at entries counted in 32 bits, and its longest axis has more: make it"
    " a matrix of shorter axes"
)

#: Default of `page_size`: chosen for each leaf.
DEFAULT_PAGE_SIZE = "auto"

#: Bytes of a page, or of a part of a page, that a TPU computes a codec on.
#
# XLA:TPU computes a page of this size in its vector memory. Pages of 16 MiB take 92 MiB
# of scratch, for (50257, 768) in eight bits. A larger page also takes longer to
# compile: (32128, 1024) takes 15 s in pages of 2 MiB, and 6 s in pages of 1 MiB (libtpu
# 0.0.52).
CODEC_PAGE = 2**20

#: For each axis (a, b): a entries of an array for b of its leaf.
Ratios = tuple[tuple[int, int], ...]

#: A number known when traced, or a loop's variable.
Index = Int[Array, ""] | np.int32


class MomentFormat(NamedTuple):
    """Storage of one moment of a leaf."""

    itemsize: int  # bytes of a value as the transformation sees it
    codec: Codec | None = None
    on_host: bool = True

    @property
    def block(self) -> int:
        """Values that share a scale."""
        return 1 if self.codec is None else self.codec.block


class Page(NamedTuple):
    """Address of one page, or of equal pages that a loop visits."""

    start: Index  # first entry of the (first) page along the axis that is cut
    size: int  # entries of a page along that axis
    first_unit: Index = np.int32(0)  # first unit of the (first) page: a loop's variable
    stop: int = 1  # end of the loop's variable, which starts at 0
    step: int = 1  # its increment; equal to `stop` for a single page

    @property
    def single(self) -> bool:
        """True if it is one page, which needs no loop."""
        return self.stop == self.step


@dataclasses.dataclass(frozen=True)
class Pages:
    """Cut of one leaf into pages.

    The leaf is viewed under the shape `view` and sliced along `axis`, `size` entries a
    page. The remainder is a last, smaller page.
    """

    leaf: Shape  # the leaf's shape
    view: Shape  # a shape of the same values in the same order, free of cost
    axis: int
    size: int
    # Pages, smaller last ones included. 0: leaves of several shapes are updated in one
    # program, and travel whole.
    count: int
    unit: int = 1  # entries that a loop's variable counts as one; pages are multiples
    tiled: bool = False  # arrays lie in a TPU's tiles
    isolated: bool = True  # XLA must compute it separately, see `engine.exchange`
    leaf_count: int = 1  # leaves that share pages; the last group may have fewer
    refused: str = ""  # reason why a leaf larger than a page cannot be cut

    @property
    def entries(self) -> int:
        """Values of one full page."""
        return math.prod(self.page(self.size))

    @property
    def axis_size(self) -> int:
        """Entries along the axis that is cut."""
        return self.view[self.axis] if self.view else 1

    @property
    def sizes(self) -> set[int]:
        """Sizes of the full pages and of the last page."""
        return {self.size, self.axis_size % self.size or self.size}

    def page(self, size: int, leaf_count: int = 1) -> Shape:
        """Returns the shape of `size` entries of each of `leaf_count` leaves."""
        if not self.count or not self.view:
            return self.view
        return (*self.view[: self.axis], size * leaf_count, *self.view[self.axis + 1 :])

    @functools.cached_property
    def ranges(self) -> list[Page]:
        """The full pages, and the smaller last one."""
        if self.count <= 1:
            return [Page(np.int32(0), self.axis_size)]
        full, left = divmod(self.axis_size, self.size)
        step = self.size // self.unit
        main = Page(np.int32(0), self.size, stop=full * step, step=step)
        ranges = [main] if full else []
        if left:
            start = full * self.size
            ranges.append(Page(np.int32(start), left, np.int32(start // self.unit)))
        return ranges

    def at(self, equal: Page, index: Index, pieces: int = 1) -> Page:
        """Returns the page at a value of the variable of a loop over equal pages."""
        if equal.start:  # the last page
            return equal
        # XLA:GPU follows only addresses that are linear in the loop's variable.
        start = index if self.unit == 1 else index * np.int32(self.unit)
        return Page(start, equal.size // pieces, index)

    def starts(self, page: Page) -> tuple[Index, ...]:
        """Returns a page's first entry along every axis of `view`."""
        starts: list[Index] = [np.int32(0)] * len(self.view)
        if self.count > 1:
            starts[self.axis] = page.start
        return tuple(starts)

    def bidirectional(self, travelling: int) -> bool:
        """Returns whether one page is read while another is written.

        `travelling` counts the moments on the host of all leaves that share pages.
        """
        if travelling < 2 or self.count < 2:
            return False
        if self.tiled:
            return True
        # XLA:GPU unrolls a loop of a single turn, and transfers without a loop differ.
        # Strips are transferred by kernels, which wait for each other.
        looped = self.axis_size // self.size > 2 and not self.axis
        return looped and GPU_FETCHES_AHEAD


def single(shape: Shape, *, tiled: bool = False) -> Pages:
    """Returns a leaf that is one page."""
    axis_size = shape[0] if shape else 1
    return Pages(shape, shape, 0, axis_size, 1, tiled=tiled and len(shape) > 1)


def joined_along(one: ArrayOrShape, many: ArrayOrShape, leaf_count: int) -> int | None:
    """Returns the axis along which arrays like `one` join to `many`, or None."""
    if leaf_count == 1 or len(one.shape) != len(many.shape):
        return None
    axes = [i for i, n in enumerate(one.shape) if n != many.shape[i]]
    if len(axes) != 1 or many.shape[axes[0]] != leaf_count * one.shape[axes[0]]:
        return None
    return axes[0]
