"""What is called to update like leaves: their pages go through the device.

A page is read from host memory, computed on, and written back over itself, inside one
loop a leaf, or one for several that share pages (`paged_optax.engine.loop`). Two
choices keep this right and small on every compiler at hand:

- **The loop's own variable is the index** where pages go in turn. It counts rows, or
  the smallest groups of rows that no page parts, and steps by a page. So the slice's
  start needs no arithmetic. XLA:GPU before openxla/xla#46308 derives a transfer's
  address from the induction variable alone and ignores what is computed from it; with
  this form its transfer descriptors cover exactly the page in jax 0.10.2 and in
  0.12.0.1. A last page of fewer rows is one more access at a fixed row.
- **A leaf is isolated** (`paged_optax.engine.transfer_order`), so that leaves take
  memory one at a time.

How an array lies in its pages is in `paged_optax.engine.paged_array`. This module
knows nothing of Optax.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.types import varying
from paged_optax.codecs import Codec
from paged_optax.engine.geometry import Geometry, sharing
from paged_optax.engine.loop import Loop
from paged_optax.engine.paged_array import PagedArray, Stored
from paged_optax.engine.pages import Pages
from paged_optax.engine.shards import ShardOffset, Shards, on_shards

Results = TypeVar("Results")

#: The program's arguments of one leaf.
Arrays = tuple[Stored, ...]


class PageProgram(NamedTuple):
    """A leaf's program, and what stores its arrays; see `stream`."""

    program: Program
    overwrites: tuple[int, ...]
    codecs: tuple[Codec | None, ...]
    shapes: tuple[tuple[int, ...], ...]


def stream(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None = None,
    random_words: tuple[UInt32[Array, "2"] | None, ...] | None = None,
    *,
    program: Program,
    overwrites: tuple[int, ...],
    geometry: Geometry,
    codecs: tuple[Codec | None, ...] = (),
    shapes: tuple[tuple[int, ...], ...] = (),
    shards: Shards | None = None,
) -> list[Arrays]:
    """Runs a program over like leaves, page by page, in place.

    Args:
      leaves: For each leaf the program's arguments, in host or device memory, then any
        further buffers to overwrite. Arrays of the leaf's shape are paged; others
        (scalars) are the same for all leaves, and given to every page whole.
      trip_count: 1 to update the leaves; 0 to leave them, moving nothing. None always
        updates.
      random_words: For each result the random words that its codec rounds by, or None.
      program: What to compute on a page; see `paged_optax.analysis.program`.
      overwrites: For each of its results, the position of the array it replaces,
        of the same shape and dtype.
      geometry: How a leaf is cut; one shard of it, where there are shards.
      codecs: What stores each of a leaf's arrays, or None; empty where nothing is
        coded.
      shapes: What the program sees of each of a leaf's arrays, where it is given all
        of it; empty where nothing is coded.
      shards: How a leaf is divided over a mesh: each device pages its own shard.

    Returns:
      For each leaf the new arrays, in the order of the results, each in the memory
      space of the array it replaces.
    """
    codecs = codecs or (None,) * len(leaves[0])
    page_program = PageProgram(program, overwrites, codecs, shapes)
    update = _stream_jitted
    if shards is not None:
        update = functools.partial(_stream_on_mesh, shards=shards)

    def run(pages: Pages, leaves: tuple[Arrays, ...], *others: PyTree) -> list[Arrays]:
        new = [
            update(leaves[group], *others, page_program=page_program, pages=pages)
            for group in sharing(pages, len(leaves))
        ]
        return [arrays for each in new for arrays in each]

    return _by_backend(run, geometry)(leaves, trip_count, random_words)


def _by_backend(
    run: Callable[..., Results], geometry: Geometry
) -> Callable[..., Results]:
    """A function of the pages of the backend that it is lowered for."""
    default = functools.partial(run, geometry.gpu)
    others = {
        name: functools.partial(run, pages)
        for name, pages in (("tpu", geometry.tpu), ("cpu", geometry.cpu))
        if pages != geometry.gpu
    }
    if not others:
        return default
    return functools.partial(lax.platform_dependent, default=default, **others)


