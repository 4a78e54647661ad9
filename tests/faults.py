"""Training that is killed at random moments, as often as you like.

`python tests/faults.py --kills 100` kills training processes by SIGKILL, each time
resumes from the last checkpoint, and holds every bit to the uninterrupted run, see
`helpers.kills`. It prints into which phase the kills fell. `--record` adds a line to
`tests/data/killed.json`.
"""

import argparse
import importlib.metadata
import pathlib
import sys
import tempfile
import time

from helpers import kills
from helpers.kills import KINDS
from helpers.records import record
from helpers.trainer import PHASES
from paged_optax.backend.text import table

RECORD = pathlib.Path(__file__).parent / "data" / "killed.json"


def main() -> None:
    """Kills, resumes, compares, and says how that went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="this one alone")
    parser.add_argument("--record", action="store_true", help=f"in {RECORD.name}")
    options = parser.parse_args()
    chosen = [options.kind] if options.kind else [*KINDS]
    whole = sum(KINDS[name].share for name in chosen)
    rows, found = [], {}
    for name in chosen:
        number = round(options.kills * KINDS[name].share / whole)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            runs = kills.Runs(KINDS[name], pathlib.Path(folder))
            count = runs.killed(number, options.seed)
        phases = {phase: count.phases[phase] for phase in PHASES[1:]}
        exact = f"{count.exact} of {number}"
        rest = map(str, (count.runs, count.lives, count.resumed, *phases.values()))
        rows.append((name, exact, *rest, f"{time.perf_counter() - started:.0f}"))
        found[name] = {"kills": number, "exact": count.exact, "phases": phases}
        print(rows[-1], flush=True)
    titles = ("training", "bit-exact", "runs", "lives", "resumed", *PHASES[1:])
    print(table((*titles, "seconds"), rows))
    total, exact = (sum(x[key] for x in found.values()) for key in ("kills", "exact"))
    print(f"seed {options.seed}: {exact} of {total} kills survived, bit for bit")
    if options.record:
        version = importlib.metadata.version("jax")
        record(RECORD, {"jax": version, "seed": options.seed} | found)
    sys.exit(exact != total)


if __name__ == "__main__":
    main()
