"""Where XLA differs between platforms: faults by version, and what one alone computes.

A program is traced once, and lowered later for a platform that no trace knows. So each
difference is a choice of `lax.platform_dependent`, and the usual ones are here by name.
How a GPU and a TPU cut a leaf is in `paged_optax.engine.gpu_pages`.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata

from paged_optax.backend.types import varying, varying_axes

# Each of these faults was checked on jax 0.10.2, which has it, and on 0.12.0.1, which
# has not. They end with jax 0.11.2.
_BEFORE_0_11_2 = jax.__version_info__ < (0, 11, 2)

#: XLA:GPU derives a transfer's address from the loop's own variable alone, and ignores
#: what is computed of it (openxla/xla#46308).
GPU_NEEDS_RAW_INDEX = _BEFORE_0_11_2

#: Whether XLA:GPU knows the address of the page, or of the layer, whose turn is next.
GPU_FETCHES_AHEAD = not GPU_NEEDS_RAW_INDEX

#: Whether XLA:GPU has a stream for each direction of the link. Before, it deals what it
#: transfers to four streams in turn (0.11.2), so that both directions meet on one.
GPU_HAS_STREAMS_BY_DIRECTION = jax.__version_info__ >= (0, 12)

#: XLA:GPU copies the host arrays that a conditional returns, also those that a branch
#: hands through.
GPU_COPIES_FOR_CONDITIONALS = _BEFORE_0_11_2

#: XLA:CPU drops optimization barriers before it fuses. The fetches of pages then fuse
#: into every one of their uses, reads and writes of a leaf overlap, and each page
#: copies the whole leaf: 9 times the time at 4 pages a leaf, 60 times at 64.
CPU_DROPS_BARRIERS = _BEFORE_0_11_2

# jax 0.10.2 has none, 0.12.0.1 has it.
_call = getattr(xla_metadata, "xla_metadata_call", None)

#: Whether XLA:GPU can be told to keep a call.
HAS_UNINLINED_CALLS = _call is not None

Tree = TypeVar("Tree")


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
    return lax.platform_dependent(values, cpu=function, default=_same)


def on_tpu(function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on a TPU, and nothing elsewhere."""
    return lax.platform_dependent(values, tpu=function, default=_same)


def except_on_cpu(function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on accelerators, and nothing on a CPU."""
    return lax.platform_dependent(values, cpu=_same, default=function)


def except_on_gpu(function: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Applies a function on a CPU and a TPU, and nothing elsewhere."""
    return lax.platform_dependent(values, cpu=function, tpu=function, default=_same)


def _same(values: Tree) -> Tree:
    return values


def unfused_on_cpu(compute: Callable[[], Tree]) -> Callable[[], Tree]:
    """A function that XLA:CPU finishes before its results are used."""
    return functools.partial(_conditional, compute) if CPU_DROPS_BARRIERS else compute


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
