"""What both accelerator compilers make of real models' shapes, leaf by leaf.

`python tests/sweep.py` compiles `init` and `update` of every distinct shape of ten
models, in five formats and with two page sizes, prints a table, and writes JSON. It
runs in processes of its own: a compiler that aborts ends one of them, and is reported.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import queue
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import models

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
    "int8, masters": (
        "bfloat16",
        {"codec": "dynamic_int8", "master_dtype": "float32"},
    ),
    "int8, float32": ("float32", {"codec": {"mu": "dynamic_int8", "nu": "float32"}}),
}
PAGE_SIZES = {"default": None, "1 MiB": MIB}
COMPILERS = ("h200", "v5e")
PHASES = ("init", "update")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile.

    Attributes:
      shape: The shape of its only parameter.
      format: A key of `FORMATS`.
      page_size: A key of `PAGE_SIZES`.
      compiler: `"h200"` or `"v5e"`.
      phase: `"init"` or `"update"`.
    """

    shape: tuple[int, ...]
    format: str
    page_size: str
    compiler: str
    phase: str


@dataclasses.dataclass
class Outcome:
    """What a compiler made of a case.

    Attributes:
      error: What it refused, or ""; the rest is 0 then.
      pages: Pages of the leaf.
      page_bytes: Bytes of one, as the transformation sees it.
      moments: Moments that travel.
      refused: Why the plan keeps the leaf on the device or whole, or "".
      scratch: Device bytes.
      bound: Most device bytes that the plan allows.
      host_scratch: Host bytes.
      in_place: Whether all donated buffers are taken over.
      traffic: Bytes over the link, both ways, over those of the moments.
      addresses: Transfers at other addresses than the plan's.
      seconds: CPU-seconds to trace and compile.
    """

    error: str = ""
    pages: int = 0
    page_bytes: int = 0
    moments: int = 0
    refused: str = ""
    scratch: int = 0
    bound: int = 0
    host_scratch: int = 0
    in_place: bool = True
    traffic: float = 0.0
    addresses: str = ""
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        """What is not as it must be; else empty. Seconds are measured, not judged."""
        if self.error:
            return self.error
        wrong = [
            f"scratch {self.scratch / MIB:.1f} of {self.bound / MIB:.1f} MiB"
            if self.scratch > self.bound
            else "",
            f"host scratch {self.host_scratch / MIB:.1f} MiB"
            if self.host_scratch
            else "",
            "" if self.in_place else "not in place",
            f"traffic {self.traffic:.2f}" if self.traffic > 1.05 else "",
            f"addresses {self.addresses}" if self.addresses else "",
        ]
        return ", ".join(filter(None, wrong))


def cases(
    shapes: Sequence[tuple[int, ...]], formats: Sequence[str] = tuple(FORMATS)
) -> Iterator[Case]:
    """All cases of some shapes; those whose programs are equal, once."""
    for shape in shapes:
        for name in formats:
            one_page = 4 * math.prod(shape) <= MIB
            for size in ["default"] if one_page else PAGE_SIZES:
                for compiler in COMPILERS:
                    for phase in PHASES:
                        yield Case(shape, name, size, compiler, phase)


