"""The loop over the pages of a leaf, or of several leaves that share pages.

A page is read from host memory, decoded, computed, encoded, and written back in place.
Two schedules give the same numbers:

- **Serial**: each page is read, computed and written before the next one. The link
  works in one direction at a time.
- **Duplex** (`paged_optax.engine.exchange`): while a page is written, the next one is
  read, half of the moments at a time. A leaf of n pages takes (n + 1) / n of the time
  of the slower direction.

The last page has no successor to read. On a TPU a branch skips that read while the last
page is written. On a GPU, which waits for a branch, the last page is computed after the
loop. XLA:GPU before openxla/xla#46308 gets the next page's address wrong, and runs the
serial schedule. A CPU has no link.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jaxtyping import Int, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import barrier, on_platforms, unfused_on_cpu
from paged_optax.backend.types import Shape, varying, varying_axes
from paged_optax.codecs import Codec, Noise
from paged_optax.codecs.codec import get_strides
from paged_optax.engine.exchange import exchange, fenced, isolated
from paged_optax.engine.page_cuts import in_tiles
from paged_optax.engine.paged_array import (
    Arrays,
    Buffers,
    Fetched,
    LeafBuffers,
    PagedArray,
    Stored,
    StoredOrType,
    buffers_of,
    typed,
)
from paged_optax.engine.pages import CODEC_PAGE, Index, MomentFormat, Page, Pages
from paged_optax.engine.transfers import pieces_of, read_in_pieces, write_in_pieces

#: The buffers of each array of the program, by the array's position.
ByPosition = dict[int, LeafBuffers]

#: The fetched page of each array.
FetchedByPosition = dict[int, tuple[Fetched, ...]]


class LeafProgram(NamedTuple):
    """A leaf's program, and the storage of its arrays.

    The arrays are the program's arguments, then further arrays to overwrite.
    """

    program: Program
    overwrites: tuple[int, ...]  # for each result the array of its kind it replaces
    codecs: tuple[Codec | None, ...]  # of each array
    # Of each array as the program sees it, if leaves of several shapes travel whole.
    shapes: tuple[Shape, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A program's loop over the pages of one leaf, or of leaves that share pages.

    `random_bits` has for each result the random words of stochastic rounding, or None.
    `start` is the offset in the flattened leaf of this shard's first value; None: 0.
    `leaf_count` leaves share pages.
    """

    leaf: LeafProgram
    pages: Pages
    arrays: Sequence[PagedArray]
    random_bits: Sequence[UInt32[Array, "2"] | None]
    start: UInt32[Array, ""] | None
    leaf_count: int = 1

    @functools.cached_property
    def targets(self) -> tuple[int, ...]:
        """Positions of the arrays that are overwritten, each once."""
        return tuple(dict.fromkeys(self.leaf.overwrites))

    @functools.cached_property
    def coded(self) -> bool:
        """True if any array has a codec."""
        return any(codec is not None for codec in self.leaf.codecs)

    @functools.cached_property
    def exchanged(self) -> tuple[int, ...]:
        """Positions of the arrays whose pages travel both ways."""
        inputs = [p for p in self.targets if p < self.leaf.program.inputs]
        return tuple([p for p in inputs if self.arrays[p].streamed])

    @functools.cached_property
    def duplex(self) -> bool:
        """True if pages travel both ways at the same time."""
        written = sum([self.arrays[p].streamed for p in self.targets])
        alike = len(self.exchanged) == written
        return alike and self.pages.bidirectional(written * self.leaf_count)

    def __call__(
        self, buffers: Sequence[LeafBuffers], trip_count: Int[Array, ""] | None
    ) -> tuple[LeafBuffers, ...]:
        """Returns the new buffers of the overwritten arrays; `trip_count`: 0 skips."""
        args = tuple(buffers), tuple([buffers[p] for p in self.targets])
        ranges = self.pages.ranges
        # A single loop isolates the leaf by itself.
        looped = len(ranges) == 1 and self.pages.count > 1
        loop_isolates = looped and not self.coded and not self.duplex
        if trip_count is None and (loop_isolates or not self.pages.isolated):
            return self._all_pages(*args)
        # A GPU fuses nothing in an uninlined call outside of loops.
        in_loops = not self.pages.tiled and all(
            not equal.single and (not self.duplex or self._pieces_of(equal) > 1)
            for equal in ranges
        )
        return isolated(self._all_pages, trip_count, in_loops)(*args)

    def _pieces_of(self, equal: Page) -> int:
        """Returns the number of pieces of the first and of the last page."""
        if self.pages.tiled:
            return 1  # a TPU computes all pages in the loop
        # The loop's variable counts units. A piece has whole blocks of every array.
        unit = equal.size // equal.step
        block = math.lcm(*[one.block for array in self.arrays for one in array.parts])
        return pieces_of(equal.step, block // math.gcd(block, unit))

    def _all_pages(
        self, buffers: tuple[LeafBuffers, ...], overwritten: tuple[LeafBuffers, ...]
    ) -> tuple[LeafBuffers, ...]:
        arrays = self.arrays
        current = dict(enumerate(buffers))
        current |= dict(zip(self.targets, overwritten, strict=True))
        current = {p: arrays[p].preload(x) for p, x in current.items()}
        for equal in self.pages.ranges:
            if equal.single:
                current = self._page(self.pages.at(equal, np.int32(0)), current)
            elif not self.duplex:
                current = self._in_turn(equal, current)
            elif self.pages.tiled:
                current = self._duplex(equal, current)
            else:
                # XLA:CPU shares these pages with XLA:GPU, and has no link.
                current = lax.platform_dependent(
                    current,
                    cpu=functools.partial(self._in_turn, equal),
                    default=functools.partial(self._duplex, equal),
                )
        return tuple([arrays[p].unload(current[p]) for p in self.targets])

    def _in_turn(self, equal: Page, current: ByPosition) -> ByPosition:
        """Updates equal pages, one after the other."""
        constant = {p: x for p, x in current.items() if p not in self.targets}

        def next_page(
            carry: tuple[Int[Array, ""], ByPosition],
        ) -> tuple[Int[Array, ""], ByPosition]:
            index, changing = carry
            changed = self._page(self.pages.at(equal, index), constant | changing)
            return index + equal.step, {p: changed[p] for p in self.targets}

        start = jnp.int32(0), {p: current[p] for p in self.targets}
        _, changing = lax.while_loop(
            lambda carry: carry[0] < equal.stop, next_page, start
        )
        return constant | changing

    def _page(self, at: Page, current: ByPosition) -> ByPosition:
        """Reads a page, computes it, and writes it back."""
        compute = functools.partial(self._compute, at, current, {})
        if self.pages.count > 1:
            # Else reads of one page fuse with writes of others, and the leaf is copied.
            compute = unfused_on_cpu(compute)
        results = compute()
        # Only streamed pages are fenced; gradients and parameters are read and written
        # by the computation itself.
        streamed = [self.arrays[p].streamed for p in results]
        values = fenced([*results.values()], streamed)
        return self._write(at, current, dict(zip(results, values, strict=True)))

    def _duplex(self, equal: Page, current: ByPosition) -> ByPosition:
        """Updates equal pages: while one is written, the next one is read."""
        step = np.int32(equal.step)
        last = np.int32(equal.stop - equal.step)
        once = self.pages.tiled  # the loop computes all pages
        pieces, stop = self._pieces_of(equal), equal.stop if once else last
        piece_step = np.int32(equal.step // pieces)
        constant = {p: x for p, x in current.items() if p not in self.targets}
        address = functools.partial(self.pages.at, equal)

        def next_page(
            carry: tuple[Int[Array, ""], ByPosition, FetchedByPosition],
        ) -> tuple[Int[Array, ""], ByPosition, FetchedByPosition]:
            # It counts iterations, not rows. XLA copies a row that is incremented in
            # place, and the next page is then read after this one is written.
            iteration, changing, page = carry
            index = iteration * step
            at, next_at = address(index), address(index + step)
            buffers = constant | changing
            results = self._compute(at, buffers, page)
            changed = self._write(at, buffers, results, streamed=False)
            more = index < last if once else None
            changed, page = exchange(
                self.arrays, self.exchanged, changed, results, at, next_at, page, more
            )
            return iteration + 1, {p: changed[p] for p in self.targets}, page

        def fetch(iteration: Index) -> FetchedByPosition:
            at = address(np.int32(0) + iteration * piece_step, pieces)
            return self._fetch(at, current, self.exchanged)

        def write(
            iteration: Index, changing: ByPosition, page: FetchedByPosition
        ) -> ByPosition:
            at = address(last + iteration * piece_step, pieces)
            buffers = constant | changing
            changed = self._write(at, buffers, self._compute(at, buffers, page))
            return {p: changed[p] for p in self.targets}

        changing = {p: current[p] for p in self.targets}
        _, changing, page = lax.while_loop(
            lambda carry: carry[0] < stop // step,
            next_page,
            (jnp.int32(0), changing, read_in_pieces(pieces, fetch)),
        )
        if not once:
            changing = write_in_pieces(pieces, write, changing, page)
        return constant | changing

    def _fetch(
        self, at: Page, current: ByPosition, positions: Iterable[int]
    ) -> FetchedByPosition:
        return {
            p: tuple([self.arrays[p].fetch(x, at) for x in current[p]])
            for p in positions
        }

    def _write(
        self,
        at: Page,
        current: ByPosition,
        results: ByPosition,
        streamed: bool | None = None,
    ) -> ByPosition:
        """Returns the buffers with a page replaced; see `PagedArray.write`."""
        changed = {}
        for p, pages in results.items():
            write = functools.partial(self.arrays[p].write, at=at, streamed=streamed)
            changed[p] = tuple(map(write, current[p], pages))
        return current | changed

    def _compute(
        self, at: Page, current: ByPosition, page: FetchedByPosition
    ) -> ByPosition:
        """Computes the encoded results of a page; `page`: its fetched buffers."""
        # Noise depends on the offset of the page's first value in the flattened leaf.
        offset = jnp.uint32(0) if self.start is None else self.start
        strides = get_strides(self.pages.view)
        for start, stride in zip(self.pages.starts(at), strides, strict=True):
            offset += jnp.asarray(start, jnp.uint32) * np.uint32(stride % 2**32)
        noise = [
            None if words is None else Noise(words, offset, strides)
            for words in self.random_bits
        ]
        # A fence separates fetched pages from the computation. On a TPU the results
        # then take over the pages that were read (16 leaves of 4096x4096, 8 MiB pages,
        # v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
        inputs = range(self.leaf.program.inputs)
        page = page | self._fetch(at, current, [p for p in inputs if p not in page])
        same = lambda page: page
        page = lax.platform_dependent(page, cpu=same, default=barrier)
        stored = [
            tuple(map(functools.partial(self.arrays[p].read, at), current[p], page[p]))
            for p in inputs
        ]
        # Without a codec the program runs once for each leaf, and nothing is copied.
        # With one the leaves' pages are joined, and it runs once.
        count = self.leaf_count if self.coded else 1
        leaves = lambda x, first: x if len(x) == 1 else x[first : first + count]
        by_group = [
            self._results([leaves(x, first) for x in stored], at, noise, count)
            for first in range(0, self.leaf_count, count)
        ]
        results = [sum(pages, ()) for pages in zip(*by_group, strict=True)]
        # A result of constants varies along no axis, and its buffer may.
        return {
            p: varying(x, varying_axes(current[p]))
            for p, x in zip(self.leaf.overwrites, results, strict=True)
        }

    def _results(
        self,
        stored: Sequence[LeafBuffers],
        at: Page,
        noise: Sequence[Noise | None],
        leaf_count: int,
    ) -> Sequence[LeafBuffers]:
        """Computes the encoded results of a page of one leaf, or of several joined."""
        shape = self.pages.page(at.size)
        program, overwrites, _, shapes = self.leaf
        # The program sees the shapes of leaves that travel whole.
        if self.pages.count or not shapes:
            shapes = [shape] * len(stored)
        inputs: list[Array] = []
        # Arrays after the program's inputs are only overwritten, and not `stored`.
        for array, x, seen in zip(self.arrays, stored, shapes, strict=False):
            if (parts := self._codec_pages(array, seen)) is None:
                inputs.append(array.decode(x, seen))
            else:
                inputs += _by_pages(parts, array, array.as_stored(x[0], seen), False)
        if self.coded:
            inputs = on_platforms("cpu", barrier, inputs)
        merged = self.pages.page(at.size, leaf_count) if program.elementwise else None
        results = program(inputs, merged)
        if self.coded:
            # A fence around the update makes the codes of a page equal to those of the
            # whole leaf: XLA:CPU contracts products and sums as they are fused. A TPU
            # needs it too: (128256, 4096) in four bits took 34 MiB of scratch, not 2,
            # when the loop wrote the update as it computed the codes (libtpu 0.0.52).
            # On a GPU it would be one more kernel for a page.
            results = on_platforms("cpu tpu", barrier, results)
            coded = [self.arrays[p].codec is not None for p in overwrites]
            results = fenced(results, coded)
        encoded: list[LeafBuffers] = []
        for p, result, drawn in zip(overwrites, results, noise, strict=True):
            array = self.arrays[p]
            if (parts := self._codec_pages(array, result.shape)) is None:
                encoded.append(array.encode(result, drawn, shape, leaf_count))
            else:
                encoded.append((_by_pages(parts, array, result, True),))
        return encoded

    def _codec_pages(self, array: PagedArray, shape: Shape) -> Pages | None:
        """Returns parts in which a TPU computes a codec on a leaf of one page, or None.

        XLA:TPU takes longer to compile larger arrays: Adafactor with a momentum of
        (6144, 50432) in eight bits takes more than 150 s (libtpu 0.0.52).
        """
        codec = array.codec
        one_page = self.pages.tiled and self.pages.count <= 1 and self.leaf_count == 1
        if not one_page or codec is None or codec.block == 1 or codec.draws:
            return None
        pages = in_tiles(shape, (MomentFormat(4, codec, on_host=False),), CODEC_PAGE)
        return pages if pages.count > 1 else None


def update_leaves(
    leaves: Sequence[tuple[StoredOrType, ...]],
    trip_count: Int[Array, ""] | None,
    random_bits: Sequence[UInt32[Array, "2"] | None] | None,
    start: UInt32[Array, ""] | None = None,
    *,
    leaf: LeafProgram,
    pages: Pages,
    axes: frozenset[str] = frozenset(),
) -> list[Arrays]:
    """Updates leaves that share pages; `start`: see `Loop`.

    An array that is given as a `ShapedArray` is new: it is allocated in its memory, and
    varies along `axes` and those of the other arrays. Parts of it that do not travel in
    pages are returned in device memory.
    """
    arrays = [
        PagedArray.create(x, pages, codec, on_host(x), len(leaves))
        for x, codec in zip(leaves[0], leaf.codecs, strict=True)
    ]
    is_new = lambda x: isinstance(jax.tree.leaves(x)[0], ShapedArray)
    pairs = zip(arrays, leaves[0], strict=True)
    arrays = [array.staged() if is_new(x) else array for array, x in pairs]
    axes |= varying_axes(leaves)
    buffers = [
        tuple([array.open(x, axes) for x in (xs if array.per_leaf else xs[:1])])
        for array, xs in zip(arrays, zip(*leaves, strict=True), strict=True)
    ]
    words = random_bits or (None,) * len(leaf.overwrites)
    loop = Loop(leaf, pages, arrays, words, start, len(leaves))
    new = dict(zip(loop.targets, loop(buffers, trip_count), strict=True))
    return [
        tuple([arrays[p].close(new[p][index]) for p in leaf.overwrites])
        for index in range(len(leaves))
    ]


def _by_pages(pages: Pages, array: PagedArray, x: Stored, encode: bool) -> Buffers:
    """Encodes or decodes a moment on the device, page by page."""
    codec = array.codec
    assert codec is not None
    plain = jax.ShapeDtypeStruct(pages.leaf, jnp.float32)
    new = typed(codec.stored(pages.leaf) if encode else plain, host=False)
    codecs = (None, codec) if encode else (codec, None)
    leaf = LeafProgram(Program(1, (), (0,), elementwise=True), (1,), codecs)
    ((result,),) = update_leaves([(x, new)], None, None, leaf=leaf, pages=pages)
    return buffers_of(result)
