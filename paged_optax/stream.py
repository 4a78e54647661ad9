"""Pages of one leaf through the device.

A page is read from host memory, computed on, and written back over itself, inside
one loop a leaf. Two choices keep this right and small on every compiler at hand:

- **The loop's own variable is the index.** It counts rows, not pages: it starts at
  0 and steps by the rows of a page, so that the slice's start needs no arithmetic.
  XLA:GPU before openxla/xla#46308 derives a transfer's address from the induction
  variable alone and ignores what is computed from it; with this form its transfer
  descriptors cover exactly the page in jax 0.10.2 and in 0.12.0.1. No reshape is
  needed either: a last page of fewer rows is one more access at a fixed row.
- **A leaf of a single page sits behind a gate**: a loop whose trip count the compiler
  cannot see. Nothing of the leaf is hoisted out of it, so such leaves stay one at a
  time too (16 leaves of 64 MiB: 256 MiB of scratch on H200 and v5e instead of 2176).
  A gate given from outside as 0 moves no byte.

This module knows nothing of Optax.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, UInt32

from paged_optax.codecs import Codec, Noise, Quantized, are_by_columns
from paged_optax.memory import DEVICE, HOST, on_host
from paged_optax.plan import Pages, whole
from paged_optax.sharding import Place, Shards, on_shards

if TYPE_CHECKING:
    from paged_optax.granularity import Program

#: An array, or what a codec stores in its place.
Stored = Array | Quantized[Array]

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
        "pages",
        "codecs",
        "whole_bytes",
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
    pages: Pages,
    codecs: tuple[Codec | None, ...] = (),
    whole_bytes: bool | None = None,
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
      pages: The geometry; of one shard, where there are shards.
      codecs: What stores each of `arrays`, or None; empty where nothing is coded.
      whole_bytes: Whether codes of one byte travel whole, before the first page and
        after the last. None: on TPUs alone, where XLA cannot slice a host array of
        them: it copies all of it to the device and back, in another tiling, for each
        page (libtpu 0.0.51).
      shards: How the leaf is divided over a mesh: each device pages its own shard.

    Returns:
      The new arrays, in the order of the results, each in the memory space of the
      array it replaces.
    """
    codecs = codecs or (None,) * len(arrays)
    if shards is not None:

        def on_one(place: Place, arrays: Any, scalars: Any) -> tuple[Stored, ...]:
            gate, noise = scalars
            noise = jax.tree.map(lambda words: words + place.part, noise)
            return stream(
                arrays,
                gate,
                noise,
                place.start,
                program=program,
                overwrites=overwrites,
                pages=pages,
                codecs=codecs,
            )

        return on_shards(
            on_one, shards, arrays, codecs, pages.leaf, overwrites, (gate, noise)
        )
    if not pages.aligned:
        again = functools.partial(
            stream, program=program, overwrites=overwrites, codecs=codecs
        )
        return lax.platform_dependent(
            arrays,
            gate,
            noise,
            place,
            tpu=functools.partial(again, pages=whole(pages.leaf)),
            default=functools.partial(
                again, pages=dataclasses.replace(pages, aligned=True)
            ),
        )
    if whole_bytes is None and any(codecs) and pages.count > 1:
        again = functools.partial(
            stream, program=program, overwrites=overwrites, pages=pages, codecs=codecs
        )
        return lax.platform_dependent(
            arrays,
            gate,
            noise,
            place,
            tpu=functools.partial(again, whole_bytes=True),
            default=functools.partial(again, whole_bytes=False),
        )
    targets = tuple(dict.fromkeys(overwrites))
    leaves = [
        _Leaf(x, pages, codec, bool(whole_bytes))
        for x, codec in zip(arrays, codecs, strict=True)
    ]
    words = noise or (None,) * len(overwrites)

    def update(
        start: Int[Array, ""] | int, size: int, current: dict[int, _Held]
    ) -> dict[int, _Held]:
        page_shape = _page_shape(pages, size)

        def compute() -> tuple[_Held, ...]:
            stored = [
                leaf.read(current[position], start, size)
                for position, leaf in enumerate(leaves[: program.inputs])
            ]
            stored = _fetched(stored, [leaf.travels for leaf in leaves[: len(stored)]])
            inputs = [
                leaf.decode(page, page_shape)
                for leaf, page in zip(leaves, stored, strict=False)
            ]
            if any(codecs):
                inputs = _on_cpu(lax.optimization_barrier, inputs)
            results = program(inputs, page_shape if program.elementwise else None)
            if any(codecs):
                results = lax.optimization_barrier(results)
            return tuple(
                leaves[position].encode(result, start, word, place)
                for position, result, word in zip(
                    overwrites, results, words, strict=True
                )
            )

        # Only what travels is kept apart from its neighbours; gradients and
        # parameters are read and written by the computation itself.
        sliced = pages.count > 0 and size < pages.view[pages.axis]
        results = _apart(compute) if sliced else compute()
        results = _each(
            lax.optimization_barrier, results, [leaves[p].travels for p in overwrites]
        )
        written = {
            position: leaves[position].write(current[position], result, start, size)
            for position, result in zip(overwrites, results, strict=True)
        }
        return current | written

    extent = pages.view[pages.axis] if pages.count else 1
    size = pages.size if pages.count else 1
    full = extent - extent % size

    def run(buffers: tuple[_Held, ...]) -> tuple[_Held, ...]:
        views = [leaf.view for leaf in leaves]
        views = dict(enumerate(views)) | dict(zip(targets, buffers, strict=True))
        # Scales are few: those of a leaf travel together, before its first page and
        # after its last.
        views = {p: leaves[p].ahead(x, DEVICE) for p, x in views.items()}
        if full == size:
            views = update(0, size, views)
        else:
            constant = {p: x for p, x in views.items() if p not in targets}

            def next_page(carry: Any) -> Any:
                start, changing = carry
                changed = update(start, size, constant | changing)
                return start + size, {p: changed[p] for p in targets}

            _, changing = lax.while_loop(
                lambda carry: carry[0] < full,
                next_page,
                (jnp.int32(0), {p: views[p] for p in targets}),
            )
            views = constant | changing
        if extent > full:
            views = update(full, extent - full, views)
        return tuple(leaves[p].ahead(views[p], HOST) for p in targets)

    buffers = tuple(leaves[position].view for position in targets)
    if gate is None and size < extent == full and not any(codecs):
        buffers = run(buffers)  # its own loop keeps it together
    else:
        trips = _open_gate() if gate is None else gate
        _, buffers = lax.while_loop(
            lambda carry: carry[0] < trips,
            lambda carry: (carry[0] + 1, run(carry[1])),
            (jnp.int32(0), buffers),
        )
    written = dict(zip(targets, buffers, strict=True))
    return tuple(leaves[p].restore(written[p]) for p in overwrites)


