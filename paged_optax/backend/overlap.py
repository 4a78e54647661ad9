"""What XLA:GPU must be told, so that transfers overlap with products.

It begins a transfer long before its result is needed if its latency-hiding scheduler is
on. By default that is so on a Hopper GPU alone. On others most transfers begin right
before they are waited for: a layerwise step of Llama-3-8B on an RTX 4090 would take
1.04 s at the rates at which it takes 0.76 with these options (jax 0.12.0.1, by the
model of its schedule in `tests/steps.py`).

The scheduler keeps within a limit of memory, and so does rematerialization. XLA counts
arrays on the host against it. So the limit is lifted here. `jit_step` looks at what the
compiled program takes instead.
"""

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import PyTree

from paged_optax.backend.arrays import is_traced
from paged_optax.backend.capability import compute_capability
from paged_optax.backend.memory import on_host

_HOPPER = 9
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"

#: What to give `jax.jit(..., compiler_options=...)` on a GPU that is no Hopper.
OVERLAPPING: Mapping[str, Any] = MappingProxyType(
    {_SCHEDULER: True, "xla_gpu_memory_limit_slop_factor": 1000}
)

#: How the warning begins, for who filters it.
UNTOLD = "XLA overlaps transfers with products on this GPU only if it is told to"


def needs_options(device: Any) -> bool:
    """Whether XLA overlaps transfers on a device only if it is told to.

    Nothing is told where `XLA_FLAGS` say something of the scheduler.
    """
    capability = compute_capability(device)
    told = _SCHEDULER in os.environ.get("XLA_FLAGS", "")
    return capability is not None and int(capability) != _HOPPER and not told


def warn_if_untold(tree: PyTree) -> None:
    """Warns of traced arrays in host memory, on a GPU that overlaps only if told to.

    Which options `jax.jit` has been given shows nowhere in a trace. So the warning says
    how to silence it. `jit_step` ignores it while it traces, and gives the options.
    """
    if not is_traced(tree) or not any(map(on_host, jax.tree.leaves(tree))):
        return
    if not needs_options(jax.local_devices()[0]):
        return
    flags = " ".join(f"--{name}={str(x).lower()}" for name, x in OVERLAPPING.items())
    # One text at one place: Python shows it once, and again after filters changed.
    warnings.warn(
        f"{UNTOLD}, and what is compiled by another than paged_optax.jit_step does not"
        " tell it. Copy this into your jax.jit, or eqx.filter_jit:"
        f" compiler_options={dict(OVERLAPPING)!r}. If it is there, silence this:"
        " warnings.filterwarnings('ignore', 'XLA overlaps transfers'). Or set this"
        " before JAX starts, as for nnx.jit, which takes no options:"
        f" XLA_FLAGS='{flags}'.",
        stacklevel=1,
    )
