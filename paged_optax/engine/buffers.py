"""One array of a leaf, read and written page by page.

Each array has a view with the axes of the leaf's view. Several entries of the leaf may
share one entry of the array, as codes that are packed into a word.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray

from paged_optax.backend import tiling
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.types import ArrayOrShape, Shape
from paged_optax.engine.pages import Index, Page, Pages, Ratios
from paged_optax.engine.transfers import in_layout, to_device, to_host

# Scales travel whole, before the first page and after the last, if a page has at least
# this many values for each of them. A transfer of a few kilobytes costs its latency.
_SMALL_PART = 16
# On a GPU they also travel whole if they have at most this many bytes.
_FEW_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class PagedBuffer:
    """One array of a leaf, read and written page by page."""

    pages: Pages
    shape: Shape  # the array's own
    dtype: Any  # The dtype of a JAX key is no np.dtype, and has no public type.
    on_host: bool
    view: Shape | None  # pages are cut from it; None: each needs all of it
    ratios: Ratios  # by axis (a, b): a entries for b of the leaf
    streamed: bool  # its pages come from host memory
    # The view of a streamed array whose first index is the loop's own variable, if
    # there is one; see `_by_unit`.
    unit_view: Shape | None = None
    stacked_leaves: int = 0  # leaves stacked on a new leading axis; 0: none

    @classmethod
    def create(
        cls,
        x: ArrayOrShape | ShapedArray,
        pages: Pages,
        on_host: bool,
        ratios: Ratios,
        *,
        are_scales: bool = False,
    ) -> "PagedBuffer":
        """Describes an array; without ratios every page needs all of it."""
        if not ratios:
            return cls(pages, x.shape, x.dtype, on_host, None, (), on_host)
        cut = zip(ratios, pages.view, strict=False)
        view = tuple([-(-a * size // b) for (a, b), size in cut])
        raw = None if pages.axis or pages.tiled else _by_unit(pages, view, ratios)
        # Kernels transfer strips, and compute their addresses.
        sliceable = bool(pages.tiled or pages.axis or raw) or not GPU_NEEDS_RAW_INDEX
        streamed = on_host and sliceable
        if are_scales:
            streamed &= _scales_sliceable(x.shape, view, ratios, pages)
        unit_view = raw if streamed else None
        return cls(pages, x.shape, x.dtype, on_host, view, ratios, streamed, unit_view)

    @property
    def opened(self) -> Shape:
        """The shape that a loop holds."""
        if self.view is None or self.preloaded:
            return self.shape
        return self.unit_view or self.view

    @property
    def preloaded(self) -> bool:
        """True if all of it travels before the first page and after the last."""
        return self.on_host and not self.streamed

    @property
    def block(self) -> int:
        """Entries of the leaf along the cut axis that share a code word or a scale."""
        if self.view is None:
            return 1
        a, b = self.ratios[self.pages.axis]
        return b // math.gcd(a, b)

    def read(self, x: Array, at: Page) -> Array:
        """Reads a page into device memory."""
        if self.view is None:
            return self._in_layout(to_device(x, self.streamed))
        page = lax.dynamic_slice(x, *self.slice_of(at), allow_negative_indices=False)
        page = to_device(page, self.streamed)
        if self.unit_view:
            page = page.reshape(-1, *self.view[1:])
        return self._in_layout(page)

    def write(self, x: Array, page: Array, at: Page) -> Array:
        """Returns the array with a page replaced."""
        page = self._in_layout(page)
        if self.view is None:
            return to_host(page, self.streamed)
        starts, sizes = self.slice_of(at)
        page = page.reshape(sizes)
        axis = self.pages.axis + (self.stacked_leaves > 0)
        done, pieces = 0, [sizes[axis]]
        on_tiles = self.streamed and self.pages.tiled
        if on_tiles and tiling.role(self._order, axis) == "sublanes":
            # XLA:TPU writes only some numbers of rows to the host.
            pieces = tiling.sublane_sizes(sizes[axis])
        for size in pieces:
            piece = page
            if size < page.shape[axis]:
                piece = lax.slice_in_dim(page, done, done + size, axis=axis)
            piece = to_host(piece, self.streamed)
            first = [
                n + np.int32(done) if i == axis else n for i, n in enumerate(starts)
            ]
            x = lax.dynamic_update_slice(x, piece, first, allow_negative_indices=False)
            done += size
        return x

    def slice_of(self, at: Page) -> tuple[list[Index], list[int]]:
        """Returns the starts and sizes of a page in the shape `opened`."""
        assert self.view is not None
        axis, (a, b) = self.pages.axis, self.ratios[self.pages.axis]
        starts: list[Index] = [np.int32(0)] * len(self.view)
        sizes = list(self.view)
        # The start is a multiple of b; a product first might overflow.
        starts[axis] = at.start if a == b else lax.div(at.start, np.int32(b)) * a
        sizes[axis] = -(-at.size * a // b)
        if self.unit_view:
            _, *rest = self.unit_view
            values = math.prod(sizes)
            starts = [at.first_unit, *[np.int32(0)] * len(rest)]
            return starts, [values // math.prod(rest), *rest]
        if self.streamed and self.pages.unit * a == b:
            starts[axis] = at.first_unit
        if self.stacked_leaves:
            return [np.int32(0), *starts], [self.stacked_leaves, *sizes]
        return starts, sizes

    def _in_layout(self, page: Array) -> Array:
        """Returns a page in the layout of its array; see `in_layout`.

        libtpu 0.0.52 copied eight bits of (4096, 4096) in host memory without it. It
        took 529 MiB of scratch for two leaves of (4096, 11008).
        """
        if not self.pages.tiled or page.ndim < 2:
            return page
        return in_layout(page, self._order)

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """The layout, on a TPU, of the array that pages are cut from."""
        itemsize = jnp.dtype(self.dtype).itemsize
        view = self.shape if self.view is None else self.view
        order = tiling.view_layout(self.shape, len(view), itemsize)
        return tiling.minor_to_major(view, itemsize) if order is None else order


def _by_unit(pages: Pages, view: Sequence[int], ratios: Ratios) -> Shape | None:
    """Returns the shape whose first axis counts units of the loop, or None.

    Entries of the view are joined, or one is split: if four rows share their codes,
    each row gets a quarter of them.
    """
    (a, b), (first, *rest) = ratios[0], view
    if pages.unit * a % b == 0:
        merged = pages.unit * a // b
        if first % merged:
            return None
        leading = (first // merged, merged) if merged > 1 else (first,)
        return (*leading, *rest)
    parts, left = divmod(b, pages.unit * a)
    if left or math.prod(rest) % parts:
        return None
    return (first * parts, math.prod(rest) // parts)


def _scales_sliceable(shape: Shape, view: Shape, ratios: Ratios, pages: Pages) -> bool:
    """Returns whether scales are many enough to travel in pages, and can be sliced."""
    if math.prod(shape) * _SMALL_PART <= pages.entries:
        return False
    if not pages.tiled:
        return 4 * math.prod(shape) > _FEW_BYTES
    a, b = ratios[pages.axis]
    order = tiling.view_layout(shape, len(view))
    return order is not None and tiling.can_slice(
        view, order, pages.axis, pages.size * a // b, 4
    )
