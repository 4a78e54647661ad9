"""What of XLA this code must know: faults by version, barriers, options, pinned memory.

XLA:GPU begins a transfer long before its result is needed, and computes meanwhile, if
two things are so:

- Its latency-hiding scheduler is on. By default that is so on a Hopper GPU alone. On
  others most transfers begin right before they are waited for: a layerwise step of
  Llama-3-8B on an RTX 4090 would take 1.04 s at the rates at which it takes 0.76 (jax
  0.12.0.1, by the model of its schedule in `tests/steps.py`).
- Nothing is a CUDA graph. XLA makes graphs of loops, and by default lets what is in one
  follow on each other, transfers too (openxla/xla#48900). A layerwise step of
  Llama-3-8B in eight bits took 1.14 s of an H200, and 0.79 s without graphs (jax
  0.11.2, measured by `tests/benchmarks/decoders.py`). Graphs that are `CONCURRENT` took
  0.72 s, and 3.3 GiB more of the device.
"""

import functools
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import xla_metadata
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.backend.types import is_traced, varying, varying_axes

# Each of these faults was checked on jax 0.10.2, which has it, and on 0.12.0.1, which
# has not. They end with jax 0.11.2.
_BEFORE_0_11_2 = jax.__version_info__ < (0, 11, 2)

#: XLA:GPU derives a transfer's address from the loop's own variable alone, and ignores
#: what is computed of it (openxla/xla#46308).
GPU_NEEDS_RAW_INDEX = _BEFORE_0_11_2

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
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


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


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 8.9; None of other devices."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if re.fullmatch(r"[0-9]+[.][0-9]+", text) else None


_HOPPER = 9
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
#: Makes no CUDA graphs. The program takes the same bytes with them and without.
NO_GRAPHS: Mapping[str, Any] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})

#: Switches the scheduler on. It keeps within a limit of memory, and so does
#: rematerialization. XLA counts arrays on the host against it, so the limit is lifted:
#: `jit_step` looks at what the compiled program takes instead.
SCHEDULED: Mapping[str, Any] = MappingProxyType(
    {_SCHEDULER: True, "xla_gpu_memory_limit_slop_factor": 1000}
)

#: How the warning begins, for who filters it.
NO_OVERLAP = "XLA overlaps transfers with products on this GPU only if it is told to"


def overlap_options(device: Any) -> dict[str, Any]:
    """What to give `jax.jit(..., compiler_options=...)`, so that transfers overlap.

    Nothing on a device that is no NVIDIA GPU, and nothing that `XLA_FLAGS` decide.
    """
    capability = compute_capability(device)
    if capability is None:
        return {}
    told = _flags()
    graphs = {} if "xla_gpu_command_buffer_scheduling_mode" in told else NO_GRAPHS
    scheduled = int(capability) == _HOPPER or _SCHEDULER in told
    options = {**graphs, **({} if scheduled else SCHEDULED)}
    return {name: x for name, x in options.items() if name not in told}


def _flags() -> set[str]:
    """The names in `XLA_FLAGS`, which are flags or the path of a file that has them."""
    text = os.environ.get("XLA_FLAGS", "")
    if not text.lstrip().startswith("-") and os.path.isfile(text):
        text = pathlib.Path(text).read_text()
    return {flag.lstrip("-").partition("=")[0] for flag in text.split()}


def warn_without_overlap(tree: PyTree) -> None:
    """Warns of traced arrays in host memory, on a GPU that overlaps only if told to."""
    if not is_traced(tree) or not any(map(on_host, jax.tree.leaves(tree))):
        return
    options = overlap_options(jax.local_devices()[0])
    if not options:
        return
    flags = " ".join(f"--{name}={str(x).lower()}" for name, x in options.items())
    # Which options `jax.jit` has been given shows nowhere in a trace. So the warning
    # says how to silence it. `jit_step` ignores it while it traces, and gives the
    # options. One text at one place: Python shows it once, and again after filters
    # changed.
    warnings.warn(
        f"{NO_OVERLAP}, and what is compiled by another than paged_optax.jit_step does"
        " not tell it. Copy this into your jax.jit, or eqx.filter_jit:"
        f" compiler_options={options!r}. If it is there, silence this:"
        " warnings.filterwarnings('ignore', 'XLA overlaps transfers'). Or set this"
        " before JAX starts, as for nnx.jit, which takes no options:"
        f" XLA_FLAGS='{flags}'.",
        stacklevel=1,
    )


