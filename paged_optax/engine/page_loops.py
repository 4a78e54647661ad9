"""Loops over the pages of a leaf."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from paged_optax.backend.gpu import GPU_NEEDS_RAW_INDEX
from paged_optax.engine.pages import Pages
from paged_optax.engine.streamed import LeafBuffers
from paged_optax.engine.transfer import Index, PageAddress

Carry = tuple[Int[Array, ""], dict[int, LeafBuffers]]


class PageLoop(NamedTuple):
    """A loop over pages.

    Attributes:
      stop: Where the loop's variable ends; it begins at 0.
      step: By how much it grows; 1 in a loop of one turn.
      at: The page of each of its values.
      piece: Of the page of a value one of so many pieces, all of a size:
        `piece(turn, value, pieces)`, of pieces that divide `step`.
    """

    stop: int
    step: int
    at: Callable[[Index], PageAddress]
    piece: Callable[[Index, int, int], PageAddress]


def _once(page: PageAddress) -> PageLoop:
    """A loop of one turn, whose page is in one piece."""
    return PageLoop(1, 1, lambda _: page, lambda *_: page)


def both_ways(pages: Pages, travelling: int) -> bool:
    """Whether pages travel both ways at once.

    Args:
      pages: How a leaf is cut.
      travelling: How many moments live on the host, of all leaves that share pages.
    """
    if travelling < 2 or pages.count < 2:
        return False
    if pages.tiled:
        return True
    # XLA:GPU unrolls a loop of a single turn, and transfers without a loop differ.
    # Strips are transferred by kernels, which wait for each other.
    looped = pages.extent // pages.size > 2 and not pages.axis
    return looped and not GPU_NEEDS_RAW_INDEX


def page_loops(pages: Pages) -> list[PageLoop]:
    """The loops over full pages, and over the smaller last ones."""
    if pages.count <= 1:
        return [_once(PageAddress(np.int32(0), pages.extent))]
    size, unit = pages.size, pages.unit
    full, left = divmod(pages.extent, size)
    step = size // unit
    start = lambda number: number if unit == 1 else number * np.int32(unit)
    found: list[PageLoop] = []
    if full:
        every = lambda number: PageAddress(start(number), size, number)

        def piece(turn: Index, value: int, pieces: int) -> PageAddress:
            number = np.int32(value) + turn * np.int32(step // pieces)
            return PageAddress(start(number), size // pieces, number)

        found.append(PageLoop(full * step, step, every, piece))
    if left:
        end = np.int32(full * step)
        found.append(_once(PageAddress(np.int32(full * size), left, end)))
    return found


def run_page_loop(
    loop: PageLoop,
    update: Callable[[PageAddress, dict[int, LeafBuffers]], dict[int, LeafBuffers]],
    current: dict[int, LeafBuffers],
    targets: Sequence[int],
) -> dict[int, LeafBuffers]:
    """Updates the pages of one loop."""
    constant = {p: x for p, x in current.items() if p not in targets}

    def next_page(carry: Carry) -> Carry:
        number, changing = carry
        changed = update(loop.at(number), constant | changing)
        return number + loop.step, {p: changed[p] for p in targets}

    _, changing = lax.while_loop(
        lambda carry: carry[0] < loop.stop,
        next_page,
        (jnp.int32(0), {p: current[p] for p in targets}),
    )
    return constant | changing
