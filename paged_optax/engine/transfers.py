"""Transfers of slices of host arrays: pages of a leaf, and layers of a stack.

A transfer outside of a page loop, before the first page or after the last, has a loop
of its own on a GPU, and moves in a few pieces. XLA:GPU computes a transfer's address on
the host only if it is linear in the variable of a loop whose turns it can count, along
the first axis. Otherwise a kernel reads or writes host memory over the link, which is
slower, and delays other kernels. (XLA unrolls a loop of one turn.)
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import PyTree

from paged_optax.backend.memory import DEVICE, HOST, on_host
from paged_optax.backend.platforms import on_platforms
from paged_optax.backend.tiling import minor_to_major
from paged_optax.backend.types import varying, varying_axes
from paged_optax.engine.pages import MOST_INDEX, Index
from paged_optax.engine.shards import Shards

Pieces = TypeVar("Pieces", bound=PyTree)
Target = TypeVar("Target", bound=PyTree)

#: Numbers of pieces of a slice: the fewest that divide it.
PIECES = (2, 3, 5, 7)


def to_device(page: Array, travels: bool) -> Array:
    """Copies a slice to device memory if it `travels`, that is, is in host memory."""
    return jax.device_put(page, DEVICE) if travels else page


def to_host(page: Array, travels: bool) -> Array:
    """Copies a slice to host memory if it `travels`."""
    return jax.device_put(page, HOST) if travels else page


def in_layout(page: Array, order: tuple[int, ...]) -> Array:
    """Constrains a page to the layout of its array: its axes, minor to major.

    Otherwise XLA:TPU gives the whole array the layout that the page's neighbours
    prefer, and copies the array (libtpu 0.0.52).
    """
    return with_layout_constraint(page, Layout(order[::-1]))


@dataclasses.dataclass(frozen=True)
class StackPage:
    """A part of an array's first axis, such as a layer of a stack."""

    number: Index | int  # among parts of this size
    size: int  # entries along the axis
    in_one_transfer: bool  # it is not divided into pieces
    # Each device moves pieces of its own shard: an axis that is divided cannot be
    # joined with the first one, and XLA would gather the array in host memory.
    shards: Shards | None = None

    def read(self, x: Array | np.ndarray) -> Array:
        """Reads the part into device memory."""
        pieces, offloaded = self._pieces(x), on_host(x)

        def in_one_transfer(x: Array | np.ndarray) -> Array:
            page = lax.dynamic_slice_in_dim(x, self._first, self.size)
            return to_device(_in_stack_layout(page), offloaded)

        def in_pieces(x: Array) -> Array:
            rows, (first, size) = _by_rows(x), self._piece(x, pieces)
            piece = lambda iteration: lax.dynamic_slice_in_dim(
                rows, first(iteration), size, allow_negative_indices=False
            )
            page = read_in_pieces(pieces, lambda i: to_device(piece(i), True))
            return page.reshape(self.size, *x.shape[1:])

        return self._by_backend(pieces, in_one_transfer, in_pieces, x)

    def write(self, x: Array, page: Array) -> Array:
        """Returns the array with the part replaced."""
        pieces, offloaded = self._pieces(x), on_host(x)

        def in_one_transfer(x: Array, page: Array) -> Array:
            page = _in_stack_layout(to_host(page, offloaded))
            return lax.dynamic_update_slice_in_dim(x, page, self._first, 0)

        def in_pieces(x: Array, page: Array) -> Array:
            first, _ = self._piece(x, pieces)
            write = lambda i, rows, piece: lax.dynamic_update_slice_in_dim(
                rows, to_host(piece, True), first(i), 0, allow_negative_indices=False
            )
            rows = write_in_pieces(pieces, write, _by_rows(x), _by_rows(page))
            return rows.reshape(x.shape)

        return self._by_backend(pieces, in_one_transfer, in_pieces, x, page)

    @property
    def _first(self) -> Index | int:
        return self.number if self.size == 1 else self.number * self.size

    def _pieces(self, x: Array | np.ndarray) -> int:
        """Returns the number of pieces in which a GPU moves it; 1: no loop."""
        first, *remaining = self.shards.local(x.shape) if self.shards else x.shape
        # The array's rows are counted in 32 bits.
        numbered = bool(remaining) and first * remaining[0] < MOST_INDEX
        if self.in_one_transfer or not numbered or not on_host(x):
            return 1
        return pieces_of(self.size * remaining[0])

    def _piece(self, x: Array, pieces: int) -> tuple[Callable[[Index], Index], int]:
        """Returns the first row of each piece, and the rows of a piece."""
        rows = self.size * x.shape[1]
        # XLA:GPU follows only addresses that are linear in the loop's variable.
        first = lambda i: np.int32(self.number * rows) + i * np.int32(rows // pieces)
        return first, rows // pieces

    def _by_backend(
        self,
        pieces: int,
        in_one_transfer: Callable[..., Array],
        in_pieces: Callable[..., Array],
        *arrays: Array | np.ndarray,
    ) -> Array:
        if pieces == 1:
            return in_one_transfer(*arrays)
        if self.shards is not None:
            in_pieces = jax.shard_map(
                in_pieces,
                mesh=self.shards.current_mesh,
                in_specs=self.shards.spec,
                out_specs=self.shards.spec,
                check_vma=False,
            )
        return lax.platform_dependent(
            *arrays, cpu=in_one_transfer, tpu=in_one_transfer, default=in_pieces
        )


def _in_stack_layout(page: Array) -> Array:
    """Constrains a part of a host stack to the stack's layout on a TPU."""
    if not on_host(page) or page.ndim < 2:
        return page
    order = minor_to_major(page.shape, page.dtype.itemsize)
    return on_platforms("tpu", lambda page: in_layout(page, order), page)


def _by_rows(x: Array) -> Array:
    """Joins the first two axes, so that parts are cut along the first one."""
    return x.reshape(-1, *x.shape[2:])


def pieces_of(size: int, block: int = 1) -> int:
    """Returns the fewest pieces, of whole blocks, that divide a slice; else 1."""
    return next((n for n in PIECES if size % (n * block) == 0), 1)


def read_in_pieces(pieces: int, read: Callable[[Index], Pieces]) -> Pieces:
    """Reads numbered pieces, and joins them along the first axis of each array."""
    if pieces == 1:
        return read(np.int32(0))
    empty = lambda x: varying(
        lax.empty((pieces * x.shape[0], *x.shape[1:]), x.dtype), varying_axes(x)
    )

    def put(carry: tuple[Array, Pieces]) -> tuple[Array, Pieces]:
        number, page = carry
        put = lambda page, new: lax.dynamic_update_slice_in_dim(
            page, new, number * new.shape[0], 0
        )
        page = jax.tree.map(put, page, read(number))
        return number + 1, page

    shapes = jax.eval_shape(read, jnp.int32(0))
    start = jnp.int32(0), jax.tree.map(empty, shapes)
    return lax.while_loop(lambda carry: carry[0] < pieces, put, start)[1]


def write_in_pieces(
    pieces: int,
    write: Callable[[Index, Target, Pieces], Target],
    buffers: Target,
    page: Pieces,
) -> Target:
    """Splits a page along the first axis of each array, and writes the pieces."""
    if pieces == 1:
        return write(np.int32(0), buffers, page)

    def put(carry: tuple[Array, Target]) -> tuple[Array, Target]:
        number, buffers = carry
        size = lambda x: x.shape[0] // pieces
        cut = lambda x: lax.dynamic_slice_in_dim(x, number * size(x), size(x))
        return number + 1, write(number, buffers, jax.tree.map(cut, page))

    start = jnp.int32(0), buffers
    return lax.while_loop(lambda carry: carry[0] < pieces, put, start)[1]
