"""Pages of one leaf through the device.

A page is read from host memory, computed on, and written back over itself, inside
one loop a leaf. Two choices keep this right and small on every compiler at hand:

- **The loop's own variable is the index.** It counts rows, not pages: it starts at
  0 and steps by the rows of a page, so that the slice's start needs no arithmetic.
  XLA:GPU before openxla/xla#46308 derives a transfer's address from the induction
  variable alone and ignores what is computed from it; with this form its transfer
  descriptors cover exactly the page in jax 0.10.2 and in 0.12.0.1. No reshape is
  needed either: a last page of fewer rows is one more access at a fixed row.
- **A leaf of a single page sits behind a gate**: a loop whose trip count the compiler
  cannot see. Nothing of the leaf is hoisted out of it, so such leaves stay one at a
  time too (16 leaves of 64 MiB: 256 MiB of scratch on H200 and v5e instead of 2176).
  A gate given from outside as 0 moves no byte.

This module knows nothing of Optax.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from paged_optax.memory import DEVICE, HOST, on_host
from paged_optax.plan import Pages, whole

if TYPE_CHECKING:
    from paged_optax.granularity import Program

# XLA:CPU of jax < 0.11.2 drops optimization barriers before it fuses. The fetches
# then fuse into every one of their uses, reads and writes of a leaf overlap, and
# each page copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64
# (jax 0.10.2; no copy is left in 0.12.0.1).
_CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11, 2)


def _open_gate() -> Int[Array, ""]:
    """A trip count of 1: known to XLA:CPU, which has nothing to bound; else opaque."""
    return lax.platform_dependent(
        cpu=lambda: jnp.int32(1),
        default=lambda: lax.optimization_barrier(jnp.int32(1)),
    )


@functools.partial(jax.jit, static_argnames=("program", "overwrites", "pages"))
def stream(
    arrays: tuple[Array, ...],
    gate: Int[Array, ""] | None = None,
    *,
    program: "Program",
    overwrites: tuple[int, ...],
    pages: Pages,
) -> tuple[Array, ...]:
    """Runs a program over one leaf, page by page, in place.

    Args:
      arrays: The program's arguments, in host or device memory, then any further
        buffers to overwrite. Arrays of the leaf's shape are paged; others (scalars)
        are given to every page whole.
      gate: 1 to update the leaf; 0 to leave it, moving nothing. None always updates.
      program: What to compute on a page; see `granularity.Program`.
      overwrites: For each of its results, the position of the array it replaces,
        of the same shape and dtype.
      pages: The geometry.

    Returns:
      The new arrays, in the order of the results, each in the memory space of the
      array it replaces.
    """
    if not pages.aligned:
        again = functools.partial(stream, program=program, overwrites=overwrites)
        return lax.platform_dependent(
            arrays,
            gate,
            tpu=functools.partial(again, pages=whole(pages.leaf)),
            default=functools.partial(
                again, pages=dataclasses.replace(pages, aligned=True)
            ),
        )
    targets = tuple(dict.fromkeys(overwrites))
    paged = [x.shape == pages.leaf and pages.count > 0 for x in arrays]
    viewed = [
        x.reshape(pages.view) if is_paged else x
        for x, is_paged in zip(arrays, paged, strict=True)
    ]

    def update(start: Int[Array, ""] | int, size: int, buffers: Sequence[Array]):
        current = dict(enumerate(viewed)) | dict(zip(targets, buffers, strict=True))

        def read(position: int) -> Array:
            x = current[position]
            if paged[position] and size < pages.view[pages.axis]:
                x = lax.dynamic_slice_in_dim(x, start, size, pages.axis)
            return jax.device_put(x, DEVICE) if on_host(current[position]) else x

        def write(position: int, page: Array) -> Array:
            x = current[position]
            page = jax.device_put(page, HOST) if on_host(x) else page
            if not paged[position] or size == pages.view[pages.axis]:
                return page
            return lax.dynamic_update_slice_in_dim(x, page, start, pages.axis)

        def compute() -> tuple[Array, ...]:
            inputs = [read(position) for position in range(program.inputs)]
            inputs = _fetched(inputs, [on_host(current[p]) for p in range(len(inputs))])
            return tuple(program(inputs, page_shape))

        # Only what travels is kept apart from its neighbours; gradients and
        # parameters are read and written by the computation itself.
        page_shape = _page_shape(pages, size) if pages.count else None
        sliced = pages.count > 0 and size < pages.view[pages.axis]
        results = _apart(compute) if sliced else compute()
        results = _each(
            lax.optimization_barrier, results, [on_host(current[p]) for p in overwrites]
        )
        for position, result in zip(overwrites, results, strict=True):
            current[position] = write(position, result)
        return tuple(current[position] for position in targets)

    extent = pages.view[pages.axis] if pages.count else 1
    size = pages.size if pages.count else 1
    full = extent - extent % size

    def leaf(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        if full == size:
            buffers = update(0, size, buffers)
        else:
            _, buffers = lax.while_loop(
                lambda carry: carry[0] < full,
                lambda carry: (carry[0] + size, update(carry[0], size, carry[1])),
                (jnp.int32(0), buffers),
            )
        if extent > full:
            buffers = update(full, extent - full, buffers)
        return buffers

    buffers = tuple(viewed[position] for position in targets)
    if gate is None and size < extent == full:
        buffers = leaf(buffers)  # its own loop keeps it together
    else:
        trips = _open_gate() if gate is None else gate
        _, buffers = lax.while_loop(
            lambda carry: carry[0] < trips,
            lambda carry: (carry[0] + 1, leaf(carry[1])),
            (jnp.int32(0), buffers),
        )
    written = dict(zip(targets, buffers, strict=True))
    return tuple(written[p].reshape(arrays[p].shape) for p in overwrites)


@functools.partial(jax.jit, static_argnames=("program", "pages", "dtype"))
def fill(
    arrays: tuple[Array, ...], *, program: "Program", pages: Pages, dtype: jnp.dtype
) -> Array:
    """Makes one leaf in host memory, page by page.

    `lax.empty` moved to the host allocates there and nowhere else, on both
    accelerators (jax 0.10.2, 0.12.0.1), so that the leaf never exists on the device.

    Args:
      arrays: The program's arguments.
      program: What makes a page; its only result is the leaf.
      pages: The geometry.
      dtype: The leaf's dtype.

    Returns:
      The leaf.
    """
    blank = jax.device_put(lax.empty(pages.leaf, dtype), HOST)
    (leaf,) = stream(
        (*arrays, blank), program=program, overwrites=(len(arrays),), pages=pages
    )
    return leaf


def _page_shape(pages: Pages, size: int) -> tuple[int, ...]:
    return (*pages.view[: pages.axis], size, *pages.view[pages.axis + 1 :])


def _each(
    function: Callable[[list[Array]], Sequence[Array]],
    values: Sequence[Array],
    chosen: Sequence[bool],
) -> list[Array]:
    """Applies a function to the chosen values together."""
    found = [x for x, yes in zip(values, chosen, strict=True) if yes]
    made = iter(function(found))
    return [next(made) if yes else x for x, yes in zip(values, chosen, strict=True)]


def _fetched(values: Sequence[Array], travelled: Sequence[bool]) -> list[Array]:
    """Pages from the host, kept apart from what is computed of them.

    On a TPU the results then take over the fetched pages (16 leaves of 4096x4096,
    8 MiB pages, v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
    """

    def fence(pages: list[Array]) -> Sequence[Array]:
        return lax.platform_dependent(
            pages, cpu=lambda pages: pages, default=lax.optimization_barrier
        )

    return _each(fence, values, travelled)


def _apart(compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Calls a function so that XLA:CPU finishes it before its results are used."""
    if not _CPU_DROPS_BARRIERS:
        return compute()

    def conditional() -> tuple[Array, ...]:
        blank = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(compute)]
        always = lax.optimization_barrier(True)
        return lax.cond(always, compute, lambda: tuple(blank))

    return lax.platform_dependent(cpu=conditional, default=compute)
