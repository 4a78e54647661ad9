"""Pages of one leaf through the device.

A page is read from host memory, computed on, and written back over itself, inside
one loop a leaf. Two choices keep this right and small on every compiler at hand:

- **The loop's own variable is the index.** It counts rows, or the least number of them
  that is never parted, and steps by a page's, so that the slice's start needs no
  arithmetic. XLA:GPU before openxla/xla#46308 derives a transfer's address from the
  induction variable alone and ignores what is computed from it; with this form its
  transfer descriptors cover exactly the page in jax 0.10.2 and in 0.12.0.1. A last page
  of fewer rows is one more access at a fixed row.
- **A leaf of a single page sits behind a gate**: a loop whose trip count the compiler
  cannot see. Nothing of the leaf is hoisted out of it, so such leaves stay one at a
  time too (16 leaves of 64 MiB: 256 MiB of scratch on H200 and v5e instead of 2176).
  A gate given from outside as 0 moves no byte.

How an array lies in its pages is in `paged_optax.slices`. This module knows nothing of
Optax.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, UInt32

from paged_optax.codecs import Codec, Noise
from paged_optax.codecs.codec import strides_of
from paged_optax.geometry import Geometry, Pages
from paged_optax.memory import HOST, on_host
from paged_optax.sharding import Place, Shards, on_shards
from paged_optax.slices import At, Held, Stored, Streamed

if TYPE_CHECKING:
    from paged_optax.granularity import Program

# XLA:CPU of jax < 0.11.2 drops optimization barriers before it fuses. The fetches
# then fuse into every one of their uses, reads and writes of a leaf overlap, and
# each page copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64
# (jax 0.10.2; no copy is left in 0.12.0.1).
_CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11, 2)


def _open_gate() -> Int[Array, ""]:
    """A trip count of 1: known to XLA:CPU, which has nothing to bound; else opaque."""
    return lax.platform_dependent(
        cpu=lambda: jnp.int32(1),
        default=lambda: lax.optimization_barrier(jnp.int32(1)),
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "program",
        "overwrites",
        "geometry",
        "codecs",
        "shapes",
        "shards",
    ),
)
def stream(
    arrays: tuple[Stored, ...],
    gate: Int[Array, ""] | None = None,
    noise: tuple[UInt32[Array, "2"] | None, ...] | None = None,
    place: UInt32[Array, ""] | None = None,
    *,
    program: "Program",
    overwrites: tuple[int, ...],
    geometry: Geometry,
    codecs: tuple[Codec | None, ...] = (),
    shapes: tuple[tuple[int, ...], ...] = (),
    shards: Shards | None = None,
) -> tuple[Stored, ...]:
    """Runs a program over one leaf, page by page, in place.

    Args:
      arrays: The program's arguments, in host or device memory, then any further
        buffers to overwrite. Arrays of the leaf's shape are paged; others (scalars)
        are given to every page whole.
      gate: 1 to update the leaf; 0 to leave it, moving nothing. None always updates.
      noise: For each result the random words that its codec rounds by, or None.
      place: The position in the flattened leaf of the first value here; None: 0.
      program: What to compute on a page; see `granularity.Program`.
      overwrites: For each of its results, the position of the array it replaces,
        of the same shape and dtype.
      geometry: How the leaf is cut; one shard of it, where there are shards.
      codecs: What stores each of `arrays`, or None; empty where nothing is coded.
      shapes: What the program sees of each of `arrays`, where it is given all of it;
        empty where nothing is coded.
      shards: How the leaf is divided over a mesh: each device pages its own shard.

    Returns:
      The new arrays, in the order of the results, each in the memory space of the
      array it replaces.
    """
    codecs = codecs or (None,) * len(arrays)
    run = functools.partial(_stream, program, overwrites, codecs, shapes)
    if shards is None:
        return _by_backend(run, geometry, arrays, gate, noise, place)

    def on_one(place: Place, arrays: Any, scalars: Any) -> tuple[Stored, ...]:
        gate, noise = scalars
        noise = jax.tree.map(lambda words: words + place.part, noise)
        return _by_backend(run, geometry, arrays, gate, noise, place.start)

    return on_shards(
        on_one, shards, arrays, codecs, geometry.rows.leaf, overwrites, (gate, noise)
    )


def _by_backend(
    run: Callable[..., tuple[Stored, ...]], geometry: Geometry, *arguments: Any
) -> tuple[Stored, ...]:
    """Calls a function with the pages of the backend it is lowered for."""
    if geometry.rows == geometry.tiles:
        return run(geometry.rows, *arguments)
    return lax.platform_dependent(
        *arguments,
        tpu=functools.partial(run, geometry.tiles),
        default=functools.partial(run, geometry.rows),
    )


def _stream(
    program: "Program",
    overwrites: tuple[int, ...],
    codecs: tuple[Codec | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    pages: Pages,
    arrays: tuple[Stored, ...],
    gate: Int[Array, ""] | None,
    noise: tuple[UInt32[Array, "2"] | None, ...] | None,
    place: UInt32[Array, ""] | None,
) -> tuple[Stored, ...]:
    leaves = [
        Streamed.of(x, pages, codec, on_host(x))
        for x, codec in zip(arrays, codecs, strict=True)
    ]
    views = [leaf.view(x) for leaf, x in zip(leaves, arrays, strict=True)]
    targets = tuple(dict.fromkeys(overwrites))
    words = noise or (None,) * len(overwrites)
    shapes = () if pages.count else shapes
    results = _paged(
        program, overwrites, pages, leaves, views, gate, words, place, shapes
    )
    new = dict(zip(targets, results, strict=True))
    return tuple(leaves[p].restore(new[p]) for p in overwrites)


def _paged(
    program: "Program",
    overwrites: tuple[int, ...],
    pages: Pages,
    leaves: Sequence[Streamed],
    views: Sequence[Held],
    gate: Int[Array, ""] | None,
    words: Sequence[UInt32[Array, "2"] | None],
    place: UInt32[Array, ""] | None,
    shapes: Sequence[tuple[int, ...]] = (),
) -> tuple[Held, ...]:
    """The new views of the arrays that are overwritten.

    Where leaves of several shapes travel whole, `shapes` are theirs.
    """
    targets = tuple(dict.fromkeys(overwrites))
    coded = any(leaf.codec is not None for leaf in leaves)
    strides = strides_of(pages.view)

    def update(at: At, current: dict[int, Held]) -> dict[int, Held]:
        page_shape = pages.page(at.size)
        first = functools.reduce(
            lambda total, each: total + jnp.asarray(each[0], jnp.uint32) * each[1],
            zip(at.starts(pages), (np.uint32(n % 2**32) for n in strides), strict=True),
            jnp.uint32(0) if place is None else place,
        )

        def compute() -> tuple[Held, ...]:
            stored = [
                leaf.read(current[position], at)
                for position, leaf in enumerate(leaves[: program.inputs])
            ]
            stored = _fetched(stored, [leaf.travels for leaf in leaves[: len(stored)]])
            own = shapes or [page_shape] * len(stored)
            inputs = [
                leaf.decode(page, shape)
                for leaf, page, shape in zip(leaves, stored, own, strict=False)
            ]
            if coded:
                inputs = _on_cpu(lax.optimization_barrier, inputs)
            results = program(inputs, page_shape if program.elementwise else None)
            if coded:
                results = lax.optimization_barrier(results)
            return tuple(
                leaves[position].encode(
                    result, None if word is None else Noise(word, first, strides)
                )
                for position, result, word in zip(
                    overwrites, results, words, strict=True
                )
            )

        # Only what travels is kept apart from its neighbours; gradients and
        # parameters are read and written by the computation itself.
        results = _apart(compute) if pages.count > 1 else compute()
        results = _each(
            lax.optimization_barrier, results, [leaves[p].travels for p in overwrites]
        )
        written = {
            position: leaves[position].write(current[position], result, at)
            for position, result in zip(overwrites, results, strict=True)
        }
        return current | written

    def run(buffers: tuple[Held, ...]) -> tuple[Held, ...]:
        current = dict(enumerate(views)) | dict(zip(targets, buffers, strict=True))
        # What does not travel in pages, such as a leaf's few scales, travels before the
        # first page and after the last.
        current = {p: leaves[p].ahead(x) for p, x in current.items()}
        for sweep in _sweeps(pages):
            if sweep.stop == sweep.step:
                current = update(sweep.at(np.int32(0)), current)
            else:
                current = _swept(sweep, update, current, targets)
        return tuple(leaves[p].back(current[p]) for p in targets)

    buffers = tuple(views[position] for position in targets)
    kept_together = len(_sweeps(pages)) == 1 and pages.count > 1
    if gate is None and kept_together and not coded:
        return run(buffers)  # its own loop keeps it together
    trips = _open_gate() if gate is None else gate
    return lax.while_loop(
        lambda carry: carry[0] < trips,
        lambda carry: (carry[0] + 1, run(carry[1])),
        (jnp.int32(0), buffers),
    )[1]


class _Sweep(NamedTuple):
    """A loop over pages.

    Attributes:
      stop: Where the loop's variable ends; it begins at 0.
      step: By how much it grows.
      at: The page of each of its values.
    """

    stop: int
    step: int
    at: Callable[[Any], At]


def _sweeps(pages: Pages) -> list[_Sweep]:
    """The loops over full pages, and over the smaller last ones."""
    if pages.count <= 1:
        return [_Sweep(1, 1, lambda _: At(np.int32(0), pages.extent))]
    size, unit = pages.size, pages.unit
    full, left = divmod(pages.extent, size)
    step = size // unit
    start = lambda number: number if unit == 1 else number * np.int32(unit)
    found: list[_Sweep] = []
    if full:
        every = lambda number: At(start(number), size, number)
        found.append(_Sweep(full * step, step, every))
    if left:
        last = At(np.int32(full * size), left, np.int32(full * step))
        found.append(_Sweep(1, 1, lambda _: last))
    return found


def _swept(
    sweep: _Sweep,
    update: Callable[[At, dict[int, Held]], dict[int, Held]],
    current: dict[int, Held],
    targets: Sequence[int],
) -> dict[int, Held]:
    """Updates the pages of one loop."""
    constant = {p: x for p, x in current.items() if p not in targets}

    def next_page(carry: Any) -> Any:
        number, changing = carry
        changed = update(sweep.at(number), constant | changing)
        return number + sweep.step, {p: changed[p] for p in targets}

    _, changing = lax.while_loop(
        lambda carry: carry[0] < sweep.stop,
        next_page,
        (jnp.int32(0), {p: current[p] for p in targets}),
    )
    return constant | changing


@functools.partial(
    jax.jit, static_argnames=("program", "geometry", "dtype", "codec", "host", "shards")
)
def fill(
    arrays: tuple[Array, ...],
    noise: UInt32[Array, "2"] | None = None,
    *,
    program: "Program",
    geometry: Geometry,
    dtype: jnp.dtype,
    codec: Codec | None = None,
    host: bool = True,
    shards: Shards | None = None,
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

    Returns:
      The leaf.
    """
    run = functools.partial(_fill, program, dtype, codec, host)
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
    program: "Program",
    dtype: jnp.dtype,
    codec: Codec | None,
    host: bool,
    pages: Pages,
    arrays: tuple[Array, ...],
    noise: UInt32[Array, "2"] | None,
    place: UInt32[Array, ""] | None,
) -> tuple[Stored]:
    stored = jax.ShapeDtypeStruct(pages.leaf, dtype)
    if codec is not None:
        stored = codec.stored(pages.leaf)
    leaves = [Streamed.of(x, pages, None, on_host(x)) for x in arrays]
    views = [leaf.view(x) for leaf, x in zip(leaves, arrays, strict=True)]
    made = Streamed.of(stored, pages, codec, host).staged()
    (new,) = _paged(
        program,
        (len(arrays),),
        pages,
        [*leaves, made],
        [*views, made.blank()],
        None,
        [noise],
        place,
    )
    leaf = made.restore(new)
    return (jax.device_put(leaf, HOST) if host else leaf,)


