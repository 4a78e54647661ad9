"""The gate of a leaf: whether it is updated, apart from all else that is computed.

Otherwise XLA hoists a leaf's first page, or its only one, and many leaves take memory
at once: 16 leaves of 64 MiB in one page each 2176 MiB of scratch on H200 and v5e
instead of 256. Two things keep a leaf together:

- **A gate**: a loop whose turns no compiler can count. A gate of 0 moves no byte. On a
  GPU each of its turns waits for the host.
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

from paged_optax.backend.xla import HAS_UNINLINED_CALLS, uninlined_call

Arguments = TypeVar("Arguments", bound=PyTree)
Changing = TypeVar("Changing", bound=PyTree)


def gated(
    run: Callable[[Arguments, Changing], Changing],
    arguments: tuple[Arguments, Changing],
    gate: Int[Array, ""] | None,
    in_loops: bool,
) -> Changing:
    """Updates a leaf as often as its gate says.

    Args:
      run: Updates it.
      arguments: What `run` reads, and what it changes.
      gate: How often to run; None: once.
      in_loops: Whether a GPU computes all of it in loops.

    Returns:
      What it changes.
    """
    if gate is not None or not in_loops or not HAS_UNINLINED_CALLS:
        return _counted(run, gate, *arguments)
    run = jax.jit(run)  # traced once for two uses
    counted = functools.partial(_counted, run, None)
    called = uninlined_call(run)
    return lax.platform_dependent(*arguments, cpu=counted, tpu=counted, default=called)


def _counted(
    run: Callable[[Arguments, Changing], Changing],
    gate: Int[Array, ""] | None,
    arguments: Arguments,
    changing: Changing,
) -> Changing:
    if gate is None:
        # XLA:CPU sees that this is 1, which does no harm; others cannot see it.
        gate = lax.platform_dependent(
            cpu=lambda: jnp.int32(1),
            default=lambda: lax.optimization_barrier(jnp.int32(1)),
        )
    return lax.while_loop(
        lambda carry: carry[0] < gate,
        lambda carry: (carry[0] + 1, run(arguments, carry[1])),
        (jnp.int32(0), changing),
    )[1]