def _stream(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None,
    random_words: tuple[UInt32[Array, "2"] | None, ...] | None,
    start: UInt32[Array, ""] | None = None,
    *,
    page_program: PageProgram,
    pages: Pages,
) -> list[Arrays]:
    """Updates leaves that share pages; `start`: see `Loop`."""
    program, overwrites, codecs, shapes = page_program
    arrays = [
        PagedArray.of(x, pages, codec, on_host(x), len(leaves))
        for x, codec in zip(leaves[0], codecs, strict=True)
    ]
    buffers = [
        tuple(map(array.open, each if array.paged else each[:1]))
        for array, each in zip(arrays, zip(*leaves, strict=True), strict=True)
    ]
    words = random_words or (None,) * len(overwrites)
    # Of leaves of several shapes, which travel whole, the program sees each shape.
    seen = () if pages.count else shapes
    loop = Loop(program, overwrites, pages, arrays, words, start, seen, len(leaves))
    new = dict(zip(loop.targets, loop(buffers, trip_count), strict=True))
    return [
        tuple([arrays[p].close(new[p][leaf]) for p in overwrites])
        for leaf in range(len(leaves))
    ]


# Traced and compiled once for all groups of like leaves that share pages.
_stream_jitted = jax.jit(_stream, static_argnames=("page_program", "pages"))


@functools.partial(jax.jit, static_argnames=("page_program", "pages", "shards"))
def _stream_on_mesh(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None,
    random_words: tuple[UInt32[Array, "2"] | None, ...] | None,
    *,
    page_program: PageProgram,
    pages: Pages,
    shards: Shards,
) -> list[Arrays]:
    """The same on every device, of its shards."""
    count, overwrites = len(leaves[0]), page_program.overwrites

    def on_shard(
        offset: ShardOffset, arrays: Arrays, scalars: PyTree[Array]
    ) -> tuple[Stored, ...]:
        trip_count, words = scalars[0], offset.random_words(scalars[1])
        leaves = tuple(arrays[i : i + count] for i in range(0, len(arrays), count))
        new = _stream(
            leaves,
            trip_count,
            words,
            offset.start,
            page_program=page_program,
            pages=pages,
        )
        return tuple(x for each in new for x in each)

    arrays = tuple(x for leaf in leaves for x in leaf)
    results = [i + p for i in range(0, len(arrays), count) for p in overwrites]
    codecs = page_program.codecs * len(leaves)
    new = on_shards(
        on_shard,
        shards,
        arrays,
        codecs,
        pages.leaf,
        results,
        (trip_count, random_words),
    )
    size = len(overwrites)
    return [new[i : i + size] for i in range(0, len(new), size)]


@functools.partial(
    jax.jit,
    static_argnames="program geometry dtype codec host shards axes".split(),
)
def fill(
    arrays: tuple[Array, ...],
    random_words: UInt32[Array, "2"] | None = None,
    *,
    program: Program,
    geometry: Geometry,
    dtype: jnp.dtype,
    codec: Codec | None = None,
    host: bool = True,
    shards: Shards | None = None,
    axes: frozenset[str] = frozenset(),
) -> Stored:
    """Makes one leaf, page by page, so that it never exists on the device.

    Args:
      arrays: The program's arguments.
      random_words: The random words that the codec rounds by, or None.
      program: What makes a page; its only result is the leaf.
      geometry: How the leaf is cut; one shard of it, where there are shards.
      dtype: The leaf's dtype, as the program makes it.
      codec: What stores it, or None.
      host: Whether it is made in host memory.
      shards: How the leaf is divided over a mesh: each device makes its own shard.
      axes: The axes along which the leaf varies, within a `jax.shard_map`.

    Returns:
      The leaf.
    """

    def run(
        pages: Pages,
        arrays: tuple[Array, ...],
        random_words: UInt32[Array, "2"] | None,
        start: UInt32[Array, ""] | None,
    ) -> tuple[Stored]:
        stored = jax.ShapeDtypeStruct(pages.leaf, dtype)
        if codec is not None:
            stored = codec.stored(pages.leaf)
        inputs = [PagedArray.of(x, pages, None, on_host(x)) for x in arrays]
        buffers = [(one.open(x),) for one, x in zip(inputs, arrays, strict=True)]
        target = PagedArray.of(stored, pages, codec, host).staged()
        every = [*inputs, target]
        loop = Loop(program, (len(arrays),), pages, every, [random_words], start)
        blank = varying(target.blank(), axes)
        ((new,),) = loop([*buffers, (blank,)], None)
        leaf = target.close(new)
        return (jax.device_put(leaf, HOST) if host else leaf,)

    if shards is None:
        return _by_backend(run, geometry)(arrays, random_words, None)[0]
    local = geometry.gpu.leaf
    shape = tuple(n * d for n, d in zip(local, shards.divisions, strict=True))
    like = jax.ShapeDtypeStruct(shape, dtype)
    (leaf,) = on_shards(
        lambda offset, arrays, words: _by_backend(run, geometry)(
            arrays, offset.random_words(words), offset.start
        ),
        shards,
        arrays,
        [None] * len(arrays),
        local,
        [(codec, shards.stored(codec, shape) if codec else like)],
        random_words,
    )
    return leaf
