"""Types that describe how a leaf is cut into pages, and rules that both ways share."""

import dataclasses
import math
from typing import NamedTuple

from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec

#: Slices start at entries counted in 32 bits.
MOST_INDEX = 2**31
TOO_LONG = (
    "slices start at entries counted in 32 bits, and its longest axis has more: make it"
    " a matrix of shorter axes"
)

# A leaf of n pages takes (n + 1) / n of the link's time (`paged_optax.engine.run`). So
# it has this many, unless they would be so small that latency counts.
_PAGES = 16
_LEAST_PAGE = 2**20


class Storage(NamedTuple):
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
      ungated: Whether nothing need keep a leaf apart from all else, see
        `paged_optax.engine.kept_apart`.
      leaves: How many like leaves share pages. The last group may have fewer.
      refused: Why the leaf cannot be cut although it is larger than a page; else empty.
    """

    leaf: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    size: int
    count: int
    unit: int = 1
    tiled: bool = False
    ungated: bool = False
    leaves: int = 1
    refused: str = ""

    @property
    def entries(self) -> int:
        """Values of one full page."""
        return math.prod(self.page(self.size)) if self.view else 1

    @property
    def extent(self) -> int:
        """Entries along the axis that is cut."""
        return self.view[self.axis] if self.view else 1

    def page(self, size: int, leaves: int = 1) -> tuple[int, ...]:
        """The shape of a page of `size` entries of each of some leaves."""
        if not self.count or not self.view:
            return self.view
        return (*self.view[: self.axis], size * leaves, *self.view[self.axis + 1 :])

    def shared(self, leaves: int) -> "Pages":
        """The same pages, shared by so many leaves."""
        return dataclasses.replace(self, leaves=leaves)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How one leaf is cut, on each kind of backend.

    Attributes:
      rows: On a GPU.
      tiles: On a TPU.
      alone: On a CPU. It has no link, and leaves that share pages would only be copied.
    """

    rows: Pages
    tiles: Pages
    alone: Pages

    def on(self, platform: str) -> Pages:
        """The pages on a platform, `"gpu"` or `"tpu"`; for a CPU those of a GPU."""
        return self.tiles if platform == "tpu" else self.rows


def single(shape: tuple[int, ...], *, tiled: bool = False) -> Pages:
    """A leaf that is one page."""
    extent = shape[0] if shape else 1
    return Pages(shape, shape, 0, extent, 1, tiled=tiled and len(shape) > 1)


def many_pages(size_of_leaf: int, page_size: int) -> int:
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


def block_of(storage: Storage) -> int:
    """Values of a moment that share a scale."""
    return 1 if storage.codec is None else storage.codec.block


def joined_along(one: ArrayOrShape, many: ArrayOrShape, leaves: int) -> int | None:
    """The axis along which some arrays like `one` join to one like `many`, or None."""
    if leaves == 1 or len(one.shape) != len(many.shape):
        return None
    axes = [i for i, n in enumerate(one.shape) if n != many.shape[i]]
    if len(axes) != 1 or many.shape[axes[0]] != leaves * one.shape[axes[0]]:
        return None
    return axes[0]
