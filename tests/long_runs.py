"""Long training: memory, programs and numbers after twenty thousand steps.

`python tests/long_runs.py --steps 20000` trains experts of which some are active, in
eight bits, with moments on the host and rebalanced, beside the same on the device and
Optax's own, see `helpers.endurance`; makes and drops a thousand optimizers; and trains
in eight threads. `--record` adds a line to `tests/data/long_runs.json`.
"""

import argparse
import importlib.metadata
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from helpers import endurance  # noqa: E402
from helpers.endurance import MADE, TRAININGS  # noqa: E402
from helpers.records import record  # noqa: E402
from helpers.reference import distances  # noqa: E402
from paged_optax.backend.text import table  # noqa: E402

RECORD = pathlib.Path(__file__).parent / "data" / "long_runs.json"
MIB = 2**20


def trained(steps: int) -> dict[str, object]:
    """Twenty thousand steps, three ways."""
    rows, found, ends = [], {}, {}
    for name, make in TRAININGS.items():
        outcome = endurance.run(make(), steps)
        ends[name] = outcome.params, outcome.state
        mib = [f"{x / MIB:.1f}" for x in (outcome.early, outcome.late)]
        said = (name, str(outcome.programs), *mib, f"{outcome.growth:.2%}")
        loss = outcome.losses[-1]
        rows.append((*said, f"{loss:.4g}", f"{outcome.seconds:.0f}"))
        found[name] = {
            "programs": outcome.programs,
            "growth": round(outcome.growth, 5),
            "loss": loss,
        }
    titles = ("training", "programs", "MiB early", "MiB late", "growth")
    print(table((*titles, "last losses", "seconds"), rows))
    differ = len(distances(ends["8 bits"], ends["8 bits, paged and rebalanced"]))
    apart = endurance.apart(ends["Optax"][0], ends["8 bits"][0])
    print(f"{steps} steps: {differ} arrays differ between 8 bits, paged and not")
    print(f"8 bits and Optax: {apart:.2g} learning rates apart on average")
    return {"steps": steps, "differ": differ, "apart": round(apart, 3)} | found


def made_and_dropped(count: int) -> dict[str, object]:
    """Optimizers, each compiled."""
    found = {}
    for name, make in MADE.items():
        early, late = endurance.dropped(make, count, min(100, count // 2))
        found[name] = round(late / early - 1, 5)
        said = f"{count} optimizers of {name}, made and dropped"
        print(f"{said}: {early / MIB:.1f} to {late / MIB:.1f} MiB, {found[name]:.2%}")
    return {"made": count} | found


def main() -> None:
    """Trains, makes and drops, and says what that did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--optimizers", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--record", action="store_true", help=f"in {RECORD.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        long = trained(options.steps)
        many = made_and_dropped(options.optimizers)
        differ = endurance.threads_that_differ(options.threads, steps=200)
    print(f"{options.threads} threads: {len(differ)} differ from one alone")
    if options.record:
        entry = {"jax": importlib.metadata.version("jax"), "training": long}
        threads = {"threads": options.threads, "differ": len(differ)}
        record(RECORD, entry | {"optimizers": many} | threads)
    paged = long["8 bits, paged and rebalanced"]
    sys.exit(bool(long["differ"] or differ or paged["growth"] > 0.01))


if __name__ == "__main__":
    main()
