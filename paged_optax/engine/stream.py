"""Pages of leaves through the device.

A page is read from host memory, computed on, and written back over itself, inside one
loop a leaf, or one for several that share pages (`paged_optax.engine.run`). Two choices
keep this right and small on every compiler at hand:

- **The loop's own variable is the index.** It counts rows, or the smallest groups of
  rows that no page parts, and steps by a page. So the slice's start needs no
  arithmetic. XLA:GPU before openxla/xla#46308 derives a transfer's address from the
  induction variable alone and ignores what is computed from it; with this form its
  transfer descriptors cover exactly the page in jax 0.10.2 and in 0.12.0.1. A last page
  of fewer rows is one more access at a fixed row.
- **A leaf is kept apart from all else** (`paged_optax.engine.kept_apart`), so that
  leaves take memory one at a time.

How an array lies in its pages is in `paged_optax.engine.streamed`. This module knows
nothing of Optax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.meshes import varying
from paged_optax.codecs import Codec
from paged_optax.engine.page_size import sharing
from paged_optax.engine.pages import Geometry, Pages
from paged_optax.engine.run import Run
from paged_optax.engine.shards import ShardPosition, Shards, on_shards
from paged_optax.engine.streamed import Stored, Streamed

Results = TypeVar("Results")

#: The program's arguments of one leaf.
Arrays = tuple[Stored, ...]


def stream(
    leaves: tuple[Arrays, ...],
    gate: Int[Array, ""] | None = None,
    noise: tuple[UInt32[Array, "2"] | None, ...] | None = None,
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
      gate: 1 to update the leaves; 0 to leave them, moving nothing. None always
        updates.
      noise: For each result the random words that its codec rounds by, or None.
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
    how = _How(program, overwrites, codecs or (None,) * len(leaves[0]), shapes, shards)

    def run(pages: Pages, leaves: tuple[Arrays, ...], *others: PyTree) -> list[Arrays]:
        parts = sharing(pages, len(leaves))
        made = [_stream(leaves[part], *others, how=how, pages=pages) for part in parts]
        return [arrays for each in made for arrays in each]

    return _by_backend(run, geometry, leaves, gate, noise)


def _by_backend(
    run: Callable[..., Results], geometry: Geometry, *arguments: PyTree[Array]
) -> Results:
    """Calls a function with the pages of the backend it is lowered for."""
    rows, of_others = geometry.rows, {"tpu": geometry.tiles, "cpu": geometry.alone}
    others = {name: pages for name, pages in of_others.items() if pages != rows}
    if not others:
        return run(rows, *arguments)
    ways = {name: functools.partial(run, pages) for name, pages in others.items()}
    return lax.platform_dependent(
        *arguments, default=functools.partial(run, rows), **ways
    )


@dataclasses.dataclass(frozen=True)
class _How:
    """How a leaf is updated; see `stream`."""

    program: Program
    overwrites: tuple[int, ...]
    codecs: tuple[Codec | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: Shards | None


@functools.partial(jax.jit, static_argnames=("how", "pages"))
def _stream(
    leaves: tuple[Arrays, ...],
    gate: Int[Array, ""] | None,
    noise: tuple[UInt32[Array, "2"] | None, ...] | None,
    *,
    how: _How,
    pages: Pages,
) -> list[Arrays]:
    """Updates leaves that share pages."""
    if how.shards is None:
        return _on_one(how, pages, None, leaves, (gate, noise))
    arrays = tuple(x for leaf in leaves for x in leaf)
    count = len(arrays) // len(leaves)

    def on_one(
        place: ShardPosition, arrays: Arrays, scalars: PyTree[Array]
    ) -> tuple[Stored, ...]:
        gate, noise = scalars
        noise = jax.tree.map(lambda words: words + place.part, noise)
        each = tuple(arrays[i : i + count] for i in range(0, len(arrays), count))
        made = _on_one(how, pages, place.start, each, (gate, noise))
        return tuple(x for new in made for x in new)

    results = [i + p for i in range(0, len(arrays), count) for p in how.overwrites]
    codecs = how.codecs * len(leaves)
    made = on_shards(
        on_one, how.shards, arrays, codecs, pages.leaf, results, (gate, noise)
    )
    count = len(how.overwrites)
    return [made[i : i + count] for i in range(0, len(made), count)]


def _on_one(
    how: _How,
    pages: Pages,
    place: UInt32[Array, ""] | None,
    leaves: tuple[Arrays, ...],
    scalars: tuple[Int[Array, ""] | None, tuple[UInt32[Array, "2"] | None, ...] | None],
) -> list[Arrays]:
    """Updates leaves that share pages, on one device."""
    gate, noise = scalars
    described = [
        Streamed.of(x, pages, codec, on_host(x))
        for x, codec in zip(leaves[0], how.codecs, strict=True)
    ]
    views = [
        tuple(map(each.view, own if each.paged else own[:1]))
        for each, own in zip(described, zip(*leaves, strict=True), strict=True)
    ]
    words = noise or (None,) * len(how.overwrites)
    shapes = () if pages.count else how.shapes
    run = Run(
        how.program,
        how.overwrites,
        pages,
        described,
        words,
        place,
        shapes,
        len(leaves),
    )
    new = dict(zip(run.targets, run(views, gate), strict=True))
    return [
        tuple(described[p].restore(new[p][leaf]) for p in how.overwrites)
        for leaf in range(len(leaves))
    ]


@functools.partial(
    jax.jit,
    static_argnames="program geometry dtype codec host shards axes".split(),
)
def fill(
    arrays: tuple[Array, ...],
    noise: UInt32[Array, "2"] | None = None,
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
      noise: The random words that the codec rounds by, or None.
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
    run = functools.partial(_fill, program, dtype, codec, host, axes)
    if shards is None:
        return _by_backend(run, geometry, arrays, noise, None)[0]
    local = geometry.rows.leaf
    shape = tuple(n * d for n, d in zip(local, shards.divisions, strict=True))
    like = jax.ShapeDtypeStruct(shape, dtype)
    (leaf,) = on_shards(
        lambda place, arrays, noise: _by_backend(
            run, geometry, arrays, noise, place.start
        ),
        shards,
        arrays,
        [None] * len(arrays),
        local,
        [(codec, shards.stored(codec, shape) if codec else like)],
        noise,
    )
    return leaf


def _fill(
    program: Program,
    dtype: jnp.dtype,
    codec: Codec | None,
    host: bool,
    axes: frozenset[str],
    pages: Pages,
    arrays: tuple[Array, ...],
    noise: UInt32[Array, "2"] | None,
    place: UInt32[Array, ""] | None,
) -> tuple[Stored]:
    stored = jax.ShapeDtypeStruct(pages.leaf, dtype)
    if codec is not None:
        stored = codec.stored(pages.leaf)
    leaves = [Streamed.of(x, pages, None, on_host(x)) for x in arrays]
    views = [(leaf.view(x),) for leaf, x in zip(leaves, arrays, strict=True)]
    made = Streamed.of(stored, pages, codec, host).staged()
    run = Run(program, (len(arrays),), pages, [*leaves, made], [noise], place)
    blank = varying(made.blank(), axes)
    ((new,),) = run([*views, (blank,)], None)
    leaf = made.restore(new)
    return (jax.device_put(leaf, HOST) if host else leaf,)
