"""What holds a compiler's passes apart.

XLA:CPU of jax < 0.11.2 drops optimization barriers before it fuses. The fetches of
pages then fuse into every one of their uses, reads and writes of a leaf overlap, and
each page copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64
(jax 0.10.2; no copy is left in 0.12.0.1).
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11, 2)

Tree = TypeVar("Tree")


def on_cpu(function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on a CPU, and nothing elsewhere."""
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


def apart(compute: Callable[[], Tree]) -> Tree:
    """Calls a function so that XLA:CPU finishes it before its results are used.

    Where barriers are dropped, the function is a branch that is always taken.
    """
    return _conditional(compute) if _CPU_DROPS_BARRIERS else compute()


def finished(compute: Callable[[], Tree]) -> Tree:
    """Calls a function so that XLA:CPU finishes all of it before any of it is used.

    Otherwise reads and writes of a stack overlap, and it copies the stack.
    """
    if _CPU_DROPS_BARRIERS:
        return _conditional(compute)
    return lax.platform_dependent(
        cpu=lambda: lax.optimization_barrier(compute()), default=compute
    )


def _conditional(compute: Callable[[], Tree]) -> Tree:
    compute = jax.jit(compute, inline=True)  # so it is traced once for three uses

    def conditional() -> Tree:
        shapes = jax.eval_shape(compute)
        always = lax.optimization_barrier(True)
        blank = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(always, compute, blank)

    return lax.platform_dependent(cpu=conditional, default=compute)
