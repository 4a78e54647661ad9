"""What a layerwise step of Llama 3 8B costs, by the step model. Nothing is run.

    python tests/steps.py            # ten to fifteen minutes
    python tests/steps.py 16384      # tokens a step; only these

Compiles each way to train for an H200 and runs through its schedule, see
`tests/helpers/step_model.py`: at 55 GB/s each way, 600 TFLOP/s and 3.5 TB/s. Parameters
are bfloat16, with float32 master weights and moments in eight bits on the host; where a
way says so, of the masters the remainders alone. A sequence has 512 tokens. Ratios are
to the resident step of the same batch, with the same rematerialisation and without
clipping. Writes `tests/benchmarks/results/steps-h200-jax<version>.json`.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import paged_optax as po
from helpers import aot, decoder, step_model
from paged_optax.cli.machine import describe

RESULTS = pathlib.Path(__file__).resolve().parent / "benchmarks" / "results"
TOKENS = (16384, 65536)
LLAMA_3_8B = decoder.Decoder(
    hidden=4096,
    query=4096,
    key=1024,
    inner=14336,
    layers=32,
    vocabulary=128256,
    tied=False,
    dtype=jnp.bfloat16,
)
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


def measure(tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each way, at `tokens` tokens a step."""
    resident = 0.0
    for name, (settings, how) in WAYS.items():
        tx = po.paged_adamw_8bit(1e-4, **settings)
        began = time.perf_counter()
        build = decoder.layerwise(LLAMA_3_8B, tx, size=(tokens // 512, 512), **how)
        report = aot.h200(build)
        compiled = time.perf_counter() - began
        cost = step_model.cost(report.hlo, step_model.H200, LLAMA_3_8B.layers)
        resident = resident or cost.seconds
        yield {
            "way": name,
            "tokens": tokens,
            "over_resident": cost.seconds / resident,
            "device_gib": report.device_total / 2**30,
            "host_gib": report.host_total / 2**30,
            "host_scratch": report.host_temp,
            "compile_seconds": compiled,
            **dataclasses.asdict(cost),
        }


def main() -> None:
    rows = []
    for tokens in map(int, sys.argv[1:] or TOKENS):
        for row in measure(tokens):
            rows.append(row)
            print(
                f"{row['tokens']:6} tokens, {row['way']}: {row['seconds']:.3f} s,"
                f" {row['over_resident']:.3f} of resident; device"
                f" {row['device_gib']:.1f} GiB, host {row['host_gib']:.1f} GiB;"
                f" compiled in {row['compile_seconds']:.0f} s",
                flush=True,
            )
    where = RESULTS / f"steps-h200-jax{jax.__version__}.json"
    made = {"machine": describe(), "rows": rows}
    where.write_text(json.dumps(made, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
