"""What XLA made of a program: bytes, transfers, and what its runtime does in a call."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import SCHEDULED, overlap_options
from paged_optax.backend.text import readable_bytes, table
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.hlo import (
    Computations,
    Executor,
    Instruction,
    is_partitioned,
    transfers,
)
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

    @property
    def runtime_counts(self) -> "RuntimeCounts | None":
        """What XLA:GPU's runtime does in one call, or None on another backend."""
        on_gpu = self.platform in ("gpu", "cuda", "rocm")
        return RuntimeCounts.of(self.hlo) if on_gpu and self.hlo else None

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
        if (counts := self.runtime_counts) is not None:
            notes.append(str(counts))
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
) -> tuple[Wrapped, Compiled]:
    """Compiles a program with transfers so that they overlap with products.

    It goes without the scheduler where the program would then take more memory than the
    device has, and without all options where this XLA does not know them.

    Args:
      jit: Makes the function that is compiled, of XLA's options.
      args: What it is compiled for.
      device: What it runs on; None: nothing travels.

    Returns:
      The function, which calls what was compiled, and its program.
    """

    def compiled_with(options: dict[str, Any]) -> tuple[Wrapped, Compiled]:
        jitted = jit(options)
        return jitted, jitted.lower(*args).compile()

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


_Counts = collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class RuntimeCounts:
    """What XLA:GPU's runtime does in one call of a program. Prints as a table.

    Read from the scheduled program, and multiplied by the turns of loops. A loop of
    which the compiler states no count takes one turn here. One that keeps a leaf apart
    does so where something is updated. Which branch a conditional takes is not known:
    each count is the largest of the branches'.

    Attributes:
      kernels: Kernels, calls of libraries, and copies between them, one after the
        other. They include those of the conditions that loops evaluate.
      host_syncs: How often the host waits for the device: to learn whether a loop
        without a stated count takes another turn, and which branch a conditional takes.
      loop_turns: Turns of loops whose count the compiler states.
      transfers_up: Copies from host to device by the copy engine.
      transfers_down: Copies from device to host by the copy engine.
      sync_transfers: Of both, those without a start of their own. What comes after one
        waits until it ends.
      zero_copy_up: Kernels that read pinned memory over the link. XLA makes one where
        the address is not linear in the variable of a counted loop, or where a slice is
        not contiguous.
      zero_copy_down: Kernels that write pinned memory over the link.
      transfer_bytes: Bytes that the copy engine moves, both ways.
      zero_copy_bytes: Bytes that kernels move over the link, both ways.
      device_slices: Asynchronous copies from device to device.
      host_copies: Copies of whole arrays within host memory.
      rematerialized: Instructions that XLA added to compute a value once more, to save
        memory. They are counted in the program's text, not multiplied by turns.
    """

    kernels: int = 0
    host_syncs: int = 0
    loop_turns: int = 0
    transfers_up: int = 0
    transfers_down: int = 0
    sync_transfers: int = 0
    zero_copy_up: int = 0
    zero_copy_down: int = 0
    transfer_bytes: int = 0
    zero_copy_bytes: int = 0
    device_slices: int = 0
    host_copies: int = 0
    rematerialized: int = 0

    @classmethod
    def of(cls, hlo: str, trips: Sequence[int] = ()) -> "RuntimeCounts":
        """Reads a scheduled program of XLA:GPU: others are run in other ways.

        `trips` are the turns of the innermost loops that transfer pages and of which
        the compiler states none, in the order of the program.
        """
        program = Computations(hlo, trips)
        counts = _computation(program, program.entry)
        # XLA says so in such an instruction's name.
        counts["rematerialized"] = sum(
            ".remat" in instruction.name
            and program.executor(instruction) is not Executor.NOTHING
            for instructions in program.instructions.values()
            for instruction in instructions
        )
        return cls(**counts)

    def __str__(self) -> str:
        def transfers(up: int, down: int, size: int) -> str:
            return f"{up:,} up, {down:,} down, {readable_bytes(size)}"

        engine = self.transfers_up, self.transfers_down, self.transfer_bytes
        kernels = self.zero_copy_up, self.zero_copy_down, self.zero_copy_bytes
        rows = [
            ("kernels", f"{self.kernels:,}"),
            ("waits of the host", f"{self.host_syncs:,}"),
            ("turns of counted loops", f"{self.loop_turns:,}"),
            ("transfers by copy engine", transfers(*engine)),
            ("of these, without a start", f"{self.sync_transfers:,}"),
            ("transfers by kernel", transfers(*kernels)),
            ("slices copied on the device", f"{self.device_slices:,}"),
            ("copies within host memory", f"{self.host_copies:,}"),
            ("rematerialized instructions", f"{self.rematerialized:,}"),
        ]
        return table(("in one call", "count"), rows)


def _computation(program: Computations, name: str) -> _Counts:
    total: _Counts = collections.Counter()
    for instruction in program.instructions[name]:
        total.update(_instruction(program, instruction))
    return total


def _instruction(program: Computations, instruction: Instruction) -> _Counts:
    operation = instruction.operation
    if operation == "while":
        return _loop(program, instruction)
    if operation in ("call", "conditional"):
        branches = [_computation(program, x) for x in program.branches(instruction)]
        if operation == "call":
            return functools.reduce(operator.add, branches, collections.Counter())
        # The host waits for the index of the branch, which is not known here.
        largest = functools.reduce(operator.or_, branches, collections.Counter())
        return largest + collections.Counter(host_syncs=1)
    executor = program.executor(instruction)
    if executor in (Executor.ENGINE, Executor.ZERO_COPY):
        return _transfer(program, instruction, executor)
    names = {
        Executor.KERNEL: "kernels",
        Executor.SLICE: "device_slices",
        Executor.HOST: "host_copies",
    }
    return collections.Counter({names[executor]: 1} if executor in names else {})


def _loop(program: Computations, instruction: Instruction) -> _Counts:
    loop = program.loop(instruction)
    total = _times(_computation(program, loop.body), loop.turns)
    if loop.counted:
        total["loop_turns"] += loop.turns
        return total
    # The condition is evaluated, and its answer awaited, before each turn and after.
    total.update(_times(_computation(program, loop.condition), loop.turns + 1))
    total["host_syncs"] += loop.turns + 1
    return total


def _times(counts: _Counts, turns: int) -> _Counts:
    return collections.Counter({name: turns * n for name, n in counts.items()})


def _transfer(
    program: Computations, instruction: Instruction, executor: Executor
) -> _Counts:
    way = "up" if program.goes_up(instruction) else "down"
    size = program.moved_by(instruction)
    if executor is Executor.ENGINE:
        counts = collections.Counter({f"transfers_{way}": 1, "transfer_bytes": size})
        counts["sync_transfers"] = int(not instruction.started)
        return counts
    counts = collections.Counter({f"zero_copy_{way}": 1, "zero_copy_bytes": size})
    if not instruction.started:
        counts["kernels"] = 1  # in its turn among the others
    return counts
