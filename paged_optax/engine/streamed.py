"""How the arrays of one leaf lie in its pages.

A moment is an array of the leaf's shape, or what a codec stores in its place: codes, of
which several may share a word, and a scale a block. Each array has a view with the axes
of the leaf's view. One of its entries stands for one or more of the leaf's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend import tiling
from paged_optax.backend.gpu import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.memory import HOST
from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec, Noise, Quantized, axis_of_blocks, values_per_entry
from paged_optax.engine.pages import Pages, joined_along
from paged_optax.engine.transfer import PageAddress, PagedArray, by_unit

#: An array, or what a codec stores in its place.
Stored = Array | Quantized[Array]

# All scales of a leaf travel whole, before the first page and after the last, if a page
# has at least this many values for each of them. A transfer of a few kilobytes costs
# its latency.
_SMALL_PART = 16
# On a GPU they also travel whole if they have at most so many bytes.
_FEW_BYTES = 2**18


class Buffers(NamedTuple):
    """What is held of a leaf or a page: codes and scales, or an array without scales.

    Attributes:
      codes: The codes, or the array itself.
      scales: One a block of a `Quantized`; None where there are no blocks.
    """

    codes: Array
    scales: Array | None

    @classmethod
    def of(cls, x: Stored) -> "Buffers":
        """What a codec stores, or an array."""
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        return cls(codes, scales)


#: One `Buffers` for each leaf that shares pages; a single one for an array of all.
LeafBuffers = tuple[Buffers, ...]


@dataclasses.dataclass(frozen=True)
class Streamed:
    """One argument of a leaf's program, or what a codec stores of it.

    Attributes:
      codec: What stores it, or None.
      codes: Its codes, or the array itself.
      scales: Its scales, or None.
    """

    codec: Codec | None
    codes: PagedArray
    scales: PagedArray | None

    @classmethod
    def of(
        cls,
        x: PyTree[ArrayOrShape],
        pages: Pages,
        codec: Codec | None,
        on_host: bool,
    ) -> "Streamed":
        """Describes an array, or the shapes and dtypes of one.

        Args:
          x: The array, or what a codec stores.
          pages: How the leaf is cut.
          codec: What stores it, or None.
          on_host: Whether it lives in host memory.
        """
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        cut = pages.count > 1 and (codec is not None or codes.shape == pages.leaf)
        ratios = _ratios_of_codes(codec, pages) if cut else ()
        view = _viewed(pages.view, ratios) if cut else None
        part = functools.partial(PagedArray, pages)
        travels = on_host and (
            view is None or pages.tiled or _is_raw(pages, view, ratios)
        )
        first = part(codes.shape, codes.dtype, on_host, view, ratios, travels)
        if scales is None:
            return cls(codec, first, None)
        assert codec is not None
        # A whole array may have fewer axes than the leaf: a single value.
        ratios = _ratios_of_scales(codec, pages) if cut else ()
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

    def divides(self, entries: int) -> bool:
        """Whether so many entries along the axis that is cut can go by themselves."""
        parts = (self.codes, self.scales)
        return all(part is None or part.divides(entries) for part in parts)

    @property
    def paged(self) -> bool:
        """Whether each leaf has its own; else all share it."""
        return self.codec is not None or self.codes.shape == self.codes.pages.leaf

    def view(self, x: Stored) -> Buffers:
        """What a loop holds of what was given."""
        codes, scales = Buffers.of(x)
        codes = codes.reshape(self.codes.opened)
        if self.scales is None or scales is None:
            return Buffers(codes, None)
        return Buffers(codes, scales.reshape(self.scales.opened))

    def blank(self) -> Buffers:
        """Memory to fill, in the shapes that a loop holds; see `staged`.

        `lax.empty` moved to the host allocates there and nowhere else. XLA:GPU of jax
        0.10.2 refuses to reshape it there ("Bitcast cannot have different memory
        spaces"), so that it is made in the shape that is cut.
        """

        def make(part: PagedArray) -> Array:
            made = lax.empty(part.opened, part.dtype)
            return jax.device_put(made, HOST) if part.on_host else made

        return Buffers(
            make(self.codes), None if self.scales is None else make(self.scales)
        )

    def staged(self) -> "Streamed":
        """The same, with what does not travel in pages on the device until the end."""

        def stay(part: PagedArray) -> PagedArray:
            return part if part.travels else dataclasses.replace(part, on_host=False)

        scales = None if self.scales is None else stay(self.scales)
        return Streamed(self.codec, stay(self.codes), scales)

    def restore(self, x: Buffers) -> Stored:
        """What was given, back in its own shape."""
        codes = x.codes.reshape(self.codes.shape)
        if self.scales is None or x.scales is None:
            return codes
        return Quantized(codes, x.scales.reshape(self.scales.shape))

    def ahead(self, x: Buffers) -> Buffers:
        """Brings what does not travel in pages to the device."""
        return self._each(PagedArray.ahead, x)

    def back(self, x: Buffers) -> Buffers:
        """Undoes `ahead`."""
        return self._each(PagedArray.back, x)

    def read(self, x: Buffers, at: PageAddress) -> Buffers:
        """A page as it is stored, in device memory."""
        return self._each(PagedArray.read, x, at)

    def write(self, x: Buffers, page: Buffers, at: PageAddress) -> Buffers:
        """What is held with a page of it replaced."""
        codes = self.codes.write(x.codes, page.codes, at)
        if self.scales is None or x.scales is None or page.scales is None:
            return Buffers(codes, None)
        return Buffers(codes, self.scales.write(x.scales, page.scales, at))

    def decode(self, page: LeafBuffers, shape: tuple[int, ...]) -> Array:
        """What the program sees of a page.

        Args:
          page: The page, as it is stored, of each leaf that shares it.
          shape: The shape of each leaf's part.
        """
        axis = self.codes.pages.axis
        if self.codec is None:
            return _joined([x.codes for x in page], axis)
        if len(page) == 1:
            return _decode(self.codec, self.stored(page[0], shape), shape)
        whole = _many(shape, axis, len(page))
        wanted = self.codec.stored(whole)
        join = lambda like, *parts: _joined(parts, _along(parts[0], like, len(parts)))
        parts = [self.stored(x, shape) for x in page]
        return _decode(self.codec, jax.tree.map(join, wanted, *parts), whole)

    def encode(
        self, result: Array, noise: Noise | None, shape: tuple[int, ...], leaves: int
    ) -> LeafBuffers:
        """What is stored of a result, of each of the leaves that share the page.

        Args:
          result: The result.
          noise: What a codec rounds by, or None.
          shape: The shape of each leaf's part.
          leaves: How many leaves share the page.
        """
        axis = self.codes.pages.axis
        if self.codec is None:
            return tuple(Buffers(x, None) for x in _parted(result, axis, leaves))
        if noise is None:
            made = _encode(self.codec, result)
        else:
            made = self.codec.encode(result, noise)
        if leaves == 1:
            return (Buffers.of(made),)
        one, structure = jax.tree.flatten(self.codec.stored(shape))
        parts = [
            _parted(x, _along(like, x, leaves), leaves)
            for x, like in zip(jax.tree.leaves(made), one, strict=True)
        ]
        return tuple(
            Buffers.of(jax.tree.unflatten(structure, x))
            for x in zip(*parts, strict=True)
        )

    def stored(self, page: Buffers, shape: tuple[int, ...]) -> Stored:
        """What the codec stores of a page of this shape."""
        assert self.codec is not None
        stored = page.codes if page.scales is None else Quantized(*page)
        wanted = self.codec.stored(shape)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), stored, wanted)

    def _each(
        self, method: Callable[..., Array], x: Buffers, *arguments: PageAddress
    ) -> Buffers:
        codes = method(self.codes, x.codes, *arguments)
        if self.scales is None or x.scales is None:
            return Buffers(codes, None)
        return Buffers(codes, method(self.scales, x.scales, *arguments))


# Traced once for all pages of a shape: eight bits are 150 equations each way.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _encode(codec: Codec, page: Array) -> PyTree[Array]:
    return codec.encode(page)


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _decode(codec: Codec, stored: PyTree[Array], shape: tuple[int, ...]) -> Array:
    return codec.decode(stored, shape)


def _many(shape: tuple[int, ...], axis: int, leaves: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * leaves, *shape[axis + 1 :])


def _along(one: ArrayOrShape, many: ArrayOrShape, leaves: int) -> int:
    """The axis along which one is a part of many, as `page_size` has checked."""
    axis = joined_along(one, many, leaves)
    assert axis is not None
    return axis


def _joined(parts: Sequence[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)


def _parted(x: Array, axis: int, leaves: int) -> Sequence[Array]:
    return [x] if leaves == 1 else jnp.split(x, leaves, axis)


def _viewed(
    view: tuple[int, ...], ratios: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The shape of an array that has `number` entries for `of` of a leaf's view."""
    cut = view[: len(ratios)]
    return tuple(-(-n * x // of) for n, (x, of) in zip(cut, ratios, strict=True))


def _ratios_of_codes(codec: Codec | None, pages: Pages) -> tuple[tuple[int, int], ...]:
    values = values_per_entry(codec, pages.leaf)[-len(pages.view) :]
    joined = len(pages.view) - len(values)
    return (*[(1, 1)] * joined, *((1, n) for n in values))


def _ratios_of_scales(codec: Codec, pages: Pages) -> tuple[tuple[int, int], ...]:
    """Scales have the leaf's axes, or those before `pages.axis` and one of blocks."""
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
    if pages.axis or not GPU_NEEDS_RAW_INDEX:
        return True  # strips are transferred by kernels, which compute their addresses
    return by_unit(pages, view, ratios) is not None


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
        return 4 * math.prod(shape) > _FEW_BYTES and _is_raw(pages, view, ratios)
    number, of = ratios[pages.axis]
    order = tiling.view_layout(shape, len(view))
    return order is not None and tiling.can_slice(
        view, order, pages.axis, pages.size * number // of, 4
    )
