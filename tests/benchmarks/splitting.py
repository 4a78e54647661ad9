"""How long it takes to take a loss apart, and to compile what comes of it.

A list of layers of Qwen3's structure, and a scan over them, beside three functions by
hand: on the CPU, in seconds of its processors, since nothing else of a machine matters.
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import paged_optax as po

SECTION = "splitting"
APART, COMPILED = 10.0, 1.1  # seconds, and a ratio to the form by hand


def measure(quick: bool) -> list[dict[str, Any]]:
    """A row for 80 layers taken apart, and one for each form that is compiled."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    from helpers import decoder, real_decoder

    large = real_decoder.Config.of(decoder.LLAMA3_70B, normed=False)
    started = time.process_time()
    real_decoder.split(large, (1, 512))
    seconds = time.process_time() - started
    rows = [_row(f"taken apart: {large.layers} layers", [seconds], APART)]
    config = dataclasses.replace(
        real_decoder.Config.of(decoder.QWEN3_4B),
        **{"layers": 4 if quick else 12, "width": 256, "inner": 688},
        **{"heads": 4, "grouped": 2, "vocabulary": 1024},
    )
    forms = ("by hand", "a list", "a scan")
    seconds_of: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(1 if quick else 5):
        for form in forms:
            jax.clear_caches()
            seconds_of[form].append(_compiled(real_decoder, config, form))
    base = seconds_of["by hand"]
    for form, times in seconds_of.items():
        ratios = [x / y for x, y in zip(times, base, strict=True)]
        target = None if form == "by hand" else COMPILED
        row = _row(f"{config.layers} layers compiled: {form}", times, target, ratios)
        rows.append(row)
    return rows


def _compiled(real_decoder: Any, config: Any, form: str) -> float:
    """Seconds from the first trace of a step to XLA:CPU's program."""
    size, tx = (1, 64), po.paged_adamw(1e-4)
    if form == "by hand":
        model = real_decoder.by_hand(config)
    else:
        model = real_decoder.split(config, size, scan=form == "a scan")
    shapes = real_decoder.stacked_shapes(config)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    batch = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), real_decoder.batch_of(size)
    )
    given = params, model.init(tx, params), workspace, batch
    step = jax.jit(po.layerwise_step(model, tx, max_norm=1.0))
    started = time.process_time()
    step.lower(*given).compile()
    return time.process_time() - started


def _row(
    name: str,
    times: list[float],
    target: float | None,
    ratios: list[float] | None = None,
) -> dict[str, Any]:
    found = statistics.median(ratios or times)
    return {
        "section": SECTION,
        "name": name,
        "cpu_seconds": statistics.median(times),
        "ratio": None if ratios is None else found,
        "ratio_range": None if ratios is None else [min(ratios), max(ratios)],
        "repeats": len(times),
        "target": target,
        "within_target": None if target is None else found <= target,
    }
