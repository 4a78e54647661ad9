"""Training steps of a whole decoder: seconds and peak, measured and as predicted.

The step model of `tests/helpers` runs through the program that was compiled here, at
rates of the card's data sheet. What it says stands beside what a clock says, so that
its assumptions can be corrected.
"""

import dataclasses
import gzip
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import paged_optax as po

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `helpers`

from helpers import decoder, step_model
from helpers.programs import ordinary_step
from helpers.runtime_counts import RuntimeCounts
from paged_optax.planning.cards import card_name

SECTION = "decoder"
LEARNING_RATE = 1e-5
#: Sizes by name, and the sequences and tokens of each in a batch.
SIZES = {
    "Llama 3 8B": (decoder.LLAMA3_8B, 512),
    "small": (decoder.SMALL, 16),
}


def _ordinary(model: decoder.Decoder, **settings: Any) -> tuple[Any, Any]:
    tx = po.paged_adamw_8bit(LEARNING_RATE, **settings)
    return ordinary_step(model.loss, tx), lambda params: (params, tx.init(params))


def _layerwise(model: decoder.Decoder, make: Any, **settings: Any) -> tuple[Any, Any]:
    tx = make(LEARNING_RATE, **settings)
    parts = po.LayerwiseModel(model.prologue, model.layer, model.epilogue)

    def start(params: Any) -> tuple[Any, ...]:
        workspace = po.GradientWorkspace.allocate(params["layers"])
        return params, tx.init(params), workspace

    return po.layerwise_step(parts, tx), start


#: For each way its step, and what makes of parameters all that the step is given.
WAYS: dict[str, Callable[[decoder.Decoder], tuple[Any, Any]]] = {
    "layerwise, 8 bits": lambda model: _layerwise(model, po.paged_adamw_8bit),
    "jax.grad, 8 bits, resident": lambda model: _ordinary(model, device_budget=None),
    "jax.grad, 8 bits, paged": _ordinary,
    "layerwise, bfloat16 moments": lambda model: _layerwise(model, po.paged_adamw),
}


def measure(
    size: str,
    way: str,
    sequences: int,
    steps: int,
    keep: str = "",
    traced: str = "",
) -> dict[str, Any]:
    """Times steps of one way in this process, which runs nothing else.

    Args:
      size: A key of `SIZES`.
      way: A key of `WAYS`.
      sequences: Of a batch.
      steps: How many are timed, after two that are not.
      keep: Where the compiled program's text goes, compressed; empty: nowhere.
      traced: The folder of a profile of one more step; empty: none.

    Returns:
      Seconds and most bytes in use; XLA's bytes, what its program has, and the seconds
      that the step model gives it.
    """
    model, length = SIZES[size]
    step, start = WAYS[way](model)
    params = jax.jit(lambda: _filled(model.shapes()))()
    carried = list(jax.block_until_ready(start(params)))
    del params
    tokens = jax.random.randint(
        jax.random.key(1), (sequences, length), 0, model.vocabulary
    )
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    began = time.perf_counter()
    compiled = po.jit_step(
        step, *carried, batch, donate_argnums=tuple(range(len(carried)))
    )
    program = compiled.compile(*carried, batch)
    compile_seconds = time.perf_counter() - began
    seconds, losses = [], []
    for _ in range(2 + steps):
        before = time.perf_counter()
        *carried[:], last = jax.block_until_ready(compiled(*carried, batch))
        seconds.append(time.perf_counter() - before)
        losses.append(float(getattr(last, "loss", last)))
    report = po.memory_report(program)
    if keep:
        with gzip.open(keep, "wt") as file:
            file.write(report.hlo)
    if traced:
        with jax.profiler.trace(traced):
            *carried[:], last = jax.block_until_ready(compiled(*carried, batch))
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "section": SECTION,
        "name": f"{size}: {way}",
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes())),
        "tokens": sequences * length,
        "steps": steps,
        "seconds": statistics.median(seconds[2:]),
        "seconds_range": [min(seconds[2:]), max(seconds[2:])],
        "compile_seconds": compile_seconds,
        "losses": losses,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
        "xla_device_bytes": report.device_total,
        "xla_host_bytes": report.host_total,
        **_predicted(report, model.layers),
    }


def _filled(shapes: Any) -> Any:
    """Weights of a decoder that has not learned: norms of one, and small products."""
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def fill(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(x.shape, x.dtype)
        return 0.02 * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def _predicted(report: po.MemoryReport, layers: int) -> dict[str, Any]:
    """What the step model makes of the program, where there are a card's rates."""
    card = card_name(jax.devices()[0].device_kind)
    if card is None:
        return {}
    machine = step_model.machine_of(card)
    cost = step_model.cost(report.hlo, machine, layers)
    return {
        "counts": dataclasses.asdict(RuntimeCounts.of(report.hlo)),
        "predicted_for": card,
        "predicted_seconds": cost.seconds,
        "predicted_range": list(step_model.between(report.hlo, machine, layers)),
        "predicted_up": cost.up,
        "predicted_down": cost.down,
        "predicted_compute_seconds": cost.compute,
    }
