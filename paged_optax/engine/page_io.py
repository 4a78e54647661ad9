"""A page of one array: how it is read, and how it is written back."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_optax.backend import tiling
from paged_optax.engine.pages import Index, PageAddress, Pages
from paged_optax.engine.transfers import in_layout, to_device, to_host


@dataclasses.dataclass(frozen=True)
class PagedBuffer:
    """One array of a leaf, seen page by page.

    Attributes:
      pages: How the leaf is cut.
      shape: The array's own shape.
      dtype: Its dtype.
      on_host: Whether it lives in host memory.
      view: The shape that pages are cut from. None: every page needs the whole array.
      ratios: For each axis of the view a pair (a, b): a entries of the array stand for
        b of the leaf. Empty if every page needs the whole array.
      streamed: Whether its pages come from host memory.
      unit_view: The view whose first index is the loop's own variable, if its pages
        come from host memory and there is such a view; else None. See `by_unit`.
      stacked_leaves: Of how many leaves it holds an array, on a new axis; 0: of one.
    """

    pages: Pages
    shape: tuple[int, ...]
    dtype: Any  # The dtype of a JAX key is no np.dtype, and has no public type.
    on_host: bool
    view: tuple[int, ...] | None
    ratios: tuple[tuple[int, int], ...]
    streamed: bool
    unit_view: tuple[int, ...] | None = None
    stacked_leaves: int = 0

    @property
    def opened(self) -> tuple[int, ...]:
        """The shape that a loop holds."""
        if self.view is None or self.preloaded:
            return self.shape
        return self.unit_view or self.view

    @property
    def preloaded(self) -> bool:
        """Whether all of it travels, before the first page and after the last."""
        return self.on_host and not self.streamed

    @property
    def block(self) -> int:
        """Entries of the leaf, along the axis that is cut, that share codes or scales.

        So many and their multiples can be moved by themselves.
        """
        if self.view is None:
            return 1
        number, of = self.ratios[self.pages.axis]
        return of // math.gcd(number, of)

    def preload(self, x: Array) -> Array:
        """Brings what does not travel in pages to the device."""
        if self.preloaded:
            x = to_device(x, True)
            return x if self.view is None else x.reshape(self.view)
        return x

    def unload(self, x: Array) -> Array:
        """Undoes `preload`."""
        if self.preloaded:
            return to_host(x.reshape(self.shape), True)
        return x

    def read(self, x: Array, at: PageAddress) -> Array:
        """A page of it, in device memory."""
        if self.view is not None:
            page = lax.dynamic_slice(
                x, *self.slice_of(at), allow_negative_indices=False
            )
            page = to_device(page, self.streamed)
            if self.unit_view:
                page = page.reshape(-1, *self.view[1:])
            return self._in_layout(page)
        return self._in_layout(to_device(x, self.streamed))

    def write(self, x: Array, page: Array, at: PageAddress) -> Array:
        """The array with a page of it replaced."""
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

    def slice_of(self, at: PageAddress) -> tuple[list[Index], list[int]]:
        """The starts and sizes of a page in `opened`."""
        assert self.view is not None
        starts: list[Index] = []
        sizes: list[int] = []
        page_shape = self.pages.page(at.size)
        entries = at.starts(self.pages)
        for axis, (number, of) in enumerate(self.ratios):
            start = entries[axis]
            if page_shape[axis] == self.pages.view[axis]:
                starts.append(np.int32(0))
                sizes.append(self.view[axis])
                continue
            starts.append(start if number == of else _scaled(start, number, of))
            sizes.append(-(-page_shape[axis] * number // of))
        if self.unit_view:
            _, *rest = self.unit_view
            values = math.prod(sizes)
            starts = [at.first_unit, *[np.int32(0)] * len(rest)]
            sizes = [values // math.prod(rest), *rest]
            return starts, sizes
        number, of = self.ratios[self.pages.axis]
        if self.streamed and self.pages.unit * number == of:
            starts[self.pages.axis] = at.first_unit
        if self.stacked_leaves:
            return [np.int32(0), *starts], [self.stacked_leaves, *sizes]
        return starts, sizes

    def _in_layout(self, page: Array) -> Array:
        """A page in the layout of its array; see `in_layout`.

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


def by_unit(
    pages: Pages, view: Sequence[int], ratios: Sequence[tuple[int, int]]
) -> tuple[int, ...] | None:
    """The shape in which one entry of an array's first axis is one unit of a loop.

    Several entries of the view are joined to one, or one is parted into several: if
    four rows share their codes, each row gets a quarter of them.

    Args:
      pages: How the leaf is cut, along its first axis.
      view: The array's view.
      ratios: See `PagedBuffer`.

    Returns:
      The shape; None if there is no such one.
    """
    (number, of), (first, *rest) = ratios[0], view
    if pages.unit * number % of == 0:
        together = pages.unit * number // of
        if first % together:
            return None
        joined = (first // together, together) if together > 1 else (first,)
        return (*joined, *rest)
    parts, left = divmod(of, pages.unit * number)
    if left or math.prod(rest) % parts:
        return None
    return (first * parts, math.prod(rest) // parts)


def _scaled(start: Index, number: int, of: int) -> Index:
    """`start * number / of`, which is a whole number."""
    # Start is a multiple of `of`, and a product first might not fit 32 bits.
    return lax.div(start, np.int32(of)) * number
