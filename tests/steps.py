"""What a layerwise step of Llama 3 8B costs, by the step model. Nothing is run.

    python tests/steps.py                               # ten to fifteen minutes
    python tests/steps.py 16384                         # tokens a step; only these
    python tests/steps.py 4096 --ways layerwise         # writes no results

Compiles each way to train for an H200 and runs through its schedule, see
`tests/helpers/step_model.py`: at 55 GB/s each way, 600 TFLOP/s and 3.5 TB/s, and, in
brackets, with overheads that are assumed, low and high. Parameters are bfloat16, with
float32 master weights and moments in eight bits on the host; where a way says so, of
the masters the remainders alone. A sequence has 512 tokens. Ratios are to the resident
step of the same batch, with the same rematerialisation and without clipping. Counts are
those of `RuntimeCounts`. Writes
`tests/benchmarks/results/steps-h200-jax<version>.json`.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import paged_optax as po
from helpers import aot, decoder, step_model
from helpers.decoder import LLAMA3_8B
from helpers.machine import describe
from helpers.runtime_counts import RuntimeCounts

RESULTS = pathlib.Path(__file__).resolve().parent / "benchmarks" / "results"
TOKENS = (16384, 65536)
_CLIPPED = {"max_norm": 1.0, "host_dtype": "bfloat16"}
_DEFERRED = _CLIPPED | {"deferred": True}

_WEIGHTS = {"weights_on_host": True}
_LEAST = {"device_budget": "24GB"}
_COPIES = {"master_dtype": "float32"}
_REMAINDERS = {"master_remainders": True}

#: How the masters are kept and what stays on the device, and how the step is made.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resident": (_COPIES | {"device_budget": None}, {}),
    "layerwise": (_COPIES, {}),
    "weights on the host": (_COPIES, _WEIGHTS),
    "clipped, gradients on the host": (_COPIES, _CLIPPED),
    "the same, deferred": (_COPIES, _DEFERRED),
    "the same, 24 GB of moments on the device": (_COPIES | _LEAST, _DEFERRED),
    "remainders: layerwise": (_REMAINDERS, {}),
    "remainders: weights on the host": (_REMAINDERS, _WEIGHTS),
    "remainders: clipped, deferred": (_REMAINDERS, _DEFERRED),
}


def measure(tokens: int, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each way, at `tokens` tokens a step."""
    resident = None
    for name in ways:
        settings, how = WAYS[name]
        tx = po.paged_adamw_8bit(1e-4, **settings)
        began = time.perf_counter()
        build = decoder.layerwise(LLAMA3_8B, tx, size=(tokens // 512, 512), **how)
        report = aot.h200(build)
        compiled = time.perf_counter() - began
        machine, layers = step_model.H200, LLAMA3_8B.layers
        cost = step_model.cost(report.hlo, machine, layers)
        low, high = step_model.between(report.hlo, machine, layers)
        if name == "resident":
            resident = cost.seconds
        yield {
            "way": name,
            "tokens": tokens,
            "over_resident": resident and cost.seconds / resident,
            "device_gib": report.device_total / 2**30,
            "host_gib": report.host_total / 2**30,
            "host_scratch": report.host_temp,
            "compile_seconds": compiled,
            **dataclasses.asdict(cost),
            "low_seconds": low,
            "high_seconds": high,
            "counts": dataclasses.asdict(RuntimeCounts.of(report.hlo)),
        }


def line(row: dict[str, Any]) -> str:
    """A row, to be read."""
    counts = {x: row["counts"][x] for x in ("kernels", "host_syncs", "loop_turns")}
    ratio = f" {row['over_resident']:.3f} of resident;" if row["over_resident"] else ""
    return (
        f"{row['tokens']:6} tokens, {row['way']}: {row['seconds']:.3f} s"
        f" ({row['low_seconds']:.3f} to {row['high_seconds']:.3f}),{ratio} device"
        f" {row['device_gib']:.1f} GiB, host {row['host_gib']:.1f} GiB; {counts};"
        f" compiled in {row['compile_seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY")
    given = parser.parse_args()
    rows = []
    for tokens in given.tokens:
        for row in measure(tokens, given.ways or list(WAYS)):
            rows.append(row)
            print(line(row), flush=True)
    if given.ways is None:
        where = RESULTS / f"steps-h200-jax{jax.__version__}.json"
        made = {"machine": describe(), "rows": rows}
        where.write_text(json.dumps(made, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
