"""One argument of a leaf's program, encoded and decoded page by page.

A moment is an array of the leaf's shape, or the codes and scales that its codec stores.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jaxtyping import PyTree

from paged_optax.backend.memory import DEVICE, HOST
from paged_optax.backend.types import ArrayOrShape, Shape, varying
from paged_optax.codecs import Codec, Noise, Quantized
from paged_optax.engine.buffers import PagedBuffer
from paged_optax.engine.page_cuts import ratios_of_codes, ratios_of_scales
from paged_optax.engine.pages import Page, Pages, joined_along
from paged_optax.engine.transfers import to_device, to_host

#: An array, or its encoded form.
Stored = Array | Quantized

#: The same, or the type of one that is to be allocated.
StoredOrType = Stored | ShapedArray

#: The arrays of one `Stored`, whole or of a page: codes and scales, or the array alone.
Buffers = tuple[Array, ...]

#: Fetched arrays of a page; None for arrays on the device.
Fetched = tuple[Array | None, ...]

#: The buffers of each leaf that shares pages; one entry for an array of all leaves.
#: If scales are stacked, the first leaf holds them, and the others have codes only.
LeafBuffers = tuple[Buffers, ...]


#: The arrays of one leaf.
Arrays = tuple[Stored, ...]


def buffers_of(x: Stored) -> Buffers:
    """Returns codes and scales, or the array alone."""
    return tuple(x) if isinstance(x, Quantized) else (x,)


def _stored(buffers: Iterable[Array]) -> Stored:
    codes, *scales = buffers
    return Quantized(codes, *scales) if scales else codes


def typed(x: PyTree[jax.ShapeDtypeStruct], host: bool) -> PyTree[ShapedArray]:
    """Returns the types of arrays in host, or device, memory."""
    space = HOST if host else DEVICE
    return jax.tree.map(lambda x: ShapedArray(x.shape, x.dtype, memory_space=space), x)


@dataclasses.dataclass(frozen=True)
class PagedArray:
    """One argument of a leaf's program, or its encoded form, page by page."""

    codec: Codec | None
    parts: tuple[PagedBuffer, ...]  # codes and scales, or the array itself

    @classmethod
    def create(
        cls,
        x: PyTree[ArrayOrShape | ShapedArray],
        pages: Pages,
        codec: Codec | None,
        on_host: bool,
        leaf_count: int = 1,
    ) -> "PagedArray":
        """Describes an array, or its encoded form, of leaves that share pages."""
        codes, scales = x if isinstance(x, Quantized) else (x, None)
        # A whole array may have fewer axes than the leaf: a single value.
        cut = pages.count > 1 and (codec is not None or codes.shape == pages.leaf)
        ratios = ratios_of_codes(codec, pages.leaf, pages.view) if cut else ()
        first = PagedBuffer.create(codes, pages, on_host, ratios)
        if scales is None:
            return cls(codec, (first,))
        assert codec is not None
        ratios = ratios_of_scales(codec, pages.view, pages.axis) if cut else ()
        second = PagedBuffer.create(scales, pages, on_host, ratios, are_scales=True)
        # Preloaded scales are few. Stacking many scales on the device would copy them.
        if leaf_count > 1 and second.preloaded and not pages.tiled:
            second = dataclasses.replace(second, stacked_leaves=leaf_count)
        return cls(codec, (first, second))

    @property
    def streamed(self) -> bool:
        """True if its pages come from host memory."""
        return self.parts[0].streamed

    @functools.cached_property
    def page_bytes(self) -> int:
        """Transfer size of one full page, in bytes."""
        full, *_ = self.parts[0].pages.ranges
        bytes_of = lambda part: (
            math.prod(part.slice_of(full)[1]) * jnp.dtype(part.dtype).itemsize
        )
        return sum([bytes_of(part) for part in self.parts if part.streamed])

    @property
    def per_leaf(self) -> bool:
        """True if each leaf has its own array; else all share one."""
        codes = self.parts[0]
        return self.codec is not None or codes.shape == codes.pages.leaf

    def open(self, x: StoredOrType, axes: frozenset[str] = frozenset()) -> Buffers:
        """Returns its buffers, in the shapes that a loop holds.

        A new array, of type `ShapedArray`, is allocated, and varies along `axes`.
        """

        def opened(x: Array | ShapedArray, part: PagedBuffer) -> Array:
            if not isinstance(x, ShapedArray):
                return x.reshape(part.opened)
            # `lax.empty` moved to the host allocates there and nowhere else. XLA:GPU of
            # jax 0.10.2 refuses to reshape it there ("Bitcast cannot have different
            # memory spaces"), so it has the shape that is cut from the start.
            empty = to_host(lax.empty(part.opened, part.dtype), part.on_host)
            return varying(empty, axes)

        buffers = x if isinstance(x, Quantized) else (x,)
        return tuple(map(opened, buffers, self.parts))

    def close(self, buffers: Buffers) -> Stored:
        """Undoes `open`."""
        return _stored(map(lambda x, part: x.reshape(part.shape), buffers, self.parts))

    def staged(self) -> "PagedArray":
        """Returns the array with buffers that do not travel in pages on the device."""
        stay = lambda x: dataclasses.replace(x, on_host=x.streamed)
        return PagedArray(self.codec, tuple(map(stay, self.parts)))

    def preload(self, leaves: LeafBuffers) -> LeafBuffers:
        """Copies buffers that do not travel in pages to the device."""
        load = lambda x, part: (
            to_device(x, True).reshape(part.view or part.shape) if part.preloaded else x
        )
        return self._stacked([tuple(map(load, x, self.parts)) for x in leaves])

    def unload(self, leaves: LeafBuffers) -> LeafBuffers:
        """Undoes `preload`."""
        unload = lambda x, part: (
            to_host(x.reshape(part.shape), True) if part.preloaded else x
        )
        return tuple([tuple(map(unload, x, self.parts)) for x in self._by_leaf(leaves)])

    def _stacked(self, leaves: Sequence[Buffers]) -> LeafBuffers:
        """Stacks the scales of all leaves, so that a page's scales are one slice."""
        if not self.parts[-1].stacked_leaves:
            return tuple(leaves)
        codes, scales = zip(*leaves, strict=True)
        return ((codes[0], jnp.stack(scales)), *[(x,) for x in codes[1:]])

    def _by_leaf(self, leaves: LeafBuffers) -> LeafBuffers:
        """Undoes `_stacked`."""
        if not self.parts[-1].stacked_leaves:
            return leaves
        pairs = zip(leaves, leaves[0][1], strict=True)
        return tuple([(x[0], scales) for x, scales in pairs])

    def fetch(self, buffers: Buffers, at: Page) -> Fetched:
        """Reads the streamed buffers of a page; None for the others."""
        fetch = lambda x, part: part.read(x, at) if part.streamed else None
        return tuple(map(fetch, buffers, self.parts))

    def read(self, at: Page, buffers: Buffers, fetched: Fetched) -> Buffers:
        """Reads the other buffers of a page, beside those that `fetch` has read."""
        read = lambda x, page, part: part.read(x, at) if page is None else page
        return tuple(map(read, buffers, fetched, self.parts))

    def write(
        self, buffers: Buffers, page: Buffers, at: Page, streamed: bool | None = None
    ) -> Buffers:
        """Returns the buffers with an encoded page written.

        `streamed`: True writes streamed buffers alone; False writes the others.
        """
        write = lambda x, new, part: (
            part.write(x, new, at) if streamed in (None, part.streamed) else x
        )
        return tuple(map(write, buffers, page, self.parts))

    def decode(self, page: LeafBuffers, shape: Shape) -> Array:
        """Decodes a page, joined of the leaves that share it; `shape`: of one leaf."""
        axis, leaf_count = self.parts[0].pages.axis, len(page)
        if self.codec is None:
            codes = [codes for (codes,) in page]
            return codes[0] if leaf_count == 1 else lax.concatenate(codes, axis)
        if leaf_count == 1:
            return _decode(self.codec, self.as_stored(page[0], shape), shape)
        joined_shape = (*shape[:axis], shape[axis] * leaf_count, *shape[axis + 1 :])
        join = lambda like, *parts: lax.concatenate(
            parts, _along(parts[0], like, leaf_count)
        )
        parts = [self.as_stored(x, shape) for x in self._by_leaf(page)]
        stored = jax.tree.map(join, self.codec.stored(joined_shape), *parts)
        return _decode(self.codec, stored, joined_shape)

    def encode(
        self, result: Array, noise: Noise | None, shape: Shape, leaf_count: int
    ) -> LeafBuffers:
        """Encodes a joined page, and splits it by leaf; `shape`: of one leaf."""
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

    def as_stored(self, page: Buffers, shape: Shape) -> Stored:
        """Returns a page in the container and shapes of its codec."""
        assert self.codec is not None
        reshape = lambda x, like: x.reshape(like.shape)
        return jax.tree.map(reshape, _stored(page), self.codec.stored(shape))


# Traced once for all pages of a shape: eight bits are 150 equations each way.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _encode(codec: Codec, page: Array) -> PyTree[Array]:
    return codec.encode(page)


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _decode(codec: Codec, stored: PyTree[Array], shape: Shape) -> Array:
    return codec.decode(stored, shape)


def _along(one: ArrayOrShape, many: ArrayOrShape, leaf_count: int) -> int:
    axis = joined_along(one, many, leaf_count)
    assert axis is not None  # `sharing` has checked it
    return axis
