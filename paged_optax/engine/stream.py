"""Entry points of the engine: `stream` updates leaves, and `fill` makes a new leaf.

Pages are cut for each kind of backend (`paged_optax.engine.sharing`), and on a mesh
from each device's shard.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.memory import HOST
from paged_optax.codecs import Codec
from paged_optax.engine.loop import LeafProgram, update_leaves
from paged_optax.engine.paged_array import Arrays, Stored, typed
from paged_optax.engine.pages import Pages
from paged_optax.engine.shards import Shards, on_shards
from paged_optax.engine.sharing import Geometry, sharing

Results = TypeVar("Results")


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
    update = _stream
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


# Traced and compiled once for all groups of leaves of one shape.
@functools.partial(jax.jit, static_argnames=("leaf", "pages"))
def _stream(*args: PyTree, leaf: LeafProgram, pages: Pages) -> list[Arrays]:
    return update_leaves(*args, leaf=leaf, pages=pages)


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
    run = functools.partial(update_leaves, leaf=leaf, pages=pages)
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
    types = lambda shape: jax.ShapeDtypeStruct(shape, dtype)
    codecs = (*[None] * len(arrays), codec)
    leaf = LeafProgram(program, (len(arrays),), codecs)

    def run(pages: Pages, leaves: Sequence[Arrays], *remaining: PyTree) -> list[Arrays]:
        new = typed((codec.stored if codec else types)(pages.leaf), host)
        leaves = [(*arrays, new) for arrays in leaves]
        filled = update_leaves(leaves, *remaining, leaf=leaf, pages=pages, axes=axes)
        return jax.device_put(filled, HOST) if host else filled

    fill_pages = _by_backend(run, geometry)
    words = (random_bits,)
    if shards is None:
        return fill_pages([arrays], None, words, None)[0][0]
    local = geometry.gpu.leaf
    shape = tuple(n * d for n, d in zip(local, shards.divisions, strict=True))
    like = shards.stored(codec, shape) if codec else types(shape)
    on_mesh = fill_pages, shards, (arrays,), codecs[:-1], local, [(codec, like)]
    return on_shards(*on_mesh, random_bits=words)[0][0]
