"""The real accelerator compilers, on a machine without accelerators.

`h200(build)` and `v5e(build)` hand a program to XLA:GPU for H200s and to XLA:TPU for
v5e chips, and return its own buffer assignment and scheduled HLO. `build(mesh)`
returns a jitted function and its abstract arguments, placed on that mesh.

The H200 path leans on private JAX entry points (checked with jax 0.10.2 and
0.12.0.1): the program is lowered for CUDA on a CPU mesh, because a device that is
not there has no memories to name, and handed to the compile-only client.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from paged_optax.backend.versions import GPU_NEEDS_RAW_INDEX
from paged_optax.compiling.memory_report import MemoryReport
from paged_optax.engine.pages import Pages

Build = Callable[[Mesh], tuple[Any, tuple[Any, ...]]]


def _target(card: str) -> str:
    """What XLA is told of a card, of which `targets` has a file."""
    return (pathlib.Path(__file__).parent / "targets" / f"{card}.txtpb").read_text()


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered program.

    Attributes:
      lowered: It, in StableHLO.
      compile: Compiles it, and says what the compiler made of it.
    """

    lowered: jax.stages.Lowered
    compile: Callable[[], MemoryReport]


def h200(
    build: Build,
    devices: int = 1,
    card: str = "h200",
    options: Mapping[str, bool | int] | None = None,
) -> MemoryReport:
    """Compiles `build(mesh)` for `devices` H200s of one host, or other cards.

    Args:
      build: Makes the program.
      devices: How many cards there are.
      card: Which, of those in `targets`.
      options: XLA's compiler options.
    """
    return lowered_for_h200(build, devices, card, options).compile()


def v5e(build: Build, devices: int = 1, topology: str = "v5e:2x2") -> MemoryReport:
    """Compiles `build(mesh)` for the first `devices` chips of a TPU topology."""
    return lowered_for_v5e(build, devices, topology).compile()


def lowered_for_h200(
    build: Build,
    devices: int = 1,
    card: str = "h200",
    options: Mapping[str, bool | int] | None = None,
) -> Program:
    """Lowers what `h200` compiles."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target(card), topology=f"1x{devices}x1"
    )
    jitted, args = build(Mesh(np.array(jax.devices()[:devices]), ("x",)))
    lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    how = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=devices,
        device_assignment=np.array([[d.id for d in topology.devices]]),
        env_options_overrides=dict(options or {}),
    )
    how.executable_build_options.use_spmd_partitioning = True
    how.executable_build_options.use_shardy_partitioner = True

    def compile() -> MemoryReport:
        compiled = topology.devices[0].client.compile(
            lowered.compiler_ir(), _jax.DeviceList(tuple(topology.devices)), how
        )
        return MemoryReport.of(
            compiled.get_compiled_memory_stats(), compiled.hlo_modules()[0].to_string()
        )

    return Program(lowered, compile)


def lowered_for_v5e(
    build: Build, devices: int = 1, topology: str = "v5e:2x2"
) -> Program:
    """Lowers `build(mesh)` for the first `devices` chips of a TPU topology."""
    chips = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices[:devices]
    jitted, args = build(Mesh(np.array(chips), ("x",)))
    lowered = jitted.lower(*args)

    def compile() -> MemoryReport:
        with _nothing_kept():
            compiled = lowered.compile()
        return MemoryReport.of(compiled.memory_analysis(), compiled.as_text())

    return Program(lowered, compile)


@contextlib.contextmanager
def _nothing_kept() -> Iterator[None]:
    """A client that only compiles cannot read JAX's compilation cache."""
    folder = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "s16": 2}
_BYTES |= {"u8": 1, "s8": 1, "f8e4m3fn": 1}