class _Held(NamedTuple):
    """What is held of a leaf or a page: codes and scales, or an array without scales.

    Attributes:
      codes: The codes, or the array itself.
      scales: One a block of a `Quantized`; None where there are no blocks.
    """

    codes: Array
    scales: Array | None


class _Leaf:
    """One array of a leaf, or what a codec stores of it, seen page by page.

    Attributes:
      view: The array under the shape that pages are cut from.
      travels: Whether its pages come from host memory.
    """

    def __init__(self, x: Stored, pages: Pages, codec: Codec | None, whole_bytes: bool):
        self.pages, self.codec = pages, codec
        self.by_columns = codec is not None and are_by_columns(codec)
        stored = (
            _Held(x.codes, x.scales) if isinstance(x, Quantized) else _Held(x, None)
        )
        self.shape = stored.codes.shape
        self.is_hosted = on_host(stored.codes)
        byte = codec is not None and stored.codes.dtype.itemsize == 1
        self.travels = self.is_hosted and not (whole_bytes and byte)
        self.paged = pages.count > 0 and (codec is not None or self.shape == pages.leaf)
        self.view = stored
        if self.paged:
            # A codec may put several values of the last axis into one.
            last = pages.view[-1:] if self.shape == pages.leaf else self.shape[-1:]
            codes = stored.codes.reshape(*pages.view[:-1], *last)
            self.view = stored._replace(codes=codes)

    def restore(self, x: _Held) -> Stored:
        """What was given, back in its own shape."""
        codes = x.codes.reshape(self.shape)
        return codes if x.scales is None else Quantized(codes, x.scales)

    def read(self, x: _Held, start: Int[Array, ""] | int, size: int) -> _Held:
        """A page as it is stored, in device memory."""
        codes, scales = x
        if self._sliced(size):
            codes = lax.dynamic_slice_in_dim(codes, start, size, self.pages.axis)
            if scales is not None:
                first, count, axis = self._blocks(start, size)
                scales = lax.dynamic_slice_in_dim(scales, first, count, axis)
        return _Held(jax.device_put(codes, DEVICE) if self.travels else codes, scales)

    def write(
        self, x: _Held, page: _Held, start: Int[Array, ""] | int, size: int
    ) -> _Held:
        """The array with a page of it replaced."""
        codes, scales = page
        if not self._sliced(size):
            return _Held(jax.device_put(codes, HOST) if self.travels else codes, scales)
        put = functools.partial(self._put, start=start)
        if self.travels and size % 8:
            codes = lax.platform_dependent(
                x.codes,
                codes,
                tpu=functools.partial(put, sizes=_binary(size)),
                default=functools.partial(put, sizes=[size]),
            )
        else:
            codes = put(x.codes, codes, sizes=[size])
        if scales is not None and x.scales is not None:
            first, _, axis = self._blocks(start, size)
            scales = lax.dynamic_update_slice_in_dim(x.scales, scales, first, axis)
        return _Held(codes, scales)

    def _put(
        self, x: Array, page: Array, start: Int[Array, ""] | int, sizes: Sequence[int]
    ) -> Array:
        """Writes a page in pieces of these sizes."""
        axis = self.pages.axis
        done = 0
        for size in sizes:
            piece = page
            if size < page.shape[axis]:
                piece = lax.slice_in_dim(page, done, done + size, axis=axis)
            piece = jax.device_put(piece, HOST) if self.travels else piece
            x = lax.dynamic_update_slice_in_dim(x, piece, start + done, axis)
            done += size
        return x

    def decode(self, page: _Held, shape: tuple[int, ...]) -> Array:
        """What the program sees of a page."""
        if self.codec is None:
            return page.codes
        stored = page.codes if page.scales is None else Quantized(*page)
        return self.codec.decode(stored, shape)

    def encode(
        self,
        page: Array,
        start: Int[Array, ""] | int,
        words: Array | None,
        place: UInt32[Array, ""] | None,
    ) -> _Held:
        """What is stored of a result."""
        if self.codec is None:
            return _Held(page, None)
        first = jnp.asarray(start, jnp.uint32) * np.uint32(self._values % 2**32)
        first = first if place is None else first + place
        noise = None if words is None else Noise(words, first)
        stored = self.codec.encode(page, noise)
        if isinstance(stored, Quantized):
            return _Held(stored.codes, stored.scales)
        return _Held(stored, None)

    def ahead(self, x: _Held, space: Any) -> _Held:
        """Brings what does not travel in pages to the device, or back home."""
        codes, scales = x
        home = space == HOST
        if self.by_columns and home and scales is not None:
            scales = scales.reshape(scales.shape[0], *self.shape[:-1])
        if self.is_hosted:
            codes = codes if self.travels else jax.device_put(codes, space)
            scales = scales if scales is None else jax.device_put(scales, space)
        if self.by_columns and not home and scales is not None:
            # Only now: in host memory XLA:TPU does not turn one tiling into another.
            rows = self.pages.view[:-1] if self.paged else self.shape[:-1]
            scales = scales.reshape(scales.shape[0], *rows)
        return _Held(codes, scales)

    def _sliced(self, size: int) -> bool:
        return self.paged and size < self.pages.view[self.pages.axis]

    @property
    def _values(self) -> int:
        """Values of one entry along the axis that is cut."""
        pages = self.pages
        return math.prod(pages.view[pages.axis + 1 :]) if pages.count else 1

    def _blocks(self, start: Int[Array, ""] | int, size: int) -> tuple[Any, int, int]:
        """The first scales of a page, how many it has, and along which axis."""
        assert self.codec is not None
        if self.by_columns:
            return start, size, self.pages.axis + 1
        together = math.gcd(self.codec.block, self._values)
        entries = self.codec.block // together  # that are whole blocks
        first = start // np.int32(entries) * np.int32(self._values // together)
        return first, -(-size * self._values // self.codec.block), 0


@functools.partial(
    jax.jit, static_argnames=("program", "pages", "dtype", "codec", "host", "shards")
)
def fill(
    arrays: tuple[Array, ...],
    noise: UInt32[Array, "2"] | None = None,
    *,
    program: "Program",
    pages: Pages,
    dtype: jnp.dtype,
    codec: Codec | None = None,
    host: bool = True,
    shards: Shards | None = None,
) -> Stored:
    """Makes one leaf, page by page.

    `lax.empty` moved to the host allocates there and nowhere else, on both
    accelerators (jax 0.10.2, 0.12.0.1), so that the leaf never exists on the device.

    Args:
      arrays: The program's arguments.
      noise: The random words that the codec rounds by, or None.
      program: What makes a page; its only result is the leaf.
      pages: The geometry; of one shard, where there are shards.
      dtype: The leaf's dtype, as the program makes it.
      codec: What stores it, or None.
      host: Whether it is made in host memory.
      shards: How the leaf is divided over a mesh: each device makes its own shard.

    Returns:
      The leaf.
    """
    if shards is not None:

        def run(place: Place, arrays: Any, noise: Any) -> tuple[Stored]:
            made = fill(
                arrays,
                noise,
                program=program,
                pages=pages,
                dtype=dtype,
                codec=codec,
                host=host,
            )
            return (made,)

        codecs = [None] * len(arrays)
        shape = tuple(n * d for n, d in zip(pages.leaf, shards.divisions, strict=True))
        like = jax.ShapeDtypeStruct(shape, dtype)
        result = codec, shards.stored(codec, shape) if codec else like
        (leaf,) = on_shards(run, shards, arrays, codecs, pages.leaf, [result], noise)
        return leaf
    stored = jax.ShapeDtypeStruct(pages.leaf, dtype)
    if codec is not None:
        stored = codec.stored(pages.leaf)
    blank = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), stored)
    (leaf,) = stream(
        (*arrays, jax.device_put(blank, HOST) if host else blank),
        None,
        None if noise is None else (noise,),
        None,
        program=program,
        overwrites=(len(arrays),),
        pages=pages,
        codecs=(*[None] * len(arrays), codec),
    )
    return leaf


