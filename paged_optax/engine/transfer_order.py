"""What keeps transfers in order: isolated leaves, and the exchange of pages.

**A leaf is isolated**: it is updated apart from all else that is computed. Otherwise
XLA hoists a leaf's first page, or its only one, and many leaves take memory at once: 16
leaves of 64 MiB in one page each 2176 MiB of scratch on H200 and v5e instead of 256.
Either of two things isolates a leaf:

- **A loop of one turn**, or of none if the leaf's gate is closed. No compiler can count
  its turns. Without one no byte is moved. On a GPU each turn waits for the host.
- **A call that XLA:GPU does not inline**: the same bytes, and no wait. XLA fuses
  nothing in it outside of loops, so that every page must be computed in one.

Neither puts leaves in an order: each can be updated as soon as its gradient is there,
and the gradient can then go.

**The exchange of pages** writes one to the host while it reads another: half of its
arrays in one direction and the other half in the other, then each half the other way.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, PyTree

from paged_optax.backend.platforms import (
    GPU_HAS_STREAMS_BY_DIRECTION,
    HAS_UNINLINED_CALLS,
    barrier,
    uninlined_call,
)
from paged_optax.engine.paged_array import Buffers, Fetched, LeafBuffers, PagedArray
from paged_optax.engine.pages import PageAddress

Arguments = TypeVar("Arguments", bound=PyTree)
Changing = TypeVar("Changing", bound=PyTree)
Value = TypeVar("Value", bound=PyTree)

# By so much of all bytes the halves of an exchange may differ: while the larger one
# ends, the link works in one direction.
_UNEVEN = 1 / 50


def isolated(
    run: Callable[[Arguments, Changing], Changing],
    trip_count: Int[Array, ""] | None,
    in_loops: bool,
) -> Callable[..., Any]:
    """A function that updates a leaf apart from all others.

    Args:
      run: Updates the leaf: of what it reads, and what it changes.
      trip_count: How often to run; None: once.
      in_loops: Whether a GPU computes all of it in loops.
    """
    if trip_count is not None or not in_loops or not HAS_UNINLINED_CALLS:
        return functools.partial(_looped, run, trip_count)
    run = jax.jit(run)  # traced once for two uses
    looped = functools.partial(_looped, run, None)
    called = uninlined_call(run)
    return functools.partial(
        lax.platform_dependent, cpu=looped, tpu=looped, default=called
    )


def _looped(
    run: Callable[[Arguments, Changing], Changing],
    trip_count: Int[Array, ""] | None,
    arguments: Arguments,
    changing: Changing,
) -> Changing:
    if trip_count is None:
        # XLA:CPU sees that this is 1, which does no harm; others cannot see it.
        trip_count = lax.platform_dependent(
            cpu=lambda: jnp.int32(1),
            default=lambda: lax.optimization_barrier(jnp.int32(1)),
        )
    return lax.while_loop(
        lambda carry: carry[0] < trip_count,
        lambda carry: (carry[0] + 1, run(arguments, carry[1])),
        (jnp.int32(0), changing),
    )[1]


#: One of the arrays that travel: its position, and the number of its leaf.
_Item = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Writes one page and reads another, some arrays in each direction at a time.

    Attributes:
      arrays: How each array of a leaf lies in the pages.
      exchanged: The positions of the arrays that travel both ways.
      leaf_count: How many leaves share pages.
    """

    arrays: Sequence[PagedArray]
    exchanged: tuple[int, ...]
    leaf_count: int

    def __call__(
        self,
        current: dict[int, LeafBuffers],
        results: dict[int, LeafBuffers],
        at: PageAddress,
        following: PageAddress,
        page: dict[int, tuple[Fetched, ...]],
        more: Bool[Array, ""] | None,
    ) -> tuple[dict[int, LeafBuffers], dict[int, tuple[Fetched, ...]]]:
        """Writes what travels of one page, and fetches it of the next one.

        Args:
          current: The buffers.
          results: The page to write to the host.
          at: The address of the page to write.
          following: The address of the page to fetch.
          page: The page to return if there is no page to fetch.
          more: Whether there is a page to fetch; None: there is one.

        Returns:
          The buffers, and what has been fetched.
        """
        leaves = range(self.leaf_count)
        held = {(p, leaf): current[p][leaf] for p in self.exchanged for leaf in leaves}
        fetched = {(p, leaf): page[p][leaf] for p, leaf in held}
        # On a GPU what stays on the device is computed while the first group travels.
        # On a TPU that would take memory.
        beside = {p: x for p, x in current.items() if p not in page and p in results}
        beside = beside if more is None else {}
        turns = self._turns()
        for (sources, targets), after in zip(turns, turns[1:] + turns[:1], strict=True):
            new_pages = {
                x: self._fetch(x, held, following, fetched, more) for x in sources
            }
            written = {
                (p, leaf): self.arrays[p].write(
                    held[p, leaf], results[p][leaf], at, travels=True
                )
                for p, leaf in targets
            }
            # What comes next waits, or XLA may begin all reads before the first write.
            next_ones = {*sources, *after[0], *after[1]} - {*targets}
            waiting = {x: held[x] for x in sorted(next_ones)}
            # One barrier on all: the read of a buffer ends before a later write of it
            # begins, or XLA copies the whole buffer.
            new_pages, written, waiting, beside = barrier(
                (new_pages, written, waiting, beside)
            )
            fetched |= new_pages
            held |= written | waiting
        by_array = lambda x: {
            p: tuple([x[p, leaf] for leaf in leaves]) for p in self.exchanged
        }
        return current | beside | by_array(held), by_array(fetched)

    def _fetch(
        self,
        item: _Item,
        held: dict[_Item, Buffers],
        following: PageAddress,
        fetched: dict[_Item, Fetched],
        more: Bool[Array, ""] | None,
    ) -> Fetched:
        fetch = functools.partial(self.arrays[item[0]].fetch, at=following)
        if more is None:
            return fetch(held[item])
        return lax.cond(more, fetch, lambda _: fetched[item], held[item])

    def _turns(self) -> list[tuple[list[_Item], list[_Item]]]:
        """What is read at a time, and what is written meanwhile: others.

        XLA would copy an array that is read and written at once. Two turns of half of
        the bytes each, if there are such halves, wait for each other twice in a page.
        Else a turn has one array in each direction: if leaves share pages, the same
        moment of another leaf, which has the same size. So it is also where XLA:GPU
        has no stream for each direction.
        """
        size = lambda item: self.arrays[item[0]].page_bytes
        count, exchanged = self.leaf_count, self.exchanged
        every = [(p, leaf) for leaf in range(count) for p in exchanged]
        halves: tuple[list[_Item], list[_Item]] = [], []
        for item in sorted(every, key=size, reverse=True):
            min(halves, key=lambda half: sum(map(size, half))).append(item)
        first, second = (sum(map(size, half)) for half in halves)
        if abs(first - second) <= _UNEVEN * (first + second) and (
            GPU_HAS_STREAMS_BY_DIRECTION or count == 1
        ):
            return [halves, (halves[1], halves[0])]
        if count == 1:
            others = exchanged[1:] + exchanged[:1]
            return [
                ([(p, 0)], [(q, 0)]) for p, q in zip(exchanged, others, strict=True)
            ]
        return [
            ([(p, leaf)], [(p, (leaf + count // 2) % count)])
            for p in exchanged
            for leaf in range(count)
        ]


def fenced(
    values: Sequence[Value],
    chosen: Sequence[bool],
    fence: Callable[[list[Value]], Sequence[Value]] = barrier,
) -> list[Value]:
    """Puts one barrier on the chosen values together."""
    positions = [i for i, yes in enumerate(chosen) if yes]
    new = fence([values[i] for i in positions])
    return [
        *(dict(enumerate(values)) | dict(zip(positions, new, strict=True))).values()
    ]
