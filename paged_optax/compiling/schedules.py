"""The compiler's options for a schedule that overlaps transfers and products.

XLA:GPU begins a transfer long before its result is needed if its latency-hiding
scheduler is on. By default that is so on a Hopper GPU alone. On others most transfers
begin right before they are waited for: a layerwise step of Llama-3-8B on an RTX 4090
would take 1.04 s at the rates at which it takes 0.76 with these options (jax 0.12.0.1,
by the model of its schedule in `tests/steps.py`).

The scheduler keeps within a limit of memory, and so does rematerialization. XLA counts
arrays on the host against it. So the limit is lifted here, and what the compiled
program takes is looked at instead.
"""

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from paged_optax.backend.capability import compute_capability
from paged_optax.backend.sizes import readable_bytes
from paged_optax.compiling.memory_report import memory_report

_HOPPER = 9
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"

#: What to give `jax.jit(..., compiler_options=...)` on a GPU that is no Hopper.
OVERLAPPING: Mapping[str, Any] = MappingProxyType(
    {_SCHEDULER: True, "xla_gpu_memory_limit_slop_factor": 1000}
)


def needs_options(device: Any) -> bool:
    """Whether XLA overlaps transfers on a device only if it is told to.

    Nothing is told where `XLA_FLAGS` say something of the scheduler.
    """
    capability = compute_capability(device)
    told = _SCHEDULER in os.environ.get("XLA_FLAGS", "")
    return capability is not None and int(capability) != _HOPPER and not told


def compile_overlapping(
    lowered: jax.stages.Lowered, device: Any
) -> jax.stages.Compiled:
    """Compiles a program so that transfers overlap with products, if it then fits.

    Args:
      lowered: The program.
      device: One of its devices.

    Returns:
      What XLA makes of it with `OVERLAPPING`; without, where the device needs no such
      options, where this XLA does not know them, or where the program would take more
      memory than the device has.
    """
    if not needs_options(device):
        return lowered.compile()
    try:
        compiled = lowered.compile(dict(OVERLAPPING))
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            "this XLA takes no compiler options that overlap transfers and products,"
            f" and the step is compiled without: {str(error).splitlines()[0]}",
            stacklevel=5,
        )
        return lowered.compile()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    needed = memory_report(compiled).device_total
    if limit is None or needed <= limit:
        return compiled
    warnings.warn(
        f"transfers do not overlap with products, as the step would then take"
        f" {readable_bytes(needed)} of the device, and JAX has {readable_bytes(limit)}:"
        " give it fewer tokens, or more of the device's memory.",
        stacklevel=5,
    )
    return lowered.compile()
