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
import csv
import math
import pathlib
import re
import string
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import compiler
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from paged_optax.backend.compiler_options import addressing_options, overlap_options
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.compiling.memory_report import MemoryReport
from paged_optax.engine.pages import Pages

Build = Callable[[Mesh], tuple[Any, tuple[Any, ...]]]

_FOLDER = pathlib.Path(__file__).parent / "targets"
_ROWS = (_FOLDER / "cards.csv").read_text().splitlines()
#: What differs from card to card, by their names.
TARGETS = {x["card"]: x for x in csv.DictReader(_ROWS)}


def target(card: str) -> str:
    """What XLA is told of a card, of which `targets` has a line."""
    text = (_FOLDER / "card.txtpb").read_text()
    return string.Template(text).substitute(TARGETS[card])


def options_on(card: str) -> Mapping[str, Any]:
    """The compiler options that `jit_step` has on a card."""
    block = re.search(r"cuda_compute_capability \{(.*?)\}", target(card), re.S)
    assert block is not None
    parts = dict(re.findall(r"(\w+): (\d+)", block[1]))
    capability = f"{parts['major']}.{parts.get('minor', 0)}"
    device = types.SimpleNamespace(compute_capability=capability)
    return {**overlap_options(device), **addressing_options(device)}


#: A lowered program, and what compiles it and gives what the compiler made of it.
Program = tuple[jax.stages.Lowered, Callable[[], MemoryReport]]


def h200(
    build: Build,
    devices: int = 1,
    card: str = "h200",
    options: Mapping[str, Any] | None = None,
) -> MemoryReport:
    """Compiles `build(mesh)` for H200s of one host, or other cards of `targets`."""
    return lowered_for_h200(build, devices, card, options)[1]()


def v5e(build: Build, devices: int = 1, topology: str = "v5e:2x2") -> MemoryReport:
    """Compiles `build(mesh)` for the first `devices` chips of a TPU topology."""
    return lowered_for_v5e(build, devices, topology)[1]()


def lowered_for_h200(
    build: Build,
    devices: int = 1,
    card: str = "h200",
    options: Mapping[str, Any] | None = None,
) -> Program:
    """Lowers what `h200` compiles."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target(card), topology=f"1x{devices}x1"
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
        hlo = compiled.hlo_modules()[0].to_string()
        return MemoryReport.create(compiled.get_compiled_memory_stats(), hlo, "gpu")

    return lowered, compile


def lowered_for_v5e(
    build: Build, devices: int = 1, topology: str = "v5e:2x2"
) -> Program:
    """Lowers what `v5e` compiles."""
    every = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    chips = every.devices[:devices]
    jitted, args = build(Mesh(np.array(chips), ("x",)))
    lowered = jitted.lower(*args)

    def compile() -> MemoryReport:
        with _nothing_kept():
            compiled = lowered.compile()
        return MemoryReport.create(
            compiled.memory_analysis(), compiled.as_text(), "tpu"
        )

    return lowered, compile


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


@contextlib.contextmanager
def with_cudnn() -> Iterator[None]:
    """The examples' attention is cuDNN's, which is not here, as on an H200."""
    found = map(sys.modules.get, ("attention", "examples.attention"))
    chosen = {"has_cudnn": lambda *_: True}
    with contextlib.ExitStack() as stack:
        for module in filter(None, found):
            stack.enter_context(mock.patch.multiple(module, **chosen))
        version = {"check_cudnn_version": lambda: 91_400}
        stack.enter_context(mock.patch.multiple(fused_attention_stablehlo, **version))
        yield


def placements(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Replicated over the mesh: in device memory, and in pinned host memory."""
    device = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    return device, device.with_memory_kind("pinned_host")


def ends(pages: Pages, page_bytes: int, block: int = 1) -> set[tuple[str, int, int]]:
    """What `descriptors` has of the first page read and the last full one written.

    Each goes in as few pieces as divide its units, 2, 3, 5 or 7. What no such number
    divides, as 251 units, is moved whole and outside of loops: 251 small transfers
    would take longer.

    Args:
      pages: How a leaf is cut.
      page_bytes: Bytes of a page of what is transferred.
      block: Entries along the axis that is cut that share codes or scales: no piece
        parts them.

    Returns:
      (operation, first byte, bytes from piece to piece) of both; nothing where pages go
      in turn, or whole.
    """
    if GPU_NEEDS_RAW_INDEX:
        return set()
    units = pages.size // pages.unit
    block //= math.gcd(block, pages.unit)
    pieces = next((n for n in (2, 3, 5, 7) if units % (n * block) == 0), None)
    if pieces is None:
        return set()
    last = (pages.axis_size // pages.size - 1) * page_bytes
    size = page_bytes // pieces
    return {("read", 0, size), ("write", last, size)}


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
            fields = dict(re.findall(r'"byte_(offset|stride)":"(-?\d+)"', line))
            if operation and fields:
                kind = "write" if operation[1] else "read"
                shape = re.search(r"dynamic_slice_sizes=\{([\d,]*)\}", line)
                where = (int(fields[name]) for name in ("offset", "stride"))
                found[kind, shape[1] if shape else "", *where] += 1
    return found
