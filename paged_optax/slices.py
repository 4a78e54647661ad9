"""How the arrays of one leaf lie in its pages.

A moment is an array of the leaf's shape, or what a codec stores in its place: codes, of
which several may share a word, and a scale a block. Each array has a view, whose axes
are those of the leaf's own view; entries along an axis stand for as many of the leaf's,
or for more.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Int

from paged_optax import tiling
from paged_optax.codecs import (
    Codec,
    Noise,
    Quantized,
    axis_of_blocks,
    packed_along,
)
from paged_optax.geometry import Pages
from paged_optax.memory import DEVICE, HOST

#: An array, or what a codec stores in its place.
Stored = Array | Quantized[Array]

# XLA:GPU before openxla/xla#46308 ignores what is computed of a loop's variable.
_NEEDS_RAW_INDEX = jax.__version_info__ < (0, 11, 2)

# Scales of at most this part of a page travel whole, before the first page and after
# the last: a transfer of a few kilobytes costs its latency.
_SMALL_PART = 16

_Index = Int[Array, ""] | np.int32


class At(NamedTuple):
    """Where a page is.

    Attributes:
      start: Its first entry along the axis that is cut.
      size: Its entries along that axis.
      unit: The number of its first unit along the axis: a loop's own variable.
    """

    start: _Index
    size: int
    unit: _Index = np.int32(0)

    def starts(self, pages: Pages) -> tuple[_Index, ...]:
        """Its first entry along every axis of the leaf's view."""
        found: list[_Index] = [np.int32(0)] * len(pages.view)
        if pages.count > 1:
            found[pages.axis] = self.start
        return tuple(found)


