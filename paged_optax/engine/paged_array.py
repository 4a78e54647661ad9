"""How the arrays of one leaf lie in its pages.

A moment is an array of the leaf's shape, or what a codec stores in its place: codes, of
which several may share a word, and a scale a block. Each array has a view with the axes
of the leaf's view. One of its entries stands for one or more of the leaf's.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend import tiling
from paged_optax.backend.memory import HOST
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec, Noise, Quantized, axis_of_blocks, values_per_entry
from paged_optax.engine.page_io import PagedBuffer, by_unit
from paged_optax.engine.pages import PageAddress, Pages, joined_along

#: An array, or what a codec stores in its place.
Stored = Array | Quantized[Array]

#: The arrays of one `Stored`, whole or of a page: codes and scales, or the array alone.
Buffers = tuple[Array, ...]

#: What is fetched of a page; None for parts of it that are on the device.
Fetched = tuple[Array | None, ...]

#: The buffers of each leaf that shares pages; of one, for an array of all leaves. Where
#: scales are stacked, the first leaf's have those of all, and the others' codes alone.
LeafBuffers = tuple[Buffers, ...]

# All scales of a leaf travel whole, before the first page and after the last, if a page
# has at least this many values for each of them. A transfer of a few kilobytes costs
# its latency.
_SMALL_PART = 16
# On a GPU they also travel whole if they have at most so many bytes.
_FEW_BYTES = 2**18


def buffers_of(x: Stored) -> Buffers:
    """What a codec stores, or an array."""
    return tuple(x) if isinstance(x, Quantized) else (x,)


@dataclasses.dataclass(frozen=True)
class PagedArray:
    """One argument of a leaf's program, or what a codec stores of it, page by page.

    Attributes:
      codec: What stores it, or None.
      parts: Its codes and its scales, or the array itself.
    """

    codec: Codec | None
    parts: tuple[PagedBuffer, ...]

    @classmethod
    def of(
        cls,
        x: PyTree[ArrayOrShape],
        pages: Pages,
        codec: Codec | None,
        on_host: bool,
        leaf_count: int = 1,
    ) -> "PagedArray":
        """Describes an array, or the shapes and dtypes of one.

        Args:
          x: The array, or what a codec stores.
          pages: How the leaf is cut.
          codec: What stores it, or None.
          on_host: Whether it lives in host memory.
          leaf_count: How many leaves share pages.
        """
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        # A whole array may have fewer axes than the leaf: a single value.
        cut = pages.count > 1 and (codec is not None or codes.shape == pages.leaf)
        ratios = _ratios_of_codes(codec, pages) if cut else ()
        first = _paged_array(codes, pages, on_host, ratios, are_scales=False)
        if scales is None:
            return cls(codec, (first,))
        assert codec is not None
        ratios = _ratios_of_scales(codec, pages) if cut else ()
        second = _paged_array(scales, pages, on_host, ratios, are_scales=True)
        # They are few then. Of moments on the device they may be many, and a copy.
        if leaf_count > 1 and second.preloaded and not pages.tiled:
            second = dataclasses.replace(second, stacked_leaves=leaf_count)
        return cls(codec, (first, second))

    @property
    def streamed(self) -> bool:
        """Whether its pages come from host memory."""
        return self.parts[0].streamed

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes of a full page of what travels of it."""
        full = self.parts[0].pages.ranges[0].at(np.int32(0))
        return sum(
            [
                math.prod(part.slice_of(full)[1]) * jnp.dtype(part.dtype).itemsize
                for part in self.parts
                if part.streamed
            ]
        )

    @property
    def paged(self) -> bool:
        """Whether each leaf has its own; else all share it."""
        codes = self.parts[0]
        return self.codec is not None or codes.shape == codes.pages.leaf

    def open(self, x: Stored) -> Buffers:
        """Its buffers, in the shapes that a loop holds."""
        pairs = zip(buffers_of(x), self.parts, strict=True)
        return tuple([x.reshape(part.opened) for x, part in pairs])

    def close(self, buffers: Buffers) -> Stored:
        """Undoes `open`."""
        pairs = zip(buffers, self.parts, strict=True)
        arrays = [x.reshape(part.shape) for x, part in pairs]
        return arrays[0] if len(arrays) == 1 else Quantized(*arrays)

    def blank(self) -> Buffers:
        """Memory to fill, in the shapes that a loop holds; see `staged`.

        `lax.empty` moved to the host allocates there and nowhere else. XLA:GPU of jax
        0.10.2 refuses to reshape it there ("Bitcast cannot have different memory
        spaces"), so that it has the shape that is cut from the beginning.
        """

        def empty(part: PagedBuffer) -> Array:
            x = lax.empty(part.opened, part.dtype)
            return jax.device_put(x, HOST) if part.on_host else x

        return tuple(map(empty, self.parts))

    def staged(self) -> "PagedArray":
        """The same, with what does not travel in pages on the device until the end."""
        stay = lambda part: dataclasses.replace(part, on_host=False)
        parts = [part if part.streamed else stay(part) for part in self.parts]
        return PagedArray(self.codec, tuple(parts))

    def preload(self, leaves: LeafBuffers) -> LeafBuffers:
        """Brings what does not travel in pages to the device."""
        loaded = [
            tuple([part.preload(x) for x, part in zip(each, self.parts, strict=True)])
            for each in leaves
        ]
        return self._stacked(loaded)

    def unload(self, leaves: LeafBuffers) -> LeafBuffers:
        """Undoes `preload`."""
        return tuple(
            [
                tuple(
                    [part.unload(x) for x, part in zip(each, self.parts, strict=True)]
                )
                for each in self._by_leaf(leaves)
            ]
        )

    def _stacked(self, leaves: Sequence[Buffers]) -> LeafBuffers:
        """Leaves of which the first has the scales of all, if they are stacked.

        So the scales of a page are one slice, and not one for each leaf.
        """
        if not self.parts[-1].stacked_leaves:
            return tuple(leaves)
        codes, scales = zip(*leaves, strict=True)
        return ((codes[0], jnp.stack(scales)), *[(x,) for x in codes[1:]])

    def _by_leaf(self, leaves: LeafBuffers) -> LeafBuffers:
        """Undoes `_stacked`."""
        if not self.parts[-1].stacked_leaves:
            return leaves
        return tuple(
            [(x[0], scales) for x, scales in zip(leaves, leaves[0][1], strict=True)]
        )

    def fetch(self, buffers: Buffers, at: PageAddress) -> Fetched:
        """What travels of a page, in device memory; None for what is there."""
        pairs = zip(buffers, self.parts, strict=False)
        return tuple([part.read(x, at) if part.streamed else None for x, part in pairs])

    def read(self, at: PageAddress, buffers: Buffers, fetched: Fetched) -> Buffers:
        """A page as it is stored, of which some has been fetched."""
        every = zip(buffers, fetched, self.parts, strict=False)
        return tuple(
            [part.read(x, at) if page is None else page for x, page, part in every]
        )

    def write(
        self,
        buffers: Buffers,
        page: Buffers,
        at: PageAddress,
        travels: bool | None = None,
    ) -> Buffers:
        """The buffers with a page replaced.

        Args:
          buffers: The buffers.
          page: The page, as it is stored.
          at: Its address.
          travels: True: only with what travels in pages; False: only with what does
            not.
        """
        every = zip(buffers, page, self.parts, strict=False)
        return tuple(
            [
                part.write(x, new, at) if travels in (None, part.streamed) else x
                for x, new, part in every
            ]
        )

    def decode(self, page: LeafBuffers, shape: tuple[int, ...]) -> Array:
        """What the program sees of a page.

        Args:
          page: The page, as it is stored, of each leaf that shares it.
          shape: The shape of each leaf's part.
        """
        axis = self.parts[0].pages.axis
        if self.codec is None:
            codes = [codes for (codes,) in page]
            return codes[0] if len(codes) == 1 else lax.concatenate(codes, axis)
        if len(page) == 1:
            return _decode(self.codec, self.as_stored(page[0], shape), shape)
        joined_shape = (*shape[:axis], shape[axis] * len(page), *shape[axis + 1 :])
        wanted = self.codec.stored(joined_shape)
        join = lambda like, *parts: lax.concatenate(
            parts, _along(parts[0], like, len(parts))
        )
        parts = [self.as_stored(x, shape) for x in self._by_leaf(page)]
        return _decode(self.codec, jax.tree.map(join, wanted, *parts), joined_shape)

    def encode(
        self,
        result: Array,
        noise: Noise | None,
        shape: tuple[int, ...],
        leaf_count: int,
    ) -> LeafBuffers:
        """What is stored of a result, of each of the leaves that share the page.

        Args:
          result: The result.
          noise: What a codec rounds by, or None.
          shape: The shape of each leaf's part.
          leaf_count: How many leaves share the page.
        """
        if self.codec is None:
            if leaf_count == 1:
                return ((result,),)
            axis = self.parts[0].pages.axis
            return tuple([(x,) for x in jnp.split(result, leaf_count, axis)])
        if noise is None:
            encoded = _encode(self.codec, result)
        else:
            encoded = self.codec.encode(result, noise)
        arrays = buffers_of(encoded)
        if leaf_count == 1:
            return (arrays,)
        like = jax.tree.leaves(self.codec.stored(shape))
        parts = [
            jnp.split(x, leaf_count, _along(one, x, leaf_count))
            for x, one in zip(arrays, like, strict=True)
        ]
        return self._stacked(list(zip(*parts, strict=True)))

    def as_stored(self, page: Buffers, shape: tuple[int, ...]) -> Stored:
        """What the codec stores of a page of this shape."""
        assert self.codec is not None
        stored = page[0] if len(page) == 1 else Quantized(*page)
        wanted = self.codec.stored(shape)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), stored, wanted)


