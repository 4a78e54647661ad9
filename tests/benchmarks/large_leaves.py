"""Whether moments of several GB come back bit for bit, from beyond 2^31 and 2^32 bytes.

Every row has values of its own: integers below 2^20, which floats hold exactly, and
which no shift by less than 2^20 rows, 16 GiB, gives again. Two steps of a sum in two
moments read and write each page, both ways at once where the engine does. The moments
are then compared as whole arrays, which another transfer brings to the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import paged_optax as po
from helpers.machine import shortage
from paged_optax.backend.pinned_pool import pinned_bytes
from paged_optax.cli import machine

Row = dict[str, Any]

COLUMNS = 4096
# Rows of 16 KiB: beyond 2^32 bytes, beyond 2^31, and what any machine has. The last
# page is smaller than the others.
_MORE = 19205
ROWS = ((1 << 18) + _MORE, (1 << 17) + _MORE, 1029)


def check(small: bool) -> tuple[dict[str, int], Row]:
    """Sends the largest leaf that fits, by page and whole, and compares its bits.

    Args:
      small: Whether the smallest is enough.

    Returns:
      For each comparison how many values are wrong; and the leaf's bytes, with the
      reason if it is none of those beyond 2^32.

    Raises:
      MemoryError: If not even the smallest fits.
    """
    rows, reason = _fitting(ROWS[-1:] if small else ROWS)
    wrong = {**_by_page(rows), "whole": _whole(rows)}
    return wrong, {"leaf_bytes": 4 * COLUMNS * rows, "why_no_larger": reason}


def _fitting(sizes: tuple[int, ...]) -> tuple[int, str]:
    """The rows of the largest leaf for which there is memory; why of no larger one."""
    reason = ""
    for rows in sizes:
        size = 4 * COLUMNS * rows
        # The gradient and a moment on the device, both moments on the host.
        pool = pinned_bytes((size, size))
        short = "the pool's limit" if pool is None else shortage(2 * size, pool)
        if short is None:
            return rows, reason
        reason = short
    raise MemoryError(reason)


def pattern(rows: int) -> Array:
    """What is sent."""
    along = lambda axis: lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), axis)
    return ((along(0) * 1021 + along(1) * 8191) % (1 << 20)).astype(jnp.float32)


def _wrong(x: Array, times: int) -> int:
    """How many values are not so many times the pattern's."""

    def count(x: Array) -> Array:
        here = jax.device_put(x, jax.memory.Space.Device)
        return jnp.count_nonzero(here != times * pattern(x.shape[0]))

    return int(jax.jit(count)(x))


def _sums() -> optax.GradientTransformation:
    """Adds up gradients in a moment, and that in another: g, 2g and g, 3g."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        first = jax.tree.map(jnp.add, state["first"], gradients)
        second = jax.tree.map(jnp.add, state["second"], first)
        updates = jax.tree.map(jnp.subtract, second, first)
        return updates, {"first": first, "second": second}

    init = lambda params: {"first": zeros(params), "second": zeros(params)}
    return optax.GradientTransformation(init, update)


def _by_page(rows: int) -> dict[str, int]:
    made = jax.jit(pattern, static_argnums=0)
    tx = po.paged(_sums(), min_paged_size=0)
    updates = made(rows)
    state = tx.init(updates)
    run = lambda gradients, state: tx.update(gradients, state)
    step = po.jit_step(run, updates, state, donate_argnums=(0, 1))
    updates, state = step(updates, state)
    found = {"update after a step": int(jnp.count_nonzero(updates))}
    del updates
    updates, state = step(made(rows), state)
    found["update"] = _wrong(updates, 1)
    del updates
    found["first moment"] = _wrong(state["first"], 2)
    found["second moment"] = _wrong(state["second"], 3)
    return found


def _whole(rows: int) -> int:
    """One transfer of a whole leaf down, and one up."""
    _, host = machine.both_memories()
    down = jax.jit(pattern, static_argnums=0, out_shardings=host)
    return _wrong(down(rows), 1)
