"""What keeps a leaf apart from all else that a program computes.

Otherwise XLA hoists a leaf's first page, or its only one, and many leaves take memory
at once: 16 leaves of 64 MiB in one page each 2176 MiB of scratch on H200 and v5e
instead of 256. Two things keep a leaf apart:

- **A gate**: a loop whose turns no compiler can count. A gate given from outside as 0
  moves no byte. On a GPU each of its turns waits for the host.
- **A call that XLA:GPU does not inline**: the same bytes, and no wait. XLA fuses
  nothing in it outside of loops, so that every page must be computed in one.

Neither puts leaves in an order: each can be updated as soon as its gradient is there,
and the gradient can then go.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from paged_optax.backend.barriers import HAS_UNINLINED_CALLS, uninlined_call

Given = TypeVar("Given", bound=PyTree)
Changing = TypeVar("Changing", bound=PyTree)

#: What is to be computed of what is given, and of what changes.
Run = Callable[[Given, Changing], Changing]


def kept_apart(
    run: Run[Given, Changing],
    given: tuple[Given, Changing],
    gate: Int[Array, ""] | None,
    in_loops: bool,
) -> Changing:
    """Computes a leaf, apart from all else.

    Args:
      run: Computes it.
      given: What it is given, and what it changes.
      gate: How often to run; None: once.
      in_loops: Whether a GPU computes all of it in loops.

    Returns:
      What it changes.
    """
    if gate is not None or not in_loops or not HAS_UNINLINED_CALLS:
        return _gated(run, gate, *given)
    run = jax.jit(run)  # traced once for two uses
    gated = functools.partial(_gated, run, None)
    called = uninlined_call(run)
    return lax.platform_dependent(*given, cpu=gated, tpu=gated, default=called)


def _gated(
    run: Run[Given, Changing],
    gate: Int[Array, ""] | None,
    given: Given,
    changing: Changing,
) -> Changing:
    trips = _open_gate() if gate is None else gate
    return lax.while_loop(
        lambda carry: carry[0] < trips,
        lambda carry: (carry[0] + 1, run(given, carry[1])),
        (jnp.int32(0), changing),
    )[1]


def _open_gate() -> Int[Array, ""]:
    """A trip count of 1. XLA:CPU sees it, which does no harm; others cannot see it."""
    return lax.platform_dependent(
        cpu=lambda: jnp.int32(1),
        default=lambda: lax.optimization_barrier(jnp.int32(1)),
    )
