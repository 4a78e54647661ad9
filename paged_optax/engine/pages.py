"""What pages are: the parts of one leaf, and the address of each."""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Int

from paged_optax.backend.platforms import GPU_FETCHES_AHEAD
from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec

#: Slices start at entries counted in 32 bits.
MOST_INDEX = 2**31
TOO_LONG = (
    "slices start at entries counted in 32 bits, and its longest axis has more: make it"
    " a matrix of shorter axes"
)


#: A number known when traced, or a loop's variable.
Index = Int[Array, ""] | np.int32


class MomentFormat(NamedTuple):
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
      count: How many pages there are, smaller last ones included. 0: leaves of several
        shapes are updated together, and travel whole.
      unit: Entries along `axis` that a loop's own variable counts as one. A page is a
        multiple of them.
      tiled: Whether arrays lie in a TPU's tiles.
      isolated: Whether XLA must compute it apart from other leaves, see
        `paged_optax.engine.transfer_order`.
      leaf_count: How many like leaves share pages. The last group may have fewer.
      refused: Why the leaf cannot be cut although it is larger than a page; else empty.
    """

    leaf: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    size: int
    count: int
    unit: int = 1
    tiled: bool = False
    isolated: bool = True
    leaf_count: int = 1
    refused: str = ""

    @property
    def entries(self) -> int:
        """Values of one full page."""
        return math.prod(self.page(self.size)) if self.view else 1

    @property
    def extent(self) -> int:
        """Entries along the axis that is cut."""
        return self.view[self.axis] if self.view else 1

    def page(self, size: int, leaf_count: int = 1) -> tuple[int, ...]:
        """The shape of a page of `size` entries of each of some leaves."""
        if not self.count or not self.view:
            return self.view
        return (*self.view[: self.axis], size * leaf_count, *self.view[self.axis + 1 :])

    @functools.cached_property
    def ranges(self) -> "list[PageRange]":
        """The full pages, and the smaller last one."""
        if self.count <= 1:
            return [PageRange(self, 0, self.extent, 1, 1)]
        full, left = divmod(self.extent, self.size)
        step = self.size // self.unit
        ranges = [PageRange(self, 0, self.size, full * step, step)] if full else []
        if left:
            ranges.append(PageRange(self, full * self.size, left, 1, 1))
        return ranges

    def both_ways(self, travelling: int) -> bool:
        """Whether one page is read while another is written.

        Args:
          travelling: How many moments live on the host, of all leaves that share pages.
        """
        if travelling < 2 or self.count < 2:
            return False
        if self.tiled:
            return True
        # XLA:GPU unrolls a loop of a single turn, and transfers without a loop differ.
        # Strips are transferred by kernels, which wait for each other.
        looped = self.extent // self.size > 2 and not self.axis
        return looped and GPU_FETCHES_AHEAD


class PageAddress(NamedTuple):
    """Where a page is.

    Attributes:
      start: Its first entry along the axis that is cut.
      size: Its entries along that axis.
      first_unit: The number of its first unit along the axis: a loop's own variable.
    """

    start: Index
    size: int
    first_unit: Index = np.int32(0)

    def starts(self, pages: Pages) -> tuple[Index, ...]:
        """Its first entry along every axis of the leaf's view."""
        starts: list[Index] = [np.int32(0)] * len(pages.view)
        if pages.count > 1:
            starts[pages.axis] = self.start
        return tuple(starts)


@dataclasses.dataclass(frozen=True)
class PageRange:
    """Pages of one size, one after the other: all full ones, or the smaller last one.

    Attributes:
      pages: How the leaf is cut.
      start: The first entry of the first page.
      size: Entries of each.
      stop: Where a loop's variable ends; it begins at 0.
      step: By how much it grows; 1 in a range of a single page that is not full.
    """

    pages: Pages
    start: int
    size: int
    stop: int
    step: int

    @property
    def single(self) -> bool:
        """Whether it is one page, which needs no loop."""
        return self.stop == self.step

    def at(self, number: Index, pieces: int = 1) -> PageAddress:
        """The page of a value of the loop's variable, or one of its pieces."""
        unit = self.pages.unit
        if self.start:
            return PageAddress(
                np.int32(self.start), self.size, np.int32(self.start // unit)
            )
        # XLA:GPU follows what is linear in the loop's variable.
        start = number if unit == 1 else number * np.int32(unit)
        return PageAddress(start, self.size // pieces, number)


def single(shape: tuple[int, ...], *, tiled: bool = False) -> Pages:
    """A leaf that is one page."""
    extent = shape[0] if shape else 1
    return Pages(shape, shape, 0, extent, 1, tiled=tiled and len(shape) > 1)


def block_of(moment: MomentFormat) -> int:
    """Values of a moment that share a scale."""
    return 1 if moment.codec is None else moment.codec.block


def joined_along(one: ArrayOrShape, many: ArrayOrShape, leaf_count: int) -> int | None:
    """The axis along which some arrays like `one` join to one like `many`, or None."""
    if leaf_count == 1 or len(one.shape) != len(many.shape):
        return None
    axes = [i for i, n in enumerate(one.shape) if n != many.shape[i]]
    if len(axes) != 1 or many.shape[axes[0]] != leaf_count * one.shape[axes[0]]:
        return None
    return axes[0]
