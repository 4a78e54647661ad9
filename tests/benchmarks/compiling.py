"""How long tracing and compiling for an H200 takes, as leaves grow. Nothing is run."""

import pathlib
import sys
import time
from typing import Any

import jax
import optax
import updates
from shapes import llama_3_8b

import paged_optax as po

SECTION = "compiling"
TARGET_SECONDS = 30.0
LEAVES = (75, 147, 291)  # 8, 16 and 32 layers


def measure(quick: bool) -> list[dict[str, Any]]:
    """Seconds from the first trace to XLA's finished H200 program, a row a size."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    from helpers import aot

    shapes = list(llama_3_8b().items())
    rows = []
    for leaves in LEAVES[:1] if quick else LEAVES:
        for name, tx in (
            ("optax.adamw, resident", optax.adamw(1e-3)),
            ("paged_adamw", po.paged_adamw(1e-3)),
        ):
            arguments = updates.abstract_arguments(tx, dict(shapes[:leaves]))

            def build(_: Any, tx: Any = tx, arguments: Any = arguments) -> Any:
                placed = jax.tree.map(lambda x: x.sharding, arguments[:2])
                jitted = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=placed)
                return jitted, arguments

            jax.clear_caches()
            started = time.perf_counter()
            report = aot.h200(build)
            seconds = time.perf_counter() - started
            paged = name == "paged_adamw"
            rows.append(
                {
                    "section": SECTION,
                    "name": f"{name}, {leaves} leaves",
                    "seconds": seconds,
                    "seconds_a_leaf": seconds / leaves,
                    "xla_scratch_bytes": report.device_temp,
                    "target": TARGET_SECONDS if paged else None,
                    "within_target": seconds <= TARGET_SECONDS if paged else None,
                }
            )
    return rows
