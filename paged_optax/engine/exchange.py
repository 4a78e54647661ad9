"""One page is written to the host while another is read."""

import dataclasses
import functools
from collections.abc import Sequence

from jax import Array, lax
from jaxtyping import Bool

from paged_optax.backend.barriers import barrier
from paged_optax.engine.streamed import LeafBuffers, Streamed
from paged_optax.engine.transfer import PageAddress


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Writes one page and reads another, an array in each direction at a time.

    Attributes:
      arrays: How each array of a leaf lies in the pages.
      streams: The positions of the arrays that travel.
      together: How many leaves share pages.
    """

    arrays: Sequence[Streamed]
    streams: tuple[int, ...]
    together: int

    def __call__(
        self,
        current: dict[int, LeafBuffers],
        results: dict[int, LeafBuffers],
        at: PageAddress,
        ahead: PageAddress,
        page: dict[int, LeafBuffers],
        more: Bool[Array, ""] | None,
    ) -> tuple[dict[int, LeafBuffers], dict[int, LeafBuffers]]:
        """Writes one page, and reads the next one.

        Args:
          current: The arrays.
          results: The page to write to the host.
          at: The address of the page to write.
          ahead: The address of the page to read.
          page: The page to return if there is no page to read.
          more: Whether there is a page to read; None: there is one.

        Returns:
          The arrays, and the page that has been read.
        """
        leaves = range(self.together)
        keys = [(p, leaf) for p in self.streams for leaf in leaves]
        held = {(p, leaf): current[p][leaf] for p, leaf in keys}
        read = {(p, leaf): page[p][leaf] for p, leaf in keys}
        pairs = list(zip(keys, self._partners(), strict=True))
        for (here, there), after in zip(pairs, pairs[1:] + pairs[:1], strict=True):
            next_one = functools.partial(self.arrays[here[0]].read, at=ahead)
            found = (
                next_one(held[here])
                if more is None
                else lax.cond(more, next_one, lambda _, x=read[here]: x, held[here])
            )
            p, leaf = there
            new = self.arrays[p].write(held[there], results[p][leaf], at)
            # What comes next waits, or XLA may begin all reads before the first write.
            next_ones = {*after} - {here, there} if self.together > 1 else ()
            tied = {x: held[x] for x in sorted(next_ones)}
            (read[here], held[here], held[there]), tied = barrier(
                ((found, held[here], new), tied)
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
        together, half = self.together, len(self.streams) // 2
        if together == 1:
            return [(p, 0) for p in self.streams[half:] + self.streams[:half]]
        return [
            (p, (leaf + together // 2) % together)
            for p in self.streams
            for leaf in range(together)
        ]
