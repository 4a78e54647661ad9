"""Compilation with the options that overlap transfers with products."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import SCHEDULED, overlap_options
from paged_optax.backend.text import readable_bytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.memory_report import device_total


def compile_overlapping(
    jit: Callable[..., Wrapped],
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    device: Any,
) -> tuple[Wrapped, Compiled]:
    """Compiles a program so that its transfers overlap with products.

    XLA's scheduler keeps more buffers alive. It is left out if the program then takes
    more memory than the device has. XLA versions without these options take none.

    Args:
      jit: Returns the function to compile, for compiler options by name.
      args: The arguments that it is compiled for.
      kwargs: Its arguments by name.
      device: The device that runs it; None if nothing is transferred.
    """

    def compiled_with(options: Mapping[str, Any]) -> tuple[Wrapped, Compiled]:
        jitted = jit(**options)
        return jitted, jitted.lower(*args, **kwargs).compile()

    options = overlap_options(device)
    try:
        jitted, compiled = compiled_with(options)
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        warn_user(
            "this XLA takes no compiler options that overlap transfers and products,"
            f" and the step is compiled without: {str(error).splitlines()[0]}"
        )
        return compiled_with({})
    unscheduled = {name: x for name, x in options.items() if name not in SCHEDULED}
    limit = None if unscheduled == options else _memory_limit(device)
    if limit is None or (needed := device_total(compiled)) <= limit:
        return jitted, compiled
    warn_user(
        f"transfers do not overlap with products, as the step would then take"
        f" {readable_bytes(needed)} of the device, and JAX has {readable_bytes(limit)}:"
        " give it fewer tokens, or more of the device's memory."
    )
    return compiled_with(unscheduled)


def _memory_limit(device: Any) -> int | None:
    """The bytes that JAX takes of a device; None if it does not report them."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None  # it is another process's, or only compiled for