class Held(NamedTuple):
    """What is held of a leaf or a page: codes and scales, or an array without scales.

    Attributes:
      codes: The codes, or the array itself.
      scales: One a block of a `Quantized`; None where there are no blocks.
    """

    codes: Array
    scales: Array | None


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a leaf, seen page by page.

    Attributes:
      pages: How the leaf is cut.
      shape: The array's own shape.
      dtype: Its dtype.
      on_host: Whether it lives in host memory.
      view: The shape under which pages are cut from it; None: each has all of it.
      ratios: For each axis of the view, entries of the array and how many of the leaf's
        they stand for.
      travels: Whether its pages come from host memory.
    """

    pages: Pages
    shape: tuple[int, ...]
    dtype: Any
    on_host: bool
    view: tuple[int, ...] | None
    ratios: tuple[tuple[int, int], ...]
    travels: bool

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def merged(self) -> int:
        """Entries that are one in `opened`, whose index is a loop's own variable."""
        if self.view is None or not self._counted or self.pages.axis:
            return 1
        unit = _unit(self.pages, self.ratios)
        return unit if self.view[0] % unit == 0 else 1

    @property
    def _counted(self) -> bool:
        """Whether its pages are found by a loop's own variable, where they can be."""
        return self.travels and not self.pages.tiled

    @property
    def opened(self) -> tuple[int, ...]:
        """The shape that a loop holds."""
        if self.view is None or (self.on_host and not self.travels):
            return self.shape
        if self.merged == 1:
            return self.view
        first, *rest = self.view
        return (first // self.merged, self.merged, *rest)

    def ahead(self, x: Array) -> Array:
        """Brings what does not travel in pages to the device."""
        if self.on_host and not self.travels:
            x = jax.device_put(x, DEVICE)
            return x if self.view is None else x.reshape(self.view)
        return x

    def back(self, x: Array) -> Array:
        """Undoes `ahead`."""
        if self.on_host and not self.travels:
            return jax.device_put(x.reshape(self.shape), HOST)
        return x

    def read(self, x: Array, at: At) -> Array:
        """A page of it, in device memory."""
        if self.view is not None:
            starts, sizes = self._of(at)
            page = lax.dynamic_slice(x, starts, sizes)
            if self.travels:
                page = jax.device_put(page, DEVICE)
            if self.merged > 1:
                page = page.reshape(-1, *page.shape[2:])
            return self._laid_out(page)
        return self._laid_out(jax.device_put(x, DEVICE) if self.travels else x)

    def write(self, x: Array, page: Array, at: At) -> Array:
        """The array with a page of it replaced."""
        page = self._laid_out(page)
        if self.view is None:
            return jax.device_put(page, HOST) if self.travels else page
        starts, sizes = self._of(at)
        page = page.reshape(sizes)
        for done, size in self._pieces(sizes):
            axis = self.pages.axis
            piece = page
            if size < page.shape[axis]:
                piece = lax.slice_in_dim(page, done, done + size, axis=axis)
            piece = jax.device_put(piece, HOST) if self.travels else piece
            here = [
                n + np.int32(done) if i == axis else n for i, n in enumerate(starts)
            ]
            x = lax.dynamic_update_slice(x, piece, here)
        return x

    def _of(self, at: At) -> tuple[list[_Index], list[int]]:
        """The starts and sizes of a page in `opened`."""
        assert self.view is not None
        starts: list[_Index] = []
        sizes: list[int] = []
        whole = self.pages.page(at.size)
        entries = at.starts(self.pages)
        for axis, (number, of) in enumerate(self.ratios):
            start = entries[axis]
            if whole[axis] == self.pages.view[axis]:
                starts.append(np.int32(0))
                sizes.append(self.view[axis])
                continue
            starts.append(start if number == of else _scaled(start, number, of))
            sizes.append(-(-whole[axis] * number // of))
        if self._counted and self.merged == _unit(self.pages, self.ratios):
            starts[self.pages.axis] = at.unit
            if self.merged > 1:
                starts.insert(1, np.int32(0))
                sizes[:1] = sizes[0] // self.merged, self.merged
        return starts, sizes

    def _pieces(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Where along the axis what is written of a page begins, and how much it is."""
        axis = self.pages.axis
        size = sizes[axis]
        pieces = [size]
        if self.travels and self.pages.tiled:
            if tiling.role(self._order, axis) == "sublanes":
                pieces = tiling.sublane_sizes(size)
        done = [sum(pieces[:i]) for i in range(len(pieces))]
        return list(zip(done, pieces, strict=True))

    def _laid_out(self, page: Array) -> Array:
        """A page in the layout of its array.

        Else XLA:TPU takes the layout that suits the page's neighbours for the whole
        array, and copies it (libtpu 0.0.52: for eight bits of (4096, 4096) in host
        memory, and 529 MiB of scratch for those of two leaves of (4096, 11008)).
        """
        if not self.pages.tiled or page.ndim < 2:
            return page
        return with_layout_constraint(page, Layout(self._order[::-1]))

    @property
    def _order(self) -> tuple[int, ...]:
        """The layout of what pages are cut from, on a TPU."""
        itemsize = jnp.dtype(self.dtype).itemsize
        view = self.shape if self.view is None else self.view
        order = tiling.viewed(self.shape, len(view), itemsize)
        return tiling.minor_to_major(view, itemsize) if order is None else order


@dataclasses.dataclass(frozen=True)
class Streamed:
    """One argument of a leaf's program, or what a codec stores of it.

    Attributes:
      codec: What stores it, or None.
      codes: Its codes, or the array itself.
      scales: Its scales, or None.
    """

    codec: Codec | None
    codes: Part
    scales: Part | None

    @classmethod
    def of(cls, x: Any, pages: Pages, codec: Codec | None, on_host: bool) -> "Streamed":
        """Describes an array, or the shapes and dtypes of one.

        Args:
          x: The array, or what a codec stores.
          pages: How the leaf is cut.
          codec: What stores it, or None.
          on_host: Whether it lives in host memory.
        """
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        cut = pages.count > 1 and (codec is not None or codes.shape == pages.leaf)
        ratios = _ratios_of_codes(codec, codes.shape, pages)
        view = _viewed(pages.view, ratios) if cut else None
        part = functools.partial(Part, pages)
        travels = on_host and (
            view is None or pages.tiled or _is_raw(pages, view, ratios)
        )
        first = part(codes.shape, codes.dtype, on_host, view, ratios, travels)
        if scales is None:
            return cls(codec, first, None)
        assert codec is not None
        ratios = _ratios_of_scales(codec, pages)
        view = _viewed(pages.view, ratios) if cut else None
        travels = on_host and (
            view is None or _scales_travel(scales.shape, view, ratios, pages)
        )
        return cls(
            codec,
            first,
            part(scales.shape, scales.dtype, on_host, view, ratios, travels),
        )

    @property
    def travels(self) -> bool:
        """Whether its pages come from host memory."""
        return self.codes.travels

    def view(self, x: Stored) -> Held:
        """What a loop holds of what was given."""
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        codes = codes.reshape(self.codes.opened)
        if self.scales is None or scales is None:
            return Held(codes, None)
        return Held(codes, scales.reshape(self.scales.opened))

    def blank(self) -> Held:
        """Memory to fill, in the shapes that a loop holds; see `staged`.

        `lax.empty` moved to the host allocates there and nowhere else. XLA:GPU of jax
        0.10.2 refuses to reshape it there ("Bitcast cannot have different memory
        spaces"), so that it is made in the shape that is cut.
        """

        def make(part: Part) -> Array:
            made = lax.empty(part.opened, part.dtype)
            return jax.device_put(made, HOST) if part.on_host else made

        return Held(
            make(self.codes), None if self.scales is None else make(self.scales)
        )

    def staged(self) -> "Streamed":
        """The same, with what does not travel in pages on the device until the end."""

        def stay(part: Part) -> Part:
            return part if part.travels else dataclasses.replace(part, on_host=False)

        scales = None if self.scales is None else stay(self.scales)
        return Streamed(self.codec, stay(self.codes), scales)

    def restore(self, x: Held) -> Stored:
        """What was given, back in its own shape."""
        codes = x.codes.reshape(self.codes.shape)
        if self.scales is None or x.scales is None:
            return codes
        return Quantized(codes, x.scales.reshape(self.scales.shape))

    def ahead(self, x: Held) -> Held:
        """Brings what does not travel in pages to the device."""
        return self._each(Part.ahead, x)

    def back(self, x: Held) -> Held:
        """Undoes `ahead`."""
        return self._each(Part.back, x)

    def read(self, x: Held, at: At) -> Held:
        """A page as it is stored, in device memory."""
        return self._each(Part.read, x, at)

    def write(self, x: Held, page: Held, at: At) -> Held:
        """What is held with a page of it replaced."""
        codes = self.codes.write(x.codes, page.codes, at)
        if self.scales is None or x.scales is None or page.scales is None:
            return Held(codes, None)
        return Held(codes, self.scales.write(x.scales, page.scales, at))

    def decode(self, page: Held, shape: tuple[int, ...]) -> Array:
        """What the program sees of a page."""
        if self.codec is None:
            return page.codes
        stored = page.codes if page.scales is None else Quantized(*page)
        return self.codec.decode(self._like_stored(stored, shape), shape)

    def encode(self, page: Array, noise: Noise | None) -> Held:
        """What is stored of a result."""
        if self.codec is None:
            return Held(page, None)
        stored = self.codec.encode(page, noise)
        codes, scales = stored if isinstance(stored, Quantized) else (stored, None)
        return Held(codes, scales)

    def _like_stored(self, stored: Any, shape: tuple[int, ...]) -> Any:
        assert self.codec is not None
        wanted = self.codec.stored(shape)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), stored, wanted)

    def _each(self, method: Any, x: Held, *arguments: Any) -> Held:
        codes = method(self.codes, x.codes, *arguments)
        if self.scales is None or x.scales is None:
            return Held(codes, None)
        return Held(codes, method(self.scales, x.scales, *arguments))


def _unit(pages: Pages, ratios: Sequence[tuple[int, int]]) -> int:
    """Entries of an array that a loop's own variable counts as one."""
    number, of = ratios[pages.axis]
    return pages.unit * number // of


def _scaled(start: _Index, number: int, of: int) -> _Index:
    """`start * number / of`, which is a whole number."""
    # Start is a multiple of `of`, and a product first might not fit 32 bits.
    return lax.div(start, np.int32(of)) * number


def _viewed(
    view: tuple[int, ...], ratios: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The shape of an array that has `number` entries for `of` of a leaf's view."""
    cut = view[: len(ratios)]
    return tuple(-(-n * x // of) for n, (x, of) in zip(cut, ratios, strict=True))


def _ratios_of_codes(
    codec: Codec | None, shape: tuple[int, ...], pages: Pages
) -> tuple[tuple[int, int], ...]:
    ratios = [(1, 1)] * len(pages.view)
    packed = {axis: packed_along(codec, axis) for axis in (-1, -2)}
    if max(packed.values()) > 1:
        for axis in range(-len(ratios), 0)[-2:]:
            ratios[axis] = 1, packed[axis]
    elif ratios and math.prod(shape) < math.prod(pages.leaf):
        ratios[-1] = 1, 2  # pairs of four bits
    return tuple(ratios)


def _ratios_of_scales(codec: Codec, pages: Pages) -> tuple[tuple[int, int], ...]:
    """Scales have the axes before the last that is cut, and blocks of what is left."""
    view, along = pages.view, axis_of_blocks(codec)
    if along is not None:
        ratios = [(1, 1)] * len(view)
        ratios[along] = 1, codec.block
        return tuple(ratios)
    after = math.prod(view[pages.axis + 1 :])
    common = math.gcd(after, codec.block)
    return (*[(1, 1)] * pages.axis, (after // common, codec.block // common))


def _is_raw(
    pages: Pages, view: Sequence[int], ratios: Sequence[tuple[int, int]]
) -> bool:
    """Whether pages are found by a loop's own variable, where XLA:GPU needs that."""
    if pages.axis or not _NEEDS_RAW_INDEX:
        return True  # strips are transferred by kernels, which compute their addresses
    return view[0] % _unit(pages, ratios) == 0


def _scales_travel(
    shape: tuple[int, ...],
    view: tuple[int, ...],
    ratios: Sequence[tuple[int, int]],
    pages: Pages,
) -> bool:
    """Whether scales are so many that they go in pages, and lie so that they can."""
    if math.prod(shape) * _SMALL_PART <= pages.entries:
        return False
    if not pages.tiled:
        return _is_raw(pages, view, ratios)
    number, of = ratios[pages.axis]
    order = tiling.viewed(shape, len(view))
    return order is not None and tiling.can_slice(
        view, order, pages.axis, pages.size * number // of, 4
    )