class Computations:
    """The computations of a scheduled program.

    Attributes:
      lines: The lines of each, by its name.
      entry: The name of the one that a call runs.
    """

    def __init__(self, hlo: str, trips: Sequence[int] = ()) -> None:
        """Takes a program apart.

        Args:
          hlo: The program.
          trips: Turns of the innermost loops of which the compiler states none, in the
            order of the program: XLA:TPU states none.
        """
        self.lines: dict[str, list[str]] = {}
        self.entry = ""
        self._turns: dict[str, int] = {}
        self._stated = iter(trips)
        for text in hlo.split("\n\n"):
            name = re.match(r"\s*(ENTRY )?%?([\w.\-]+) ", text)
            if name and "{" in text:
                self.lines[name[2]] = text.splitlines()
                self.entry = name[2] if name[1] else self.entry

    def called(self, code: str, last: bool) -> list[str]:
        """The computations that a line calls, or may call.

        Args:
          code: The line.
          last: Whether it is in the last turn of a loop, where nothing is left to do
            under a condition.
        """
        found = re.search(r"\b(call|conditional)\((.*)", code)
        if not found or (last and found[1] == "conditional"):
            return []
        names = re.findall(r"%?([\w.\-]+)", found[2].partition(")")[2])
        return [name for name in names if name in self.lines]

    def loop(self, line: str) -> tuple[str, int]:
        """The body of the loop in a line, and how many turns it takes."""
        found = re.search(r"body=%?([\w.\-]+)", line)
        assert found is not None
        body = found[1]
        if known := re.search(r'known_trip_count[^}]*"n":"?(\d+)', line):
            return body, int(known[1])
        if body not in self._turns:
            inner = any(" while(" in x for x in self.lines[body])
            moves = any("S(5)" in x and "-start(" in x for x in self.lines[body])
            self._turns[body] = next(self._stated, 1) if moves and not inner else 1
        return body, self._turns[body]


def traffic(hlo: str, trips: Sequence[int] = ()) -> int:
    """Bytes that a scheduled program moves between host and device, both ways.

    Args:
      hlo: The program.
      trips: See `Computations`.
    """
    program = Computations(hlo, trips)

    def moved(name: str, last: bool = False) -> int:
        total = 0
        for line in program.lines[name]:
            code = line.split(", metadata=")[0]
            if " while(" in code:
                body, turns = program.loop(line)
                total += (turns - 1) * moved(body) + moved(body, turns > 1)
            elif called := program.called(code, last):
                total += sum(map(moved, called))
            elif re.search(r"-start\(|\bcopy\(", code) and "S(5)" in code:
                total += moved_by(code)
        return total

    return moved(program.entry)


def moved_by(code: str) -> int:
    """Bytes of one transfer: of its part on the device. 0 for host to host."""
    text = code.partition(" = ")[2] if "-start(" in code else code
    operation = re.search(r" [\w\-]+\(", text)
    assert operation is not None
    types = text[: operation.start()] if "-start(" in code else text
    sizes = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", types):
        if dtype in _BYTES and "S(5)" not in layout:
            values = math.prod(int(n) for n in dims.split(",") if n)
            sizes.append(_BYTES[dtype] * values)
    return min((size for size in sizes if size > 64), default=0)


def placements(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Replicated over the mesh: in device memory, and in pinned host memory."""
    device = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    return device, device.with_memory_kind("pinned_host")


def ends(pages: Pages, itemsize: int) -> set[tuple[str, int, int]]:
    """What `descriptors` has of the first page read and the last full one written.

    Each goes in as few pieces as divide its rows.

    Returns:
      (operation, first byte, bytes from piece to piece) of both; nothing where pages go
      in turn.
    """
    if GPU_NEEDS_RAW_INDEX:
        return set()
    rows = pages.size
    pieces = next(n for n in range(2, rows + 1) if rows % n == 0)
    page = itemsize * pages.entries
    last = (pages.extent // rows - 1) * page
    return {("read", 0, page // pieces), ("write", last, page // pieces)}


def descriptors(hlo: str) -> collections.Counter[tuple[str, str, int, int]]:
    """Where the compiled H200 program really reads and writes host memory.

    XLA:GPU attaches to each asynchronous slice of a host buffer inside a loop the
    first byte and the bytes from one trip to the next.

    Returns:
      Counts of (operation, page shape, first byte, bytes from page to page).
    """
    found: collections.Counter[tuple[str, str, int, int]] = collections.Counter()
    for computation in hlo.split("\n\n"):
        if "S(5)" not in computation or "dynamic" not in computation[:80]:
            continue
        for line in computation.splitlines():
            operation = re.search(r" dynamic-(update-)?slice\(", line)
            if operation is None:
                continue
            fields = dict(re.findall(r'"byte_(offset|stride)":"(-?\d+)"', line))
            if fields:
                kind = "write" if operation[1] else "read"
                shape = re.search(r"dynamic_slice_sizes=\{([\d,]*)\}", line)
                found[
                    kind,
                    shape[1] if shape else "",
                    int(fields["offset"]),
                    int(fields["stride"]),
                ] += 1
    return found
