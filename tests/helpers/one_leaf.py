"""What a compiler makes of one leaf's `init` or `update`, and whether it is as planned.

Each case is compiled in a process that asks for it, for a compiler may abort.
"""

import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import paged_optax as po
from helpers import aot, apart, step_model
from helpers.programs import on_device, shardings, state_on, updating
from paged_optax.backend import memory
from paged_optax.compiling.memory_report import MemoryReport
from paged_optax.engine import sharing
from paged_optax.engine.paged_array import PagedArray
from paged_optax.transform import paged_transformation

MIB = 2**20

#: Parameters' dtype, and what else `paged_adamw` is given.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "bfloat16, masters": ("bfloat16", {"master_dtype": "float32"}),
    "int8": ("float32", {"codec": "dynamic_int8"}),
    "int4": ("float32", {"codec": "dynamic_int4"}),
    "fp8": ("float32", {"codec": "float8_e4m3"}),
}
#: What `main` leaves out: moments and masters that are stored in different ways.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8, masters": FORMATS["bfloat16, masters"],
    "int8, remainders": ("bfloat16", {"master_remainders": True}),
    "int8, float32": ("float32", {"codec": {"mu": "dynamic_int8", "nu": "float32"}}),
}
MIXED = {name: (x, {"codec": "dynamic_int8"} | y) for name, (x, y) in MIXED.items()}
PAGE_SIZES = {"default": None, "1 MiB": MIB}
COMPILERS = ("h200", "v5e")
PHASES = ("init", "update")

_PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile."""

    shape: tuple[int, ...]  # the shape of its only parameter
    format: str  # a key of `FORMATS`
    page_size: str  # a key of `PAGE_SIZES`
    compiler: str  # `"h200"` or `"v5e"`
    phase: str  # `"init"` or `"update"`


@dataclasses.dataclass
class Outcome:
    """What a compiler made of a case."""

    error: str = ""  # what it refused, or ""; the rest is 0 then
    pages: int = 0  # pages of the leaf
    page_bytes: int = 0  # bytes of one, as the transformation sees it
    moments: int = 0  # moments that travel
    scratch: int = 0  # device bytes
    bound: int = 0  # most device bytes that the plan allows
    host_scratch: int = 0  # host bytes
    in_place: bool = True  # whether all donated buffers are taken over
    traffic: float = 0.0  # bytes over the link, both ways, over those of the moments
    addresses: str = ""  # transfers at other addresses than the plan's
    #: What is equal for equal programs of one compiler, planned alike.
    fingerprint: str = ""
    #: Whether one of this fingerprint is on record as passed, so that this one was not
    #: compiled.
    recorded: bool = False

    @property
    def failure(self) -> str:
        """What is not as it must be; else empty."""
        if self.error:
            return self.error
        wrong = {
            f"scratch {self.scratch / MIB:.1f} of {self.bound / MIB:.1f} MiB": (
                self.scratch > self.bound
            ),
            f"host scratch {self.host_scratch / MIB:.1f} MiB": self.host_scratch,
            "not in place": not self.in_place,
            f"traffic {self.traffic:.2f}": self.traffic > 1.05,
            f"addresses {self.addresses}": self.addresses,
        }
        return ", ".join(name for name, is_wrong in wrong.items() if is_wrong)


def compiled(case: Case, anew: bool = True) -> Outcome:
    """Compiles a case; called in a process that may end in it.

    What is on record as passed is compiled only if `anew`.
    """
    cuts: list[sharing.Geometry] = []
    alone: list[sharing.Geometry] = []
    kept: list[sharing.MomentFormat] = []

    def cut(shape, moments, page_size, like_leaves=1, spare_bytes=0, isolate=False):
        cuts.append(
            sharing.cut(shape, moments, page_size, like_leaves, spare_bytes, isolate)
        )
        kept[:] = moments
        alone[:] = [sharing.cut(shape, (x,), page_size) for x in moments]
        return cuts[-1]

    paged_transformation.cut = cut
    platform = {"h200": "gpu", "v5e": "tpu"}[case.compiler]
    memory.platform = lambda: platform
    dtype, settings = (FORMATS | MIXED)[case.format]
    if (size := PAGE_SIZES[case.page_size]) is not None:
        settings = settings | {"page_size": size}
    tx = po.paged_adamw(1e-3, **settings)
    params = {"w": jax.ShapeDtypeStruct(case.shape, jnp.dtype(dtype))}
    plan = po.plan(tx, params)
    planned = [x for x in plan.moments if x.bytes > 4]
    page_bytes = max((x.page_bytes for x in planned), default=0)
    found = Outcome(
        pages=max((x.pages for x in planned), default=0),
        page_bytes=page_bytes,
        moments=sum(x.on_host for x in planned),
        bound=plan.scratch_bytes + 8 * MIB,
    )
    figures = (found.pages, found.page_bytes, found.moments, found.bound)

    def planned_as():
        cut_as = [dataclasses.astuple(x.on(platform))[:6] for x in cuts[-1:]]
        return case.phase, figures, cut_as, [tuple(map(str, x)) for x in kept]

    same = (dataclasses.replace(case, page_size=""), repr(planned_as()), tuple(alone))
    if same in _same:
        return _same[same]

    def init(mesh):
        state = state_on(mesh, tx, params)
        return jax.jit(tx.init, out_shardings=shardings(state)), (
            on_device(mesh, params),
        )

    _same.clear()
    _same[same] = found
    build = init if case.phase == "init" else updating(tx, params)
    lower = {"h200": aot.lowered_for_h200, "v5e": aot.lowered_for_v5e}[case.compiler]
    try:
        lowered, compile = lower(build)
        text = lowered.as_text()
        found.fingerprint = _fingerprint(case.compiler, text, planned_as())
        if not anew and found.fingerprint in recorded():
            found.recorded = True
            return found
        if (report := _reports.get((case.compiler, text))) is None:
            report = compile()
            _reports.clear()
            _reports[case.compiler, text] = report
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"[:300]
        return found
    found.scratch, found.host_scratch = report.device_temp, report.host_temp
    if case.phase == "update":
        found.in_place = (
            report.host_aliased == report.host_outputs == report.host_arguments
            and report.device_outputs - report.device_aliased < 2**16
        )
    moved = sum(x.bytes for x in planned if x.on_host)
    ways = 2 if case.phase == "update" else 1
    if not cuts:
        return found  # nothing is paged, nor coded
    pages = cuts[-1].on(platform)
    if moved:
        trips = [x.stop // x.step for x in pages.ranges if not x.single]
        trips *= found.moments if case.phase == "init" else 1
        total = step_model.traffic(report.hlo, trips)
        found.traffic = round(total / (ways * moved), 3)
    if platform == "gpu" and case.phase == "update":
        found.addresses = _misplaced(aot.descriptors(report.hlo), pages, kept)
    return found


#: The last report. Other settings of a page's size are often the same program.
_reports: dict[tuple[str, str], MemoryReport] = {}


#: What became of the last case, by all that decides it. A page of another size may be
#: cut alike, where a codec or a layout bounds it.
_same: dict[tuple[Any, ...], Outcome] = {}


def _fingerprint(compiler: str, text: str, planned: Any) -> str:
    """What changes with a program, the versions that compile it, and its plan."""
    names: dict[str, str] = {}
    number = lambda name: names.setdefault(name[0], f"@{len(names)}")
    plain = re.sub(r"@[\w.]+", number, text)
    whole = repr((compiler, versions(), plain, planned))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@functools.cache
def versions() -> str:
    """The versions of JAX and of what compiles."""
    names = ("jax", "jaxlib", "libtpu", *_PLUGINS)
    found = {x.name.lower(): x.version for x in importlib.metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def record() -> Path:
    """The file of fingerprints that passed, of this version of JAX."""
    version = importlib.metadata.version("jax")
    return Path(__file__).parents[1] / "data" / "passed" / f"jax-{version}.txt"


@functools.cache
def recorded() -> frozenset[str]:
    """The fingerprints that passed."""
    return frozenset(record().read_text().split() if record().exists() else ())


def _misplaced(found: Any, pages: Any, kept: Sequence[Any]) -> str:
    """What differs between a program's transfers in loops, and the plan's pages."""
    ahead = pages.bidirectional(sum(x.on_host for x in kept))
    wanted: collections.Counter[tuple[str, int, int]] = collections.Counter()
    loops = [x for x in pages.ranges if not x.single]
    arrays = []
    for each in kept if loops and not pages.axis else ():
        stored = jax.ShapeDtypeStruct(pages.leaf, f"float{8 * each.itemsize}")
        if each.codec is not None:
            stored = each.codec.stored(pages.leaf)
        arrays += PagedArray.create(stored, pages, each.codec, each.on_host).parts
    block = math.lcm(*[part.block for part in arrays])
    for part in arrays:
        if not part.streamed:
            continue
        _, sizes = part.slice_of(loops[0])
        step = math.prod(sizes) * part.dtype.itemsize
        first = step if ahead else 0
        wanted.update({("read", first, step): 1, ("write", 0, step): 1})
        wanted.update(aot.ends(pages, step, block) if ahead else ())
    placed: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for (kind, _, first, step), count in found.items():
        placed[kind, first, step] += count
    return "" if placed == wanted else f"{dict(placed)}, not {dict(wanted)}"


def answer(line: str) -> dict[str, Any]:
    """One case, in JSON."""
    case = json.loads(line)
    anew, shape = case.pop("anew"), tuple(case.pop("shape"))
    return dataclasses.asdict(compiled(Case(shape, **case), anew))


if __name__ == "__main__":
    apart.answer(answer, caught=())  # as a compiler would end the process
