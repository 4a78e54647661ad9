"""A program compiled so that its transfers overlap with its products, if it fits."""

import warnings
from typing import Any

import jax

from paged_optax.backend.gpu import OVERLAP_OPTIONS, needs_overlap_options
from paged_optax.backend.text import readable_bytes
from paged_optax.compiling.memory_report import device_total


def compile_overlapping(
    lowered: jax.stages.Lowered, device: Any
) -> jax.stages.Compiled:
    """Compiles a program so that transfers overlap with products, if it then fits.

    Args:
      lowered: The program.
      device: One of its devices.

    Returns:
      What XLA makes of it with `OVERLAP_OPTIONS`; without, where the device needs no
      such options, where this XLA does not know them, or where the program would take
      more memory than the device has.
    """
    if not needs_overlap_options(device):
        return lowered.compile()
    try:
        compiled = lowered.compile(dict(OVERLAP_OPTIONS))
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            "this XLA takes no compiler options that overlap transfers and products,"
            f" and the step is compiled without: {str(error).splitlines()[0]}",
            stacklevel=5,
        )
        return lowered.compile()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    needed = device_total(compiled)
    if limit is None or needed <= limit:
        return compiled
    warnings.warn(
        f"transfers do not overlap with products, as the step would then take"
        f" {readable_bytes(needed)} of the device, and JAX has {readable_bytes(limit)}:"
        " give it fewer tokens, or more of the device's memory.",
        stacklevel=5,
    )
    return lowered.compile()