# Traced once for all pages of a shape: eight bits are 150 equations each way.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _encode(codec: Codec, page: Array) -> PyTree[Array]:
    return codec.encode(page)


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _decode(codec: Codec, stored: PyTree[Array], shape: tuple[int, ...]) -> Array:
    return codec.decode(stored, shape)


def _along(one: ArrayOrShape, many: ArrayOrShape, leaf_count: int) -> int:
    """The axis along which one is a part of many, as `geometry` has checked."""
    axis = joined_along(one, many, leaf_count)
    assert axis is not None
    return axis


def _paged_array(
    x: ArrayOrShape,
    pages: Pages,
    on_host: bool,
    ratios: tuple[tuple[int, int], ...],
    *,
    are_scales: bool,
) -> PagedBuffer:
    """How an array lies in its pages; no ratios: every page needs all of it."""
    if not ratios:
        return PagedBuffer(pages, x.shape, x.dtype, on_host, None, (), on_host)
    cut = zip(ratios, pages.view, strict=False)
    view = tuple([-(-number * size // of) for (number, of), size in cut])
    raw = None if pages.axis or pages.tiled else by_unit(pages, view, ratios)
    # Strips are transferred by kernels, which compute their addresses.
    sliceable = bool(pages.tiled or pages.axis or raw) or not GPU_NEEDS_RAW_INDEX
    if are_scales:
        sliceable = _scales_sliceable(x.shape, view, ratios, pages, sliceable)
    streamed = on_host and sliceable
    unit_view = raw if streamed else None
    return PagedBuffer(
        pages, x.shape, x.dtype, on_host, view, ratios, streamed, unit_view
    )


def _ratios_of_codes(codec: Codec | None, pages: Pages) -> tuple[tuple[int, int], ...]:
    values = values_per_entry(codec, pages.leaf)[-len(pages.view) :]
    joined = len(pages.view) - len(values)
    return (*[(1, 1)] * joined, *[(1, n) for n in values])


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


def _scales_sliceable(
    shape: tuple[int, ...],
    view: tuple[int, ...],
    ratios: Sequence[tuple[int, int]],
    pages: Pages,
    sliceable: bool,
) -> bool:
    """Whether scales are so many that they go in pages, and lie so that they can.

    A GPU slices them if they are `sliceable`.
    """
    if math.prod(shape) * _SMALL_PART <= pages.entries:
        return False
    if not pages.tiled:
        return 4 * math.prod(shape) > _FEW_BYTES and sliceable
    number, of = ratios[pages.axis]
    order = tiling.view_layout(shape, len(view))
    return order is not None and tiling.can_slice(
        view, order, pages.axis, pages.size * number // of, 4
    )
