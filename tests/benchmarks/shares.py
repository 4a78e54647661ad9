"""Where a step's time goes, as shares: by the step model, or by XLA's own trace."""

import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from helpers import step_model
from helpers.hlo import Computations, Executor, Instruction

#: The parts of a step, in the picture's order.
PARTS = (
    "products",
    "head and loss",
    "attention",
    "normalization",
    "other kernels",
    "optimizer",
    "launches",
    "exposed transfers",
)
# By the scopes of `helpers.real_decoder` and the names of this package's functions. The
# first that an instruction's name has is its part.
_SCOPES = {
    "head": "head and loss",
    "optimizer|_stream|_encode|_decode": "optimizer",
    "attention": "attention",
    "norm": "normalization",
}


def part_of(program: Computations, instruction: Instruction) -> str:
    """The part of a step that a kernel belongs to."""
    inside = program.instructions.get(instruction.calls, [])
    text = "".join(x.line for x in (instruction, *inside))
    names = " ".join(re.findall(r'op_name="([^"]*)"', instruction.line))
    found = next((x for scope, x in _SCOPES.items() if re.search(scope, names)), "")
    if found not in ("head and loss", "optimizer"):
        if "__cudnn$fmha" in text:
            return "attention"
        if re.search(r" (dot|convolution)\(|__cublas", text):
            return "products"
    return found or "other kernels"


def by_model(hlo: str, machine: step_model.Machine, layers: int) -> dict[str, float]:
    """Seconds of each part, with the low overheads.

    Launches are what kernels take beyond their operations and bytes. Exposed transfers
    are all that is no kernel: waits for the link and of the host.
    """
    program = Computations(hlo)
    seconds = dict.fromkeys(PARTS, 0.0)
    for instruction, least, times in step_model.kernels(hlo, machine):
        seconds[part_of(program, instruction)] += times * least
    cost = step_model.cost(
        hlo, machine, layers, overheads=step_model.LOW, in_turn=step_model.IN_TURN
    )
    seconds["launches"] = max(cost.compute - sum(seconds.values()), 0.0)
    seconds["exposed transfers"] = cost.exposed
    return seconds


Span = tuple[float, float]
# They last as long as what they call.
_CALLS = ("while", "call", "conditional")


def by_trace(folder: str | pathlib.Path, hlo: str) -> dict[str, float]:
    """Seconds of each part, from a profile that `jax.profiler` has written.

    Exposed transfers are the times in which none but transfers run, launches those in
    which nothing does.

    Args:
      folder: Of the profile of one step.
      hlo: The program of the step.
    """
    program = Computations(hlo)
    named = {x.name: x for each in program.instructions.values() for x in each}
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    seconds = dict.fromkeys(PARTS, 0.0)
    kernels, transfers = list[Span](), list[Span]()
    for plane in data.planes:
        on_gpu = plane.name.startswith("/device:GPU:")
        if not on_gpu and plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # what is derived from the streams
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                instruction = named.get(str(name))
                if instruction is None or instruction.operation in _CALLS:
                    continue
                span = event.start_ns, event.start_ns + event.duration_ns
                executor = program.executor(instruction)
                if executor is Executor.KERNEL:
                    kernels.append(span)
                    part = part_of(program, instruction)
                    seconds[part] += event.duration_ns / 1e9
                elif executor is not Executor.NOTHING:
                    transfers.append(span)
    busy = covered(kernels)
    beside = covered([*kernels, *transfers])
    ends = [x for span in (*kernels, *transfers) for x in span]
    seconds["exposed transfers"] = (beside - busy) / 1e9
    seconds["launches"] = (max(ends, default=0) - min(ends, default=0) - beside) / 1e9
    return seconds


def covered(spans: Iterable[Span]) -> float:
    """The length of what spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """A bar for each row, of its parts in seconds, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(rows)
    for number, part in enumerate(PARTS):
        widths = [row["shares"][part] / row["micro_batches"] for row in rows]
        axes.barh(
            range(len(rows)),
            widths,
            left=lefts,
            color=f"C{number}",
            hatch="//" if number % 2 else "",
            edgecolor="white",
            label=part,
        )
        lefts = [x + y for x, y in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of a micro-batch ({rows[0]['source']})")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})