def _each(
    function: Callable[[list[Held]], Sequence[Held]],
    values: Sequence[Held],
    chosen: Sequence[bool],
) -> list[Held]:
    """Applies a function to the chosen values together."""
    found = [x for x, yes in zip(values, chosen, strict=True) if yes]
    made = iter(function(found))
    return [next(made) if yes else x for x, yes in zip(values, chosen, strict=True)]


def _fetched(values: Sequence[Held], travelled: Sequence[bool]) -> list[Held]:
    """Pages from the host, kept apart from what is computed of them.

    On a TPU the results then take over the fetched pages (16 leaves of 4096x4096,
    8 MiB pages, v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
    """

    def fence(pages: list[Held]) -> Sequence[Held]:
        return lax.platform_dependent(
            pages, cpu=lambda pages: pages, default=lax.optimization_barrier
        )

    return _each(fence, values, travelled)


def _on_cpu(function: Callable[[Any], Any], values: Any) -> Any:
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


def _apart(compute: Callable[[], tuple[Held, ...]]) -> tuple[Held, ...]:
    """Calls a function so that XLA:CPU finishes it before its results are used."""
    if not _CPU_DROPS_BARRIERS:
        return compute()
    compute = jax.jit(compute, inline=True)  # so it is traced once for three uses

    def conditional() -> tuple[Held, ...]:
        shapes = jax.eval_shape(compute)
        always = lax.optimization_barrier(True)
        blank = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(always, compute, blank)

    return lax.platform_dependent(cpu=conditional, default=compute)
