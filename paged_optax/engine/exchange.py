"""Order of transfers: isolated leaves, and the exchange of pages.

**Isolation.** A leaf is updated separately from all other computations. Otherwise XLA
hoists the first pages of many leaves, or their only ones: 16 leaves of 64 MiB in one
page each take 2176 MiB of scratch on H200 and v5e instead of 256. Each leaf is updated
as soon as its gradient is computed. Two constructs isolate it:

- **A loop of one turn**, or of none if the leaf's gate is closed. XLA for
  accelerators cannot count its turns. On a GPU each turn waits for the host.
- **A call that XLA:GPU does not inline**: the same bytes, and no wait. XLA fuses
  nothing in it outside of loops, so every page must be computed in a loop.

**Exchange.** One page is written to the host while another is read: half of the arrays
in one direction and half in the other, then each half in the other direction.
"""

import functools
import itertools
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
from paged_optax.engine.paged_array import Fetched, LeafBuffers, PagedArray
from paged_optax.engine.pages import Page

Arguments = TypeVar("Arguments", bound=PyTree)
Changing = TypeVar("Changing", bound=PyTree)
Value = TypeVar("Value", bound=PyTree)

# Most of all bytes by which the halves of an exchange may differ: while the larger half
# ends, the link works in one direction.
_UNEVEN = 1 / 50


def isolated(
    run: Callable[[Arguments, Changing], Changing],
    trip_count: Int[Array, ""] | None,
    in_loops: bool,
) -> Callable[..., Any]:
    """Returns a function that updates a leaf separately from all others.

    Its arguments are read-only ones, and buffers that `run` changes. A trip count of 0
    skips it; None always runs. `in_loops`: a GPU computes all of it in loops.
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
    args: Arguments,
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
        lambda carry: (carry[0] + 1, run(args, carry[1])),
        (jnp.int32(0), changing),
    )[1]


#: One array that travels: its position, and the number of its leaf.
_Item = tuple[int, int]


def exchange(
    arrays: Sequence[PagedArray],
    exchanged: tuple[int, ...],
    current: dict[int, LeafBuffers],
    results: dict[int, LeafBuffers],
    at: Page,
    next_at: Page,
    page: dict[int, tuple[Fetched, ...]],
    more: Bool[Array, ""] | None,
) -> tuple[dict[int, LeafBuffers], dict[int, tuple[Fetched, ...]]]:
    """Writes the streamed buffers of one page, and fetches the next page's.

    `exchanged` has the positions of the arrays that travel both ways. `results` are
    written at `at`, and the page at `next_at` is returned beside the buffers; if
    there is none, `page` is. `more` is True if there is one; None: there always is.
    """
    leaf_count = max(map(len, page.values()), default=1)
    items = [(p, leaf) for p in exchanged for leaf in range(leaf_count)]
    by_item = lambda x: {(p, leaf): x[p][leaf] for p, leaf in items}
    retained, loaded, unwritten = map(by_item, (current, page, results))
    on_device = {p: x for p, x in current.items() if p not in page and p in results}

    def fetch(item: _Item) -> Fetched:
        read = functools.partial(arrays[item[0]].fetch, at=next_at)
        if more is None:
            return read(retained[item])
        return lax.cond(more, read, lambda _: loaded[item], retained[item])

    turns = _turns(arrays, exchanged, leaf_count)
    for (sources, targets), after in zip(turns, turns[1:] + turns[:1], strict=True):
        new_pages = {item: fetch(item) for item in sources}
        written = {
            x: arrays[x[0]].write(retained[x], unwritten.pop(x), at, streamed=True)
            for x in targets
        }
        # The next turn waits, or XLA may begin all reads before the first write.
        next_ones = {*sources, *after[0], *after[1]} - {*targets}
        pending = {x: retained[x] for x in sorted(next_ones)}
        # One barrier on all: the read of a buffer ends before a later write of it
        # begins, or XLA copies the whole buffer. A GPU computes all results while the
        # first group travels. On a TPU that would take memory.
        computed = (on_device, unwritten) if more is None else ()
        new_pages, written, pending, computed = barrier(
            (new_pages, written, pending, computed)
        )
        on_device, unwritten = computed or (on_device, unwritten)
        loaded |= new_pages
        retained |= written | pending
    by_array = lambda x: {
        p: tuple([x[p, leaf] for leaf in range(leaf_count)]) for p in exchanged
    }
    return current | on_device | by_array(retained), by_array(loaded)


def _turns(
    arrays: Sequence[PagedArray], exchanged: tuple[int, ...], leaf_count: int
) -> list[tuple[list[_Item], list[_Item]]]:
    """Returns the arrays that each turn reads, and the others that it writes.

    XLA would copy an array that is read and written at the same time. Two turns of half
    of the bytes wait for each other twice in a page. If there are no such halves, or if
    XLA:GPU has no stream for each direction, a turn has one array in each direction:
    the same moment of two leaves that share pages, or two moments of one leaf.
    """
    size = lambda item: arrays[item[0]].page_bytes
    every = [(p, leaf) for leaf in range(leaf_count) for p in exchanged]
    halves: tuple[list[_Item], list[_Item]] = [], []
    for item in sorted(every, key=size, reverse=True):
        min(halves, key=lambda half: sum(map(size, half))).append(item)
    first, second = (sum(map(size, half)) for half in halves)
    if abs(first - second) <= _UNEVEN * (first + second) and (
        GPU_HAS_STREAMS_BY_DIRECTION or leaf_count == 1
    ):
        return [halves, (halves[1], halves[0])]
    following = dict(zip(exchanged, exchanged[1:] + exchanged[:1], strict=True))
    other = lambda p, leaf: (
        (following[p], 0)
        if leaf_count == 1
        else (p, (leaf + leaf_count // 2) % leaf_count)
    )
    return [
        ([(p, leaf)], [other(p, leaf)]) for p in exchanged for leaf in range(leaf_count)
    ]


def fenced(values: Sequence[Value], subset: Sequence[bool]) -> list[Value]:
    """Puts one barrier on the chosen values."""
    passed = iter(barrier(list(itertools.compress(values, subset))))
    pairs = zip(values, subset, strict=True)
    return [next(passed) if is_chosen else x for x, is_chosen in pairs]
