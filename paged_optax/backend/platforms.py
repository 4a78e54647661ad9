"""XLA bugs by platform and version, and operations for one platform only.

A program is traced once and lowered later for an unknown platform, so each difference
is a branch of `lax.platform_dependent`.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata

from paged_optax.backend.types import varying, varying_axes

# Checked with jax 0.10.2, which has these bugs, and 0.12.0.1. Fixed in jax 0.11.2.
_BEFORE_0_11_2 = jax.__version_info__ < (0, 11, 2)

#: XLA:GPU computes a transfer's address from the loop variable itself, ignoring
#: arithmetic on it (openxla/xla#46308).
GPU_NEEDS_RAW_INDEX = _BEFORE_0_11_2

#: Whether XLA:GPU computes the address of the next page, or layer.
GPU_FETCHES_AHEAD = not GPU_NEEDS_RAW_INDEX

#: Whether XLA:GPU has a stream for each direction of the link. 0.11.2 deals transfers
#: round-robin to four streams, which mix both directions.
GPU_HAS_STREAMS_BY_DIRECTION = jax.__version_info__ >= (0, 12)

#: XLA:GPU copies the host arrays that a conditional returns, even unchanged ones.
GPU_COPIES_FOR_CONDITIONALS = _BEFORE_0_11_2

#: XLA:CPU drops optimization barriers before it fuses. Fetches of pages then fuse into
#: their uses, reads and writes of a leaf overlap, and each page copies the whole leaf:
#: 9 times the time at 4 pages a leaf, 60 times at 64.
CPU_DROPS_BARRIERS = _BEFORE_0_11_2

# Missing in jax 0.10.2.
_call = getattr(xla_metadata, "xla_metadata_call", None)

#: Whether a call can be exempted from XLA:GPU's inlining.
HAS_UNINLINED_CALLS = _call is not None

Tree = TypeVar("Tree")


def barrier(values: Tree) -> Tree:
    """`lax.optimization_barrier` for values that vary along different mesh axes."""
    leaves, structure = jax.tree.flatten(values)
    axes = list(map(varying_axes, leaves))
    # Within a `jax.shard_map` jax 0.10.2 makes all operands of a barrier vary along the
    # axes of each, so that operands are grouped by their axes.
    for item in set(axes):
        alike = [i for i, x in enumerate(axes) if x == item]
        passed = lax.optimization_barrier([leaves[i] for i in alike])
        for i, x in zip(alike, passed, strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)


def on_platforms(names: str, function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on the platforms named; elsewhere the identity."""
    branches = dict.fromkeys(names.split(), function)
    return lax.platform_dependent(values, **branches, default=lambda values: values)


def unfused_on_cpu(compute: Callable[[], Tree]) -> Callable[[], Tree]:
    """Returns a function that XLA:CPU does not fuse with uses of its results."""
    return functools.partial(_conditional, compute) if CPU_DROPS_BARRIERS else compute


def barrier_on_cpu(compute: Callable[[], Tree]) -> Tree:
    """Calls a function; XLA:CPU completes it before its results are used."""
    if CPU_DROPS_BARRIERS:
        return _conditional(compute)
    # Without a barrier reads and writes of a stack overlap, and XLA:CPU copies it.
    return lax.platform_dependent(cpu=lambda: barrier(compute()), default=compute)


def uninlined_call(compute: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns a function that XLA:GPU does not inline (`HAS_UNINLINED_CALLS`)."""
    # Nothing is hoisted out of the call, and it starts after an earlier such call has
    # ended, at no cost at run time (openxla/xla, `call_inliner.cc` and
    # `ThunkEmitter::EmitCall`). XLA:GPU fuses nothing in it outside of loops.
    assert _call is not None
    return _call(compute, inlineable="false")


def _conditional(compute: Callable[[], Tree]) -> Tree:
    """Computes in a branch that is always taken, which XLA:CPU does not fuse."""
    compute = jax.jit(compute, inline=True)  # one trace for three uses

    def conditional() -> Tree:
        shapes = jax.eval_shape(compute)
        always = lax.optimization_barrier(True)
        zeros = lambda x: varying(jnp.zeros(x.shape, x.dtype), varying_axes(x))
        return lax.cond(always, compute, lambda: jax.tree.map(zeros, shapes))

    return lax.platform_dependent(cpu=conditional, default=compute)
