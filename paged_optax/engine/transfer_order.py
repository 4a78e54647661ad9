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

**The exchange of pages** writes one to the host while it reads another.
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
    HAS_UNINLINED_CALLS,
    barrier,
    uninlined_call,
)
from paged_optax.engine.pages import PageAddress
from paged_optax.engine.stored_array import LeafBuffers, StoredArray

Arguments = TypeVar("Arguments", bound=PyTree)
Changing = TypeVar("Changing", bound=PyTree)
Value = TypeVar("Value", bound=PyTree)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Writes one page and reads another, an array in each direction at a time.

    Attributes:
      arrays: How each array of a leaf lies in the pages.
      streams: The positions of the arrays that travel.
      leaf_count: How many leaves share pages.
    """

    arrays: Sequence[StoredArray]
    streams: tuple[int, ...]
    leaf_count: int

    def __call__(
        self,
        current: dict[int, LeafBuffers],
        results: dict[int, LeafBuffers],
        at: PageAddress,
        following: PageAddress,
        page: dict[int, LeafBuffers],
        more: Bool[Array, ""] | None,
    ) -> tuple[dict[int, LeafBuffers], dict[int, LeafBuffers]]:
        """Writes one page, and reads the next one.

        Args:
          current: The buffers.
          results: The page to write to the host.
          at: The address of the page to write.
          following: The address of the page to read.
          page: The page to return if there is no page to read.
          more: Whether there is a page to read; None: there is one.

        Returns:
          The buffers, and the page that has been read.
        """
        leaves = range(self.leaf_count)
        keys = [(p, leaf) for p in self.streams for leaf in leaves]
        held = {(p, leaf): current[p][leaf] for p, leaf in keys}
        read = {(p, leaf): page[p][leaf] for p, leaf in keys}
        pairs = list(zip(keys, self._partners(), strict=True))
        for (source, target), after in zip(pairs, pairs[1:] + pairs[:1], strict=True):
            next_one = functools.partial(self.arrays[source[0]].read, at=following)
            if more is None:
                new_page = next_one(held[source])
            else:
                same = lambda _, x=read[source]: x
                new_page = lax.cond(more, next_one, same, held[source])
            p, leaf = target
            new = self.arrays[p].write(held[target], results[p][leaf], at)
            # What comes next waits, or XLA may begin all reads before the first write.
            next_ones = {*after} - {source, target} if self.leaf_count > 1 else ()
            tied = {x: held[x] for x in sorted(next_ones)}
            # One barrier on both: the read of a buffer ends before a later write of it
            # begins, or XLA copies the whole buffer.
            (read[source], held[source], held[target]), tied = barrier(
                ((new_page, held[source], new), tied)
            )
            held |= tied
        shared = lambda x: {
            p: tuple([x[p, leaf] for leaf in leaves]) for p in self.streams
        }
        return current | shared(held), shared(read)

    def _partners(self) -> list[tuple[int, int]]:
        """For each array that is read, the array that is written at the same time.

        It is another array: XLA would copy an array that is read and written at once.
        If leaves share pages, it is the same moment of another leaf. So it has the same
        size.
        """
        count, half = self.leaf_count, len(self.streams) // 2
        if count == 1:
            return [(p, 0) for p in self.streams[half:] + self.streams[:half]]
        return [
            (p, (leaf + count // 2) % count)
            for p in self.streams
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
