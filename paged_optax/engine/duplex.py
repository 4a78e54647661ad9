"""One page is written to the host while another is read."""

import dataclasses
import functools
from collections.abc import Sequence

from jax import Array, lax
from jaxtyping import Bool

from paged_optax.backend.xla import barrier
from paged_optax.engine.pages import PageAddress
from paged_optax.engine.stored_array import LeafBuffers, StoredArray


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Writes one page and reads another, an array in each direction at a time.

    Attributes:
      arrays: How each array of a leaf lies in the pages.
      streams: The positions of the arrays that travel.
      leaves: How many leaves share pages.
    """

    arrays: Sequence[StoredArray]
    streams: tuple[int, ...]
    leaves: int

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
        leaves = range(self.leaves)
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
            next_ones = {*after} - {source, target} if self.leaves > 1 else ()
            tied = {x: held[x] for x in sorted(next_ones)}
            # One barrier on both: the read of a buffer ends before a later write of it
            # begins, or XLA copies the whole buffer.
            (read[source], held[source], held[target]), tied = barrier(
                ((new_page, held[source], new), tied)
            )
            held |= tied
        shared = lambda x: {
            p: tuple(x[p, leaf] for leaf in leaves) for p in self.streams
        }
        return current | shared(held), shared(read)

    def _partners(self) -> list[tuple[int, int]]:
        """For each array that is read, the array that is written at the same time.

        It is another array: XLA would copy an array that is read and written at once.
        If leaves share pages, it is the same moment of another leaf. So it has the same
        size.
        """
        leaves, half = self.leaves, len(self.streams) // 2
        if leaves == 1:
            return [(p, 0) for p in self.streams[half:] + self.streams[:half]]
        return [
            (p, (leaf + leaves // 2) % leaves)
            for p in self.streams
            for leaf in range(leaves)
        ]
