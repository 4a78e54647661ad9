"""Barriers that keep a compiler's passes from moving or fusing computations."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata

from paged_optax.backend.axis_types import varying, varying_axes

#: XLA:CPU drops optimization barriers before it fuses. The fetches of pages then fuse
#: into every one of their uses, reads and writes of a leaf overlap, and each page
#: copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64. So it is
#: with jax 0.10.2. With 0.12.0.1 it is not; this ends with jax 0.11.2.
CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11, 2)

# jax 0.10.2 has none, 0.12.0.1 has it.
_call = getattr(xla_metadata, "xla_metadata_call", None)

Tree = TypeVar("Tree")

#: Whether XLA:GPU can be told to keep a call.
HAS_UNINLINED_CALLS = _call is not None


def barrier(values: Tree) -> Tree:
    """`lax.optimization_barrier` of values that need not vary alike."""
    leaves, structure = jax.tree.flatten(values)
    axes = list(map(varying_axes, leaves))
    # Within a `jax.shard_map` jax 0.10.2 makes all that pass one barrier vary along the
    # axes of each. So values pass one with those that vary as they do.
    for each in set(axes):
        alike = [i for i, x in enumerate(axes) if x == each]
        passed = lax.optimization_barrier([leaves[i] for i in alike])
        for i, x in zip(alike, passed, strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)


def on_cpu(function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on a CPU, and nothing elsewhere."""
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


def unfused_on_cpu(compute: Callable[[], Tree]) -> Tree:
    """Calls a function so that XLA:CPU finishes it before its results are used."""
    return _conditional(compute) if CPU_DROPS_BARRIERS else compute()


def barrier_on_cpu(compute: Callable[[], Tree]) -> Tree:
    """Calls a function so that XLA:CPU finishes all of it before any of it is used."""
    if CPU_DROPS_BARRIERS:
        return _conditional(compute)
    # Without a barrier reads and writes of a stack overlap, and XLA:CPU copies it.
    return lax.platform_dependent(cpu=lambda: barrier(compute()), default=compute)


def uninlined_call(compute: Callable[..., Tree]) -> Callable[..., Tree]:
    """A function that XLA:GPU does not inline, where `HAS_UNINLINED_CALLS`."""
    # So nothing is hoisted out of it, and it is never begun before another such call
    # has ended. At run time there is nothing around it: its kernels follow those before
    # (openxla/xla, `call_inliner.cc` and `ThunkEmitter::EmitCall`). But XLA:GPU fuses
    # nothing in it outside of loops.
    assert _call is not None
    return _call(compute, inlineable="false")


def _conditional(compute: Callable[[], Tree]) -> Tree:
    """Computes in a branch that is always taken, which XLA:CPU does not fuse."""
    compute = jax.jit(compute, inline=True)  # so it is traced once for three uses

    def conditional() -> Tree:
        shapes = jax.eval_shape(compute)
        always = lax.optimization_barrier(True)
        zeros = lambda x: varying(jnp.zeros(x.shape, x.dtype), varying_axes(x))
        blank = lambda: jax.tree.map(zeros, shapes)
        return lax.cond(always, compute, blank)

    return lax.platform_dependent(cpu=conditional, default=compute)
