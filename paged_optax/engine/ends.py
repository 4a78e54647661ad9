"""The first page of a leaf that is read, and the last one that is written, on a GPU.

While a loop works on a page it reads the next one. So the first page is read before the
loop, and the last one is computed and written after it. XLA:GPU knows the address of a
transfer only where it is linear in the variable of a loop whose turns it can count.
Anywhere else a kernel reads or writes host memory over the link, which is slower, and
keeps other kernels waiting. So each of the two pages has a loop of its own, which moves
it in a few pieces. (A loop of one turn would be none: XLA unrolls it.)
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, PyTree

from paged_optax.backend.manual_axes import varying, varying_axes
from paged_optax.engine.page_loops import PageLoop
from paged_optax.engine.transfer import PageAddress

Page = TypeVar("Page", bound=PyTree)
Held = TypeVar("Held", bound=PyTree)

# A page has so many pieces, as few as divide it.
_PIECES = (2, 3, 5, 7)


def pieces_of(loop: PageLoop) -> int:
    """In how many pieces a page is moved; 1 if no small number divides it."""
    if loop.piece is None:
        return 1
    return next((n for n in _PIECES if loop.step % n == 0), 1)


def read_first(loop: PageLoop, read: Callable[[PageAddress], Page]) -> Page:
    """Reads the first page of a loop.

    Args:
      loop: The loop.
      read: Reads what is at an address. Arrays are cut along their first axis.

    Returns:
      The page.
    """
    pieces, address = pieces_of(loop), loop.piece
    if pieces == 1 or address is None:
        return read(loop.at(np.int32(0)))
    piece = lambda turn: read(address(turn, 0, pieces))
    shapes = jax.eval_shape(piece, jnp.int32(0))

    def put(page: Array, new: Array, turn: Int[Array, ""]) -> Array:
        return lax.dynamic_update_slice_in_dim(page, new, turn * new.shape[0], 0)

    def turn(carry: tuple[Int[Array, ""], Page]) -> tuple[Int[Array, ""], Page]:
        number, page = carry
        new = piece(number)
        page = jax.tree.map(lambda page, new: put(page, new, number), page, new)
        return number + 1, page

    empty = lambda x: varying(
        lax.empty((pieces * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x)
    )
    start = jnp.int32(0), jax.tree.map(empty, shapes)
    return lax.while_loop(lambda carry: carry[0] < pieces, turn, start)[1]


def update_last(
    loop: PageLoop,
    update: Callable[[PageAddress, Held, Page], Held],
    held: Held,
    page: Page,
) -> Held:
    """Updates the last page of a loop.

    Args:
      loop: The loop.
      update: Computes what is at an address, given it, and writes it into what is held.
      held: What is held.
      page: The page. Arrays are cut along their first axis.

    Returns:
      What is held with the page in it.
    """
    pieces, address, last = pieces_of(loop), loop.piece, loop.stop - loop.step
    if pieces == 1 or address is None:
        return update(loop.at(np.int32(last)), held, page)

    def turn(carry: tuple[Int[Array, ""], Held]) -> tuple[Int[Array, ""], Held]:
        number, held = carry

        def cut(x: Array) -> Array:
            size = x.shape[0] // pieces
            return lax.dynamic_slice_in_dim(x, number * size, size)

        at = address(number, last, pieces)
        return number + 1, update(at, held, jax.tree.map(cut, page))

    start = jnp.int32(0), held
    return lax.while_loop(lambda carry: carry[0] < pieces, turn, start)[1]