def _binary(size: int) -> list[int]:
    """A number of rows as multiples of 8, and powers of two.

    XLA:TPU writes no others to the host (libtpu 0.0.52: "Updating the sublane dimension
    across multiple lane chunks is only supported when the sublane update size is a
    multiple of the chunk sublane size").
    """
    return [n for n in (size // 8 * 8, size & 4, size & 2, size & 1) if n]


def _page_shape(pages: Pages, size: int) -> tuple[int, ...]:
    if not pages.count:
        return pages.leaf
    return (*pages.view[: pages.axis], size, *pages.view[pages.axis + 1 :])


def _each(
    function: Callable[[list[_Held]], Sequence[_Held]],
    values: Sequence[_Held],
    chosen: Sequence[bool],
) -> list[_Held]:
    """Applies a function to the chosen values together."""
    found = [x for x, yes in zip(values, chosen, strict=True) if yes]
    made = iter(function(found))
    return [next(made) if yes else x for x, yes in zip(values, chosen, strict=True)]


def _fetched(values: Sequence[_Held], travelled: Sequence[bool]) -> list[_Held]:
    """Pages from the host, kept apart from what is computed of them.

    On a TPU the results then take over the fetched pages (16 leaves of 4096x4096,
    8 MiB pages, v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
    """

    def fence(pages: list[_Held]) -> Sequence[_Held]:
        return lax.platform_dependent(
            pages, cpu=lambda pages: pages, default=lax.optimization_barrier
        )

    return _each(fence, values, travelled)


def _on_cpu(function: Callable[[Any], Any], values: Any) -> Any:
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


def _apart(compute: Callable[[], tuple[_Held, ...]]) -> tuple[_Held, ...]:
    """Calls a function so that XLA:CPU finishes it before its results are used."""
    if not _CPU_DROPS_BARRIERS:
        return compute()

    def conditional() -> tuple[_Held, ...]:
        shapes = jax.eval_shape(compute)
        always = lax.optimization_barrier(True)
        blank = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(always, compute, blank)

    return lax.platform_dependent(cpu=conditional, default=compute)
