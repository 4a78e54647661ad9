"""A program's run over the pages of a leaf, or of like leaves that share pages.

A page is read from host memory, computed on, and written back over itself. Two ways do
it, and give the same numbers:

- **In turn**: each page is read, computed and written before the next one. The link
  works in one direction at a time.
- **Duplex**: while a page is written, the next one is read, one moment at a time: `mu`
  in while `nu` goes out, then `nu` in while `mu` goes out. No buffer is read and
  written at once, because XLA would copy it. A leaf of n pages takes (n + 1) / n of
  the time that the slower direction needs.

After the last page nothing is left to read. On a TPU a branch skips that read while the
last page is written. On a GPU the last page is computed apart: a transfer's address
is known there only where it is linear in a loop's variable, and a branch would wait
for the host (`paged_optax.engine.ends`). XLA:GPU before openxla/xla#46308 does not know
the address of the page ahead either: there pages go in turn. On a CPU nothing travels.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, UInt32

from paged_optax.analysis.program import Program
from paged_optax.backend.barriers import barrier, on_cpu, unfused_on_cpu
from paged_optax.backend.meshes import varying, varying_axes
from paged_optax.codecs import Codec, Noise, Quantized
from paged_optax.codecs.codec import strides_of
from paged_optax.engine.ends import pieces_of, read_first, update_last
from paged_optax.engine.exchange import Exchange
from paged_optax.engine.fences import each, fetched
from paged_optax.engine.kept_apart import kept_apart
from paged_optax.engine.page_loops import (
    PageLoop,
    both_ways,
    page_loops,
    run_page_loop,
)
from paged_optax.engine.page_shapes import PIECE
from paged_optax.engine.page_size import cut
from paged_optax.engine.pages import Pages, Storage
from paged_optax.engine.streamed import Buffers, LeafBuffers, Streamed
from paged_optax.engine.transfer import PageAddress

#: The loop's variable, the arrays that change, and the page that has been read.
Carry = tuple[Int[Array, ""], dict[int, LeafBuffers], dict[int, LeafBuffers]]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A program's run over one leaf, or over like leaves that share pages.

    Attributes:
      program: What to compute on a page.
      overwrites: For each of its results the position of the array it replaces.
      pages: How the leaf is cut.
      leaves: How each array lies in the pages.
      words: For each result the random words that its codec rounds by, or None.
      place: The position in the flattened leaf of the first value here; None: 0.
      shapes: What the program sees of each array, where leaves of several shapes
        travel whole; else empty.
      together: How many leaves share pages.
    """

    program: Program
    overwrites: tuple[int, ...]
    pages: Pages
    leaves: Sequence[Streamed]
    words: Sequence[UInt32[Array, "2"] | None]
    place: UInt32[Array, ""] | None
    shapes: Sequence[tuple[int, ...]] = ()
    together: int = 1

    @property
    def targets(self) -> tuple[int, ...]:
        """The arrays that are overwritten, each once."""
        return tuple(dict.fromkeys(self.overwrites))

    @property
    def coded(self) -> bool:
        """Whether a codec stores any of the arrays."""
        return any(leaf.codec is not None for leaf in self.leaves)

    @property
    def streams(self) -> tuple[int, ...]:
        """The arrays whose pages travel both ways."""
        return tuple(
            p
            for p in self.targets
            if p < self.program.inputs and self.leaves[p].travels
        )

    @property
    def duplex(self) -> bool:
        """Whether pages travel both ways at once where they travel."""
        written = sum(self.leaves[p].travels for p in self.targets)
        alike = len(self.streams) == written
        return alike and both_ways(self.pages, written * self.together)

    def __call__(
        self, views: Sequence[LeafBuffers], gate: Int[Array, ""] | None
    ) -> tuple[LeafBuffers, ...]:
        """The new views of the arrays that are overwritten.

        Args:
          views: The view of each array, of each leaf that has its own.
          gate: How often to run; None: once.
        """
        given = tuple(views), tuple(views[position] for position in self.targets)
        if gate is None and (self._one_loop or self.pages.ungated):
            return self._all_pages(*given)
        return kept_apart(self._all_pages, given, gate, self._loops)

    @property
    def _one_loop(self) -> bool:
        """Whether one loop does all, and keeps the leaf together by itself."""
        looped = len(page_loops(self.pages)) == 1 and self.pages.count > 1
        return looped and not self.coded and not self.duplex

    @property
    def _loops(self) -> bool:
        """Whether a GPU computes every page in a loop: outside, it fuses nothing."""
        loops = page_loops(self.pages)
        divided = not self.duplex or all(self._pieces_of(loop) > 1 for loop in loops)
        looped = divided and all(loop.stop > loop.step for loop in loops)
        return looped and not self.pages.tiled

    def _pieces_of(self, loop: PageLoop) -> int:
        """In how many pieces the first and the last page of a loop are moved."""
        unit = loop.at(np.int32(0)).size // loop.step
        whole = lambda size: all(leaf.divides(size * unit) for leaf in self.leaves)
        return pieces_of(loop.step, whole)

    def _all_pages(
        self, views: tuple[LeafBuffers, ...], buffers: tuple[LeafBuffers, ...]
    ) -> tuple[LeafBuffers, ...]:
        targets, leaves = self.targets, self.leaves
        current = dict(enumerate(views)) | dict(zip(targets, buffers, strict=True))
        # What does not travel in pages, such as a leaf's few scales, travels before the
        # first page and after the last.
        current = {p: tuple(map(leaves[p].ahead, x)) for p, x in current.items()}
        for loop in page_loops(self.pages):
            if loop.stop == loop.step:
                current = self._page(loop.at(np.int32(0)), current)
            else:
                current = self._swept(loop, current)
        return tuple(tuple(map(leaves[p].back, current[p])) for p in targets)

    def _swept(
        self, loop: PageLoop, current: dict[int, LeafBuffers]
    ) -> dict[int, LeafBuffers]:
        """Updates the pages of one loop."""
        in_turn = functools.partial(
            run_page_loop, loop, self._page, targets=self.targets
        )
        if not self.duplex:
            return in_turn(current)
        if self.pages.tiled:
            return self._duplex(loop, current)
        duplex = functools.partial(self._duplex, loop)
        return lax.platform_dependent(current, cpu=in_turn, default=duplex)

    def _page(
        self, at: PageAddress, current: dict[int, LeafBuffers]
    ) -> dict[int, LeafBuffers]:
        """Reads a page, computes it, and writes it back."""
        compute = functools.partial(self._compute, at, current, self._first(at))
        # Only what travels is kept apart from its neighbours; gradients and
        # parameters are read and written by the computation itself.
        results = unfused_on_cpu(compute) if self.pages.count > 1 else compute()
        travels = [self.leaves[p].travels for p in self.overwrites]
        results = each(barrier, results, travels)
        found = dict(zip(self.overwrites, results, strict=True))
        return self._written(at, current, found)

    def _written(
        self,
        at: PageAddress,
        current: dict[int, LeafBuffers],
        results: dict[int, LeafBuffers],
    ) -> dict[int, LeafBuffers]:
        """The arrays, some of them with a page replaced."""
        write = lambda p: functools.partial(self.leaves[p].write, at=at)
        written = {
            p: tuple(map(write(p), current[p], pages)) for p, pages in results.items()
        }
        return current | written

    def _read(
        self, p: int, at: PageAddress, current: dict[int, LeafBuffers]
    ) -> LeafBuffers:
        """A page of an array, as it is stored."""
        return tuple(self.leaves[p].read(x, at) for x in current[p])

    def _duplex(
        self, loop: PageLoop, current: dict[int, LeafBuffers]
    ) -> dict[int, LeafBuffers]:
        """Updates the pages of one loop: while one is written, the next one is read."""
        step, last = np.int32(loop.step), np.int32(loop.stop - loop.step)
        once = self.pages.tiled  # all pages are computed by the loop
        constant = {p: x for p, x in current.items() if p not in self.targets}
        exchange = Exchange(self.leaves, self.streams, self.together)

        def next_page(carry: Carry) -> Carry:
            number, changing, page = carry
            at, ahead = loop.at(number), loop.at(number + step)
            changed, results = self._computed(at, constant | changing, page)
            more = number < last if once else None
            changed, page = exchange(changed, results, at, ahead, page, more)
            return number + step, {p: changed[p] for p in self.targets}, page

        stop = loop.stop if once else last
        read = lambda at: {p: self._read(p, at, current) for p in self.streams}
        first = loop.at(np.int32(0))
        _, changing, page = lax.while_loop(
            lambda carry: carry[0] < stop,
            next_page,
            (
                jnp.int32(0),
                {p: current[p] for p in self.targets},
                read(first) if once else read_first(loop, self._pieces_of(loop), read),
            ),
        )
        if once:
            return constant | changing

        def update(
            at: PageAddress,
            changing: dict[int, LeafBuffers],
            page: dict[int, LeafBuffers],
        ) -> dict[int, LeafBuffers]:
            changed, results = self._computed(at, constant | changing, page)
            changed = self._written(at, changed, results)
            return {p: changed[p] for p in self.targets}

        return constant | update_last(
            loop, self._pieces_of(loop), update, changing, page
        )

    def _computed(
        self,
        at: PageAddress,
        current: dict[int, LeafBuffers],
        page: dict[int, LeafBuffers],
    ) -> tuple[dict[int, LeafBuffers], dict[int, LeafBuffers]]:
        """Computes a page that has been read.

        Returns:
          The arrays, with the results that stay on the device written; and the results
          that are to travel.
        """
        results = self._compute(at, current, self._first(at), page)
        found = dict(zip(self.overwrites, results, strict=True))
        travelling = {p: found.pop(p) for p in page}
        return self._written(at, current, found), travelling

    def _first(self, at: PageAddress) -> UInt32[Array, ""]:
        """The position in the flattened leaf of a page's first value."""
        strides = (np.uint32(n % 2**32) for n in strides_of(self.pages.view))
        return functools.reduce(
            lambda total, each: total + jnp.asarray(each[0], jnp.uint32) * each[1],
            zip(at.starts(self.pages), strides, strict=True),
            jnp.uint32(0) if self.place is None else self.place,
        )

    def _compute(
        self,
        at: PageAddress,
        current: dict[int, LeafBuffers],
        first: UInt32[Array, ""],
        page: dict[int, LeafBuffers] | None = None,
    ) -> tuple[LeafBuffers, ...]:
        """Computes a page and encodes its results; `page`: what of it has been read."""
        leaves = self.leaves[: self.program.inputs]
        read, together = page or {}, self.together
        stored = [
            read[p] if p in read else self._read(p, at, current)
            for p in range(len(leaves))
        ]
        stored = fetched(stored, [leaf.travels for leaf in leaves])
        # What is computed of constants alone varies along no axis, and its buffer may.
        as_buffers = lambda made: tuple(
            varying(x, varying_axes(current[p]))
            for p, x in zip(self.overwrites, made, strict=True)
        )
        if self.coded or together == 1:
            return as_buffers(self._results(stored, at, first, together))
        # A short program is compiled for each leaf, and nothing is copied.
        own = lambda x, leaf: x if len(x) == 1 else x[leaf : leaf + 1]
        made = [
            self._results([own(x, leaf) for x in stored], at, first, 1)
            for leaf in range(together)
        ]
        return as_buffers(
            tuple(x for (x,) in found) for found in zip(*made, strict=True)
        )

    def _results(
        self,
        stored: Sequence[LeafBuffers],
        at: PageAddress,
        first: UInt32[Array, ""],
        together: int,
    ) -> tuple[LeafBuffers, ...]:
        """What is stored of the results of a page of one leaf, or of several joined."""
        shape, strides = self.pages.page(at.size), strides_of(self.pages.view)
        inputs = [
            self._decoded(leaf, x, seen)
            for leaf, x, seen in zip(
                self.leaves, stored, self.shapes or [shape] * len(stored), strict=False
            )
        ]
        if self.coded:
            inputs = on_cpu(barrier, inputs)
        elementwise = self.program.elementwise
        whole = self.pages.page(at.size, together) if elementwise else None
        results = self.program(inputs, whole)
        if self.coded:
            results = on_cpu(barrier, results)
            coded = [self.leaves[p].codec is not None for p in self.overwrites]
            results = each(barrier, results, coded)
        return tuple(
            self._encoded(
                self.leaves[position],
                result,
                None if word is None else Noise(word, first, strides),
                shape,
                together,
            )
            for position, result, word in zip(
                self.overwrites, results, self.words, strict=True
            )
        )

    def _decoded(
        self, leaf: Streamed, page: LeafBuffers, shape: tuple[int, ...]
    ) -> Array:
        """What the program sees of a page, computed in pieces where it is large."""
        if (pieces := self._pieces(leaf.codec, shape)) is None:
            return leaf.decode(page, shape)
        plain, coded = _described(pieces, leaf.codec)
        stored = coded.view(leaf.stored(page[0], shape))
        made = plain.restore(_copied(pieces, coded, plain, stored))
        assert not isinstance(made, Quantized)
        return made

    def _encoded(
        self,
        leaf: Streamed,
        result: Array,
        noise: Noise | None,
        shape: tuple[int, ...],
        together: int,
    ) -> LeafBuffers:
        """What is stored of a result, computed in pieces where it is large."""
        if (pieces := self._pieces(leaf.codec, result.shape)) is None:
            return leaf.encode(result, noise, shape, together)
        plain, coded = _described(pieces, leaf.codec)
        made = coded.restore(_copied(pieces, plain, coded, plain.view(result)))
        return (Buffers.of(made),)

    def _pieces(self, codec: Codec | None, shape: tuple[int, ...]) -> Pages | None:
        """How a TPU computes a codec on a leaf that is one page; None: at once.

        The larger an array, the longer XLA:TPU takes to compile what is computed of it:
        Adafactor with a momentum of (6144, 50432) in eight bits more than 150 s (libtpu
        0.0.52).
        """
        whole = self.pages.tiled and self.pages.count <= 1 and self.together == 1
        if not whole or codec is None or codec.block == 1 or codec.draws:
            return None
        pieces = cut(shape, (Storage(4, codec, on_host=False),), PIECE).tiles
        return pieces if pieces.count > 1 else None


def _described(pieces: Pages, codec: Codec | None) -> tuple[Streamed, Streamed]:
    """An array on the device, and what a codec stores of it there."""
    assert codec is not None
    plain = jax.ShapeDtypeStruct(pieces.leaf, jnp.float32)
    stored = codec.stored(pieces.leaf)
    return (
        Streamed.of(plain, pieces, None, False),
        Streamed.of(stored, pieces, codec, False),
    )


def _copied(pieces: Pages, source: Streamed, target: Streamed, x: Buffers) -> Buffers:
    """Decodes or encodes an array on the device, a piece at a time."""
    same = Program(1, (), (0,), elementwise=True)
    run = Run(same, (1,), pieces, (source, target), (None,), None)
    blank = varying(target.blank(), varying_axes(x))
    ((made,),) = run(((x,), (blank,)), None)
    return made
