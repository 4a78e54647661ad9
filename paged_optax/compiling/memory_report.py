"""Bytes and transfers of a compiled program, and the options to compile it with."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import SCHEDULED, overlap_options
from paged_optax.backend.text import readable_bytes, table
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.hlo import is_partitioned, transfers
from paged_optax.engine.shards import UNSHARDED


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """XLA's own buffer assignment, in bytes, for one device. Prints as a table.

    Attributes:
      device_arguments: Arguments in device memory.
      device_outputs: Results in device memory.
      device_aliased: Results that take over a donated argument's buffer.
      device_temp: Scratch.
      host_arguments: Arguments in host memory.
      host_outputs: Results in host memory.
      host_aliased: Results in host memory that take over a donated argument's.
      host_temp: Scratch in host memory: 0, or something is copied whole.
      transfers: Asynchronous transfers to or from host memory in the program's text.
      host_known: Whether this backend tells host from device memory. XLA:CPU does
        not: everything counts as device memory there.
      unsharded: Whether it is a program of several devices that pages leaves whose
        shardings were not known: XLA then gathers pages from all devices.
      hlo: The optimized program.
      platform: Whose program it is: `"cpu"`, `"gpu"` or `"tpu"`.
    """

    device_arguments: int
    device_outputs: int
    device_aliased: int
    device_temp: int
    host_arguments: int
    host_outputs: int
    host_aliased: int
    host_temp: int
    transfers: int
    host_known: bool = True
    unsharded: bool = False
    hlo: str = dataclasses.field(default="", repr=False)
    platform: str = ""

    @property
    def device_total(self) -> int:
        """Peak device bytes: arguments, results that alias none of them, scratch."""
        return (
            self.device_arguments
            + self.device_outputs
            - self.device_aliased
            + self.device_temp
        )

    @property
    def host_total(self) -> int:
        """Peak host bytes: arguments, results that alias none of them, scratch."""
        return (
            self.host_arguments + self.host_outputs - self.host_aliased + self.host_temp
        )

    @classmethod
    def of(cls, stats: object, hlo: str, platform: str) -> "MemoryReport":
        """Reads XLA's `CompiledMemoryStats` and the text of a platform's program."""
        read = lambda name: int(getattr(stats, f"{name}_size_in_bytes"))
        return cls(
            read("argument"),
            read("output"),
            read("alias"),
            read("temp"),
            read("host_argument"),
            read("host_output"),
            read("host_alias"),
            read("host_temp"),
            transfers(hlo),
            platform != "cpu",
            is_partitioned(hlo) and UNSHARDED in hlo,
            hlo,
            platform,
        )

    def __str__(self) -> str:
        names = ("arguments", "outputs", "aliased", "temp", "total")
        spaces = ("device", "host") if self.host_known else ("device",)
        rows = [
            (
                space if self.host_known else "all memory",
                *(readable_bytes(getattr(self, f"{space}_{n}")) for n in names),
            )
            for space in spaces
        ]
        text = table(("memory", *names[:3], "scratch", "peak"), rows)
        notes = [f"transfers in the program: {self.transfers}"]
        if not self.host_known:
            notes = ["This backend does not tell host from device memory."]
        if self.unsharded:
            notes.append(
                "Paging fell back: the shardings of some parameters are not known here,"
                " and XLA gathers\ntheir pages. Compile the step by jit_step, pass"
                " paged(..., shardings=...), make the state\nwith tx.init on the"
                " sharded parameters, or use a mesh of explicit axes."
            )
        return "\n\n".join((text, *notes))


def memory_report(compiled: jax.stages.Compiled) -> MemoryReport:
    """Reports what XLA assigned to a compiled step.

    Args:
      compiled: What `jax.jit(step).lower(...).compile()` gives, or the `compiled` of
        what `jit_step` returns.

    Returns:
      Device and host bytes, aliasing, transfers. It prints as a table.

    Raises:
      TypeError: If it is given something that is not compiled.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(256)).compile()
      >>> po.memory_report(compiled).device_arguments
      1024
    """
    if not hasattr(compiled, "memory_analysis"):
        raise TypeError(
            f"memory_report takes a compiled step, not {type(compiled).__name__}: pass"
            " jax.jit(step).lower(...).compile(), or jit_step(...).compiled."
        )
    stats = _stats(compiled)
    text = compiled.as_text() or ""
    platforms = {
        device.platform
        for sharding in jax.tree.leaves(compiled.output_shardings)
        for device in sharding.device_set
    }
    return MemoryReport.of(stats, text, min(platforms, default=""))


def device_total(compiled: jax.stages.Compiled) -> int:
    """Peak device bytes, as `memory_report` has them; the program's text is not read.

    Of a large program that takes seconds.
    """
    return MemoryReport.of(_stats(compiled), "", "").device_total


def _stats(compiled: jax.stages.Compiled) -> object:
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("this backend gives no memory analysis.")
    return stats


def compile_overlapping(
    jit: Callable[[dict[str, Any]], Wrapped],
    args: tuple[PyTree, ...],
    device: Any,
    kwargs: Mapping[str, PyTree] = MappingProxyType({}),
) -> tuple[Wrapped, Compiled]:
    """Compiles a program with transfers so that they overlap with products.

    It goes without the scheduler where the program would then take more memory than the
    device has, and without all options where this XLA does not know them.

    Args:
      jit: Makes the function that is compiled, of XLA's options.
      args: The arguments that it is compiled for.
      device: The device that runs it; None if nothing is transferred.
      kwargs: Its arguments by name.

    Returns:
      The function, which calls what was compiled, and its program.
    """

    def compiled_with(options: dict[str, Any]) -> tuple[Wrapped, Compiled]:
        jitted = jit(options)
        return jitted, jitted.lower(*args, **kwargs).compile()

    options = overlap_options(device)
    if not options:
        return compiled_with({})
    try:
        jitted, compiled = compiled_with(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warn_user(
            "this XLA takes no compiler options that overlap transfers and products,"
            f" and the step is compiled without: {str(error).splitlines()[0]}"
        )
        return compiled_with({})
    # The scheduler has more buffers alive at once, perhaps more than the device holds.
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
    """The bytes that JAX takes of a device; None if it does not say."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None  # it is another process's, or only compiled for
