"""What is read first and what is written last, on a GPU, outside of the loop between.

While a loop works on a page it reads the next one. So the first page is read before the
loop, and the last one is computed and written after it. So it is with layers. XLA:GPU
knows the address of a transfer only where it is linear in the variable of a loop whose
turns it can count, along the first axis. Anywhere else a kernel reads or writes host
memory over the link, which is slower, and keeps other kernels waiting. So what is moved
outside of a loop has one of its own, and is moved in a few pieces. (A loop of one turn
would be none: XLA unrolls it.)
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, PyTree

from paged_optax.backend.meshes import varying, varying_axes
from paged_optax.engine.page_loops import PageLoop
from paged_optax.engine.transfer import PageAddress

Page = TypeVar("Page", bound=PyTree)
Held = TypeVar("Held", bound=PyTree)

#: The number of a piece.
Turn = Int[Array, ""]

# As few pieces as divide what is moved.
_PIECES = (2, 3, 5, 7)


def pieces_of(size: int, whole: Callable[[int], bool] = lambda size: True) -> int:
    """In how many pieces so much is moved; 1 if no small number divides it.

    Args:
      size: How much.
      whole: Whether so much can be a piece.
    """
    return next((n for n in _PIECES if size % n == 0 and whole(size // n)), 1)


def read_first(
    loop: PageLoop, pieces: int, read: Callable[[PageAddress], Page]
) -> Page:
    """Reads the first page of a loop.

    Args:
      loop: The loop.
      pieces: In how many pieces; 1: outside of a loop.
      read: Reads what is at an address. Arrays are cut along their first axis.

    Returns:
      The page.
    """
    if pieces == 1:
        return read(loop.at(np.int32(0)))
    return read_in_pieces(pieces, lambda turn: read(loop.piece(turn, 0, pieces)))


def update_last(
    loop: PageLoop,
    pieces: int,
    update: Callable[[PageAddress, Held, Page], Held],
    held: Held,
    page: Page,
) -> Held:
    """Updates the last page of a loop.

    Args:
      loop: The loop.
      pieces: In how many pieces; 1: outside of a loop.
      update: Computes what is at an address, given it, and writes it into what is held.
      held: What is held.
      page: The page. Arrays are cut along their first axis.

    Returns:
      What is held with the page in it.
    """
    last = loop.stop - loop.step
    if pieces == 1:
        return update(loop.at(np.int32(last)), held, page)
    at = lambda turn: loop.piece(turn, last, pieces)
    write = lambda turn, held, piece: update(at(turn), held, piece)
    return write_in_pieces(pieces, write, held, page)


def read_in_pieces(pieces: int, read: Callable[[Turn], Page]) -> Page:
    """Reads pieces, and joins them along the first axis of each array."""
    shapes = jax.eval_shape(read, jnp.int32(0))

    def put(page: Array, new: Array, number: Turn) -> Array:
        return lax.dynamic_update_slice_in_dim(page, new, number * new.shape[0], 0)

    def turn(carry: tuple[Turn, Page]) -> tuple[Turn, Page]:
        number, page = carry
        new = read(number)
        page = jax.tree.map(lambda page, new: put(page, new, number), page, new)
        return number + 1, page

    empty = lambda x: varying(
        lax.empty((pieces * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x)
    )
    start = jnp.int32(0), jax.tree.map(empty, shapes)
    return lax.while_loop(lambda carry: carry[0] < pieces, turn, start)[1]


def write_in_pieces(
    pieces: int, write: Callable[[Turn, Held, Page], Held], held: Held, page: Page
) -> Held:
    """Cuts what is to be written along the first axis of each array, and writes it."""

    def turn(carry: tuple[Turn, Held]) -> tuple[Turn, Held]:
        number, held = carry

        def cut(x: Array) -> Array:
            size = x.shape[0] // pieces
            return lax.dynamic_slice_in_dim(x, number * size, size)

        return number + 1, write(number, held, jax.tree.map(cut, page))

    start = jnp.int32(0), held
    return lax.while_loop(lambda carry: carry[0] < pieces, turn, start)[1]