def compiled(case: Case) -> Outcome:
    """Compiles a case; called in a process that may end in it."""
    import aot
    import jax
    import jax.numpy as jnp
    from test_bytes import on_device, shardings, state_on, updating

    import paged_optax as po
    from paged_optax import geometry, memory, transform
    from paged_optax.stream import _sweeps

    cuts: list[geometry.Geometry] = []

    def cut(*arguments):
        cuts.append(geometry.cut(*arguments))
        kept[:] = arguments[1]
        return cuts[-1]

    kept: list[geometry.Kept] = []
    transform.cut = cut
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
        refused=next((x.refused for x in planned if x.refused), ""),
        bound=plan.scratch_bytes + 8 * MIB,
    )

    def init(mesh):
        state = state_on(mesh, tx, params)
        return jax.jit(tx.init, out_shardings=shardings(state)), (
            on_device(mesh, params),
        )

    build = init if case.phase == "init" else updating(tx, params)
    start = time.process_time()
    try:
        report = getattr(aot, case.compiler)(build)
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"[:300]
        return found
    found.seconds = round(time.process_time() - start, 2)
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
        trips = [x.stop // x.step for x in _sweeps(pages) if x.stop > x.step]
        trips *= found.moments if case.phase == "init" else 1
        total = aot.traffic(report.hlo, trips)
        found.traffic = round(total / (ways * moved), 3)
    if platform == "gpu" and case.phase == "update":
        found.addresses = _misplaced(aot.descriptors(report.hlo), pages, kept)
    return found


def _misplaced(found: Any, pages: Any, kept: Sequence[Any]) -> str:
    """What differs between a program's transfers in loops, and the plan's pages."""
    import jax

    from paged_optax.slices import Streamed
    from paged_optax.stream import _sweeps

    wanted: collections.Counter[tuple[str, int, int]] = collections.Counter()
    loops = [x for x in _sweeps(pages) if x.stop > x.step]
    for each in kept if loops and not pages.axis else ():
        stored = jax.ShapeDtypeStruct(pages.leaf, f"float{8 * each.itemsize}")
        if each.codec is not None:
            stored = each.codec.stored(pages.leaf)
        streamed = Streamed.of(stored, pages, each.codec, each.on_host)
        for part in (streamed.codes, streamed.scales):
            if part is None or not part.travels:
                continue
            _, sizes = part._of(loops[0].at(0))
            step = math.prod(sizes) * part.dtype.itemsize
            wanted.update({("read", 0, step): 1, ("write", 0, step): 1})
    placed: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for (kind, _, first, step), count in found.items():
        placed[kind, first, step] += count
    return "" if placed == wanted else f"{dict(placed)}, not {dict(wanted)}"


def answer(line: str) -> dict[str, Any]:
    """One case, in JSON."""
    case = json.loads(line)
    return dataclasses.asdict(compiled(Case(tuple(case.pop("shape")), **case)))


def outcomes(
    chosen: Sequence[Case], workers: int = 2, minutes: float = math.inf
) -> Iterator[tuple[Case, Outcome]]:
    """Compiles cases in processes of their own, as many as the minutes allow."""
    import apart

    waiting = collections.deque(chosen)
    end = time.monotonic() + 60 * minutes
    done: queue.SimpleQueue[tuple[Case, Outcome] | None] = queue.SimpleQueue()

    def work() -> None:
        os.environ |= {"SWEEP_WORKER": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            while waiting and time.monotonic() < end:
                ask_for_each()
        except IndexError:
            pass  # another worker took the last case
        finally:
            done.put(None)

    def ask_for_each() -> None:
        case = None
        try:
            with apart.process(__file__, "--xla_gpu_autotune_level=0") as ask:
                while waiting and time.monotonic() < end:
                    case = waiting.popleft()
                    reply = ask(json.dumps(dataclasses.asdict(case)))
                    done.put((case, Outcome(**reply)))
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1][:200]
            assert case is not None
            done.put((case, Outcome(error=f"the process ended: {last}")))

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work) for _ in range(workers)]
        left = workers
        while left:
            if (one := done.get()) is None:
                left -= 1
                continue
            case, outcome = one
            if outcome.failure:
                print(*dataclasses.astuple(case), "->", outcome.failure, flush=True)
            yield one
        for each in running:
            each.result()


def table(results: Sequence[tuple[Case, Outcome]]) -> str:
    """A row for each format, compiler and page size: the worst of its cases."""
    titles = (
        "format", "compiler", "pages", "compile", "host scratch", "scratch",
        "of bound", "traffic", "addresses", "seconds", "kept whole",
    )  # fmt: skip
    groups: dict[Any, list[tuple[Case, Outcome]]] = {}
    for case, found in results:
        key = (case.format, case.compiler, case.page_size)
        groups.setdefault(key, []).append((case, found))
    rows = []
    for key, group in sorted(groups.items()):
        good = [found for _, found in group if not found.error]
        worst = lambda value, good=good: max(map(value, good), default=0)
        shapes = {case.shape for case, found in group if found.refused}
        rows.append(
            (
                *key,
                f"{len(good)} of {len(group)}",
                f"{worst(lambda x: x.host_scratch) / MIB:.0f} MiB",
                f"{worst(lambda x: x.scratch) / MIB:.1f} MiB",
                f"{worst(lambda x: x.scratch / x.bound):.2f}",
                f"{worst(lambda x: x.traffic):.3f}",
                "wrong" if any(x.addresses for x in good) else "exact",
                f"{worst(lambda x: x.seconds):.1f}",
                f"{len(shapes)} shapes" if shapes else "-",
            )
        )
    from paged_optax.table import table

    return table(titles, rows)


def main() -> None:
    """Compiles all cases, or those of one compiler; prints and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--odd", action="store_true", help="also shapes once refused")
    parser.add_argument("--compiler", choices=COMPILERS, help="one compiler alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop then; cases are taken in an order that --seed shuffles",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write cases as they come")
    options = parser.parse_args()
    shapes = [*models.distinct(4096), *(models.ODD if options.odd else ())]
    chosen = [
        case
        for case in cases(list(dict.fromkeys(shapes)))
        if options.compiler in (None, case.compiler)
    ]
    if options.minutes < math.inf:
        random.Random(options.seed).shuffle(chosen)
    results: list[tuple[Case, Outcome]] = []

    def write() -> None:
        if options.json:
            rows = [dataclasses.asdict(c) | dataclasses.asdict(x) for c, x in results]
            options.json.write_text(json.dumps(rows, indent=1) + "\n")

    for each in outcomes(chosen, options.workers, options.minutes):
        results.append(each)
        if len(results) % 100 == 0:
            write()
    write()
    print(table(results))
    bad = [(case, found) for case, found in results if found.failure]
    left = len(chosen) - len(results)
    print(f"{left} of {len(chosen)} cases were not reached" if left else "all cases")
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    if len(sys.argv) == 1 and os.environ.get("SWEEP_WORKER"):
        import apart

        apart.answer(answer)
    else:
        main()
