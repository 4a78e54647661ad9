"""Entry points of the engine: `stream` updates leaves, and `fill` makes a new leaf.

A page is read from host memory, computed, and written back in place, inside one loop a
leaf, or one for several leaves that share pages (`paged_optax.engine.loop`).

The loop's variable is the index if pages are serial. It counts rows, or the smallest
groups of rows that no page splits, and steps by a page: the slice's start needs no
arithmetic. XLA:GPU before openxla/xla#46308 derives a transfer's address from the
induction variable alone and ignores arithmetic on it; with this form its transfer
descriptors cover exactly the page in jax 0.10.2 and in 0.12.0.1. A last page of fewer
rows is one more access at a fixed row.
"""

import functools
import itertools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.memory import HOST, on_host
from paged_optax.codecs import Codec
from paged_optax.engine.loop import LeafProgram, Loop, filled
from paged_optax.engine.paged_array import PagedArray, Stored
from paged_optax.engine.pages import Pages
from paged_optax.engine.shards import Shards, on_shards
from paged_optax.engine.sharing import Geometry, sharing

Results = TypeVar("Results")

#: The arrays of one leaf.
Arrays = tuple[Stored, ...]


def stream(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None = None,
    random_bits: tuple[UInt32[Array, "2"] | None, ...] | None = None,
    *,
    leaf: LeafProgram,
    geometry: Geometry,
    shards: Shards | None = None,
) -> list[Arrays]:
    """Runs a program over leaves of one shape, page by page, in place.

    A leaf has the program's arguments, in host or device memory, then any further
    buffers to overwrite. Arrays of the leaf's shape are paged; others (scalars) are
    shared by all leaves, and every page gets them whole. The new arrays of each leaf
    are in the order of the results, each in the memory of the array it replaces.

    A `trip_count` of 0 skips the leaves, moving nothing; None always updates them.
    `random_bits` has for each result the words of stochastic rounding, or None. Over a
    mesh each device pages its own shard, and `geometry` is a shard's.
    """
    update = _stream_jitted
    if shards is not None:
        update = functools.partial(_stream_on_mesh, shards=shards)

    def run(
        pages: Pages, leaves: tuple[Arrays, ...], *remaining: PyTree
    ) -> list[Arrays]:
        new = [
            update(leaves[group], *remaining, leaf=leaf, pages=pages)
            for group in sharing(pages, len(leaves))
        ]
        return list(itertools.chain(*new))

    return _by_backend(run, geometry)(leaves, trip_count, random_bits)


def _by_backend(
    run: Callable[..., Results], geometry: Geometry
) -> Callable[..., Results]:
    """Returns `run` with the pages of the backend that it is lowered for."""
    default = functools.partial(run, geometry.gpu)
    remaining = {
        name: functools.partial(run, pages)
        for name, pages in (("tpu", geometry.tpu), ("cpu", geometry.cpu))
        if pages != geometry.gpu
    }
    if not remaining:
        return default
    return functools.partial(lax.platform_dependent, default=default, **remaining)


def _stream(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None,
    random_bits: tuple[UInt32[Array, "2"] | None, ...] | None,
    start: UInt32[Array, ""] | None = None,
    *,
    leaf: LeafProgram,
    pages: Pages,
) -> list[Arrays]:
    """Updates leaves that share pages; `start`: see `Loop`."""
    arrays = [
        PagedArray.create(x, pages, codec, on_host(x), len(leaves))
        for x, codec in zip(leaves[0], leaf.codecs, strict=True)
    ]
    buffers = [
        tuple(map(array.open, of_leaves if array.paged else of_leaves[:1]))
        for array, of_leaves in zip(arrays, zip(*leaves, strict=True), strict=True)
    ]
    words = random_bits or (None,) * len(leaf.overwrites)
    loop = Loop(leaf, pages, arrays, words, start, len(leaves))
    new = dict(zip(loop.targets, loop(buffers, trip_count), strict=True))
    return [
        tuple([arrays[p].close(new[p][index]) for p in leaf.overwrites])
        for index in range(len(leaves))
    ]


# Traced and compiled once for all groups of leaves of one shape.
_stream_jitted = jax.jit(_stream, static_argnames=("leaf", "pages"))


@functools.partial(jax.jit, static_argnames=("leaf", "pages", "shards"))
def _stream_on_mesh(
    leaves: tuple[Arrays, ...],
    trip_count: Int[Array, ""] | None,
    random_bits: tuple[UInt32[Array, "2"] | None, ...] | None,
    *,
    leaf: LeafProgram,
    pages: Pages,
    shards: Shards,
) -> list[Arrays]:
    """Updates the shards of leaves on every device."""
    results = [(leaf.codecs[p], leaves[0][p]) for p in leaf.overwrites]
    run = functools.partial(_stream, leaf=leaf, pages=pages)
    scalars = trip_count, random_bits
    return on_shards(run, shards, leaves, leaf.codecs, pages.leaf, results, *scalars)


@functools.partial(
    jax.jit, static_argnames="program geometry dtype codec host shards axes".split()
)
def fill(
    arrays: tuple[Array, ...],
    random_bits: UInt32[Array, "2"] | None = None,
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

    The program's only result is the leaf, computed in `dtype`. Within a `jax.shard_map`
    the leaf varies along `axes`. Over a mesh each device makes its own shard.
    """

    def run(
        pages: Pages,
        leaves: tuple[tuple[Array, ...]],
        trip_count: None,
        random_bits: UInt32[Array, "2"] | None,
        start: UInt32[Array, ""] | None,
    ) -> list[Arrays]:
        stored = jax.ShapeDtypeStruct(pages.leaf, dtype)
        if codec is not None:
            stored = codec.stored(pages.leaf)
        sources = [
            (PagedArray.create(x, pages, None, on_host(x)), x) for x in leaves[0]
        ]
        target = PagedArray.create(stored, pages, codec, host).staged()
        leaf = filled(program, pages, sources, target, axes, random_bits, start)
        return [(jax.device_put(leaf, HOST) if host else leaf,)]

    fill_pages = _by_backend(run, geometry)
    if shards is None:
        return fill_pages((arrays,), None, random_bits, None)[0][0]
    local = geometry.gpu.leaf
    shape = tuple(n * d for n, d in zip(local, shards.divisions, strict=True))
    like = shards.stored(codec, shape) if codec else jax.ShapeDtypeStruct(shape, dtype)
    codecs, results = (None,) * len(arrays), [(codec, like)]
    on_mesh = fill_pages, shards, (arrays,), codecs, local, results
    return on_shards(*on_mesh, random_bits=random_bits)[0][0]