# The pool is a `BFCAllocator` that grows (XLA's `pjrt/gpu/gpu_helpers.cc`). Its regions
# double from 2 MiB on, are never merged, and are kept until the process ends. So it may
# take twice what is needed, and the limit decides how much the last region has.

#: An integer, of GiB: XLA multiplies it by 2^30.
POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 1 << 30
_FIRST_REGION = 2 << 20  # bytes
_UNIT = 256  # bytes: all chunks are multiples
_SPLIT = 128 << 20  # a chunk that exceeds what is asked by so much is split
# Arrays of a number of bytes of which nothing else is known.
_PIECE = 64 << 20
# The most that the pool should take over what is needed.
_MOST = 1.15
# What it should hand out at least, over that: transfers of arrays that are not pinned
# go through the pool too.
_LEAST = 33 / 32

ArrayBytes = int | Sequence[int]


def pool_limit() -> int:
    """Bytes of pinned host memory that XLA:GPU will hand out: 64 GiB unless told."""
    return int(os.environ.get(POOL_LIMIT, "64")) * _GIB


def pinned_bytes(needed: ArrayBytes, limit: int | None = None) -> int | None:
    """The bytes that the pool takes of the machine; None if it has too little room.

    It is simulated by the rules of XLA's `tsl/framework/bfc_allocator.cc`.

    Args:
      needed: Bytes of each array in host memory, in the order in which they are made;
        or of all of them, which then are many small ones.
      limit: Bytes that the pool may take at most; None: as `pool_limit` has it.
    """
    limit = pool_limit() if limit is None else limit
    free: list[int] = []
    region, taken = _FIRST_REGION, 0
    for size in _arrays(needed):
        asked = -(-size // _UNIT) * _UNIT
        if not any(chunk >= asked for chunk in free):
            # A region is added: as large as the last one doubled, or doubled until it
            # holds the array, and never beyond the limit.
            left = (limit - taken) // _UNIT * _UNIT
            if asked > left:
                return None
            doubled = region
            while doubled < asked:
                doubled *= 2
            free.append(min(doubled, left))
            taken += free[-1]
            # A region that was made larger for an array comes once more.
            region = 2 * region if doubled == region else doubled
        # The smallest free chunk that is large enough is taken. What it has more is
        # split off if that is 128 MiB, or as much as was asked.
        chunk = min(chunk for chunk in free if chunk >= asked)
        free.remove(chunk)
        more = chunk - asked
        if more >= min(asked, _SPLIT):
            free.append(more)
    return taken


def limit_gigabytes(needed: ArrayBytes) -> int:
    """The `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` to set for arrays in host memory.

    It is the most that is at most 1.15 of what is needed, if the pool then has room for
    all arrays and for a 32nd of their bytes; otherwise the least that has.
    """
    total = sum(_arrays(needed)) / _GIB
    gigabytes = max(1, math.ceil(_LEAST * total), math.floor(_MOST * total))
    while pinned_bytes(needed, gigabytes * _GIB) is None:
        gigabytes += 1
    return gigabytes


def _arrays(needed: ArrayBytes) -> Iterable[int]:
    """The bytes of each array; arrays of no bytes take nothing."""
    if not isinstance(needed, int):
        return filter(None, needed)
    pieces, rest = divmod(needed, _PIECE)
    return filter(None, (*[_PIECE] * pieces, rest))
