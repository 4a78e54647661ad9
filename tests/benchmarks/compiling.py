"""How long tracing and compiling for an H200 takes, as leaves grow. Nothing is run."""

import pathlib
import resource
import sys
import time
from typing import Any

import jax
import optax
import updates
from shapes import Shapes, adapters, llama_3_8b

import paged_optax as po

SECTION = "compiling"
LEAVES = (75, 147, 291)  # 8, 16 and 32 layers


def cases(quick: bool) -> list[tuple[str, Any, Shapes, float | None]]:
    """Names, transformations, shapes, and seconds of two quiet cores to stay within."""
    llama, lora = llama_3_8b(), adapters()
    found = []
    if not quick:
        # What takes longest comes first: a process that has compiled others is slower.
        paged = po.paged_adamw_8bit(1e-3, min_paged_size=0)
        resident = po.paged_adamw_8bit(1e-3, device_budget=None)
        found += [
            ("paged_adamw_8bit, 291 leaves", po.paged_adamw_8bit(1e-3), llama, 45.0),
            (f"paged_adamw_8bit, {len(lora)} adapters", paged, lora, 30.0),
            (f"the same, resident, {len(lora)} adapters", resident, lora, 20.0),
        ]
    for leaves in LEAVES[:1] if quick else LEAVES:
        shapes = dict(list(llama.items())[:leaves])
        found += [
            (
                f"optax.adamw, resident, {leaves} leaves",
                optax.adamw(1e-3),
                shapes,
                None,
            ),
            (f"paged_adamw, {leaves} leaves", po.paged_adamw(1e-3), shapes, 30.0),
        ]
    return found


def measure(quick: bool) -> list[dict[str, Any]]:
    """Seconds from the first trace to XLA's finished H200 program, a row a case."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    from helpers import aot

    rows = []
    for name, tx, shapes, target in cases(quick):
        arguments = updates.abstract_arguments(tx, shapes)

        def build(_: Any, tx: Any = tx, arguments: Any = arguments) -> Any:
            placed = jax.tree.map(lambda x: x.sharding, arguments[:2])
            jitted = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=placed)
            return jitted, arguments

        jax.clear_caches()
        started, busy = time.perf_counter(), time.process_time()
        report = aot.h200(build)
        seconds = time.perf_counter() - started
        rows.append(
            {
                "section": SECTION,
                "name": name,
                "seconds": seconds,
                "seconds_a_leaf": seconds / len(shapes),
                "cpu_seconds": time.process_time() - busy,
                "most_memory_so_far_bytes": 1024
                * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "xla_scratch_bytes": report.device_temp,
                "target": target,
                "within_target": None if target is None else seconds <= target,
            }
        )
    return rows
