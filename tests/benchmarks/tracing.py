"""How long tracing takes at Llama 3 8B's shapes. Nothing is compiled or run."""

import statistics
import time
from typing import Any

import jax
import optax
import updates
from shapes import llama_3_8b

import paged_optax as po

SECTION = "tracing"
TARGET = 3.0


def trace(quick: bool) -> list[dict[str, Any]]:
    """Seconds to trace each update, taken in turns, JAX's caches cleared before."""
    shapes = llama_3_8b()
    optimizers = {
        "optax.adamw": optax.adamw(1e-3),
        "paged_adamw": po.paged_adamw(1e-3),
    }
    jobs = {
        name: (tx, updates.abstract_arguments(tx, shapes))
        for name, tx in optimizers.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(2 if quick else 7):
        for name, (tx, arguments) in jobs.items():
            jax.clear_caches()
            started = time.perf_counter()
            jax.jit(tx.update).trace(*arguments)
            seconds[name].append(time.perf_counter() - started)
    base = seconds["optax.adamw"]
    rows = []
    for name, times in seconds.items():
        ratios = [x / y for x, y in zip(times, base, strict=True)]
        ratio = statistics.median(ratios)
        target = TARGET if name != "optax.adamw" else None
        rows.append(
            {
                "section": SECTION,
                "name": f"{name}, {len(shapes)} leaves",
                "seconds": statistics.median(times),
                "ratio": ratio,
                "ratio_range": [min(ratios), max(ratios)],
                "repeats": len(times),
                "target": target,
                "within_target": None if target is None else ratio <= target,
            }
        )
    return rows
