"""Loops over the pages of a leaf."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from paged_optax.engine.pages import Pages
from paged_optax.engine.streamed import LeafBuffers
from paged_optax.engine.transfer import Index, PageAddress

Carry = tuple[Int[Array, ""], dict[int, LeafBuffers]]


def open_gate() -> Int[Array, ""]:
    """A trip count of 1: known to XLA:CPU, which has nothing to bound; else opaque."""
    return lax.platform_dependent(
        cpu=lambda: jnp.int32(1),
        default=lambda: lax.optimization_barrier(jnp.int32(1)),
    )


class Sweep(NamedTuple):
    """A loop over pages.

    Attributes:
      stop: Where the loop's variable ends; it begins at 0.
      step: By how much it grows.
      at: The page of each of its values.
    """

    stop: int
    step: int
    at: Callable[[Index], PageAddress]


def sweeps(pages: Pages) -> list[Sweep]:
    """The loops over full pages, and over the smaller last ones."""
    if pages.count <= 1:
        return [Sweep(1, 1, lambda _: PageAddress(np.int32(0), pages.extent))]
    size, unit = pages.size, pages.unit
    full, left = divmod(pages.extent, size)
    step = size // unit
    start = lambda number: number if unit == 1 else number * np.int32(unit)
    found: list[Sweep] = []
    if full:
        every = lambda number: PageAddress(start(number), size, number)
        found.append(Sweep(full * step, step, every))
    if left:
        last = PageAddress(np.int32(full * size), left, np.int32(full * step))
        found.append(Sweep(1, 1, lambda _: last))
    return found


def swept(
    sweep: Sweep,
    update: Callable[[PageAddress, dict[int, LeafBuffers]], dict[int, LeafBuffers]],
    current: dict[int, LeafBuffers],
    targets: Sequence[int],
) -> dict[int, LeafBuffers]:
    """Updates the pages of one loop."""
    constant = {p: x for p, x in current.items() if p not in targets}

    def next_page(carry: Carry) -> Carry:
        number, changing = carry
        changed = update(sweep.at(number), constant | changing)
        return number + sweep.step, {p: changed[p] for p in targets}

    _, changing = lax.while_loop(
        lambda carry: carry[0] < sweep.stop,
        next_page,
        (jnp.int32(0), {p: current[p] for p in targets}),
    )
    return constant | changing
