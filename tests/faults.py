"""Training that is killed at random moments, as often as you like.

`python tests/faults.py --kills 100` kills training processes by SIGKILL, each time
resumes from the last checkpoint, and holds every bit to the uninterrupted run, see
`helpers.kills`. It prints into which phase the kills fell.
"""

import argparse
import pathlib
import sys
import tempfile
import time

from helpers import kills
from helpers.kills import KINDS
from helpers.trainer import PHASES
from paged_optax.backend.text import table


def main() -> None:
    """Kills, resumes, compares, and says how that went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="this one alone")
    options = parser.parse_args()
    chosen = [options.kind] if options.kind else [*KINDS]
    whole = sum(KINDS[name].share for name in chosen)
    rows, total, exact = [], 0, 0
    for name in chosen:
        number = round(options.kills * KINDS[name].share / whole)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            runs = kills.Runs(KINDS[name], pathlib.Path(folder))
            count = runs.killed(number, options.seed)
        phases = (count.phases[phase] for phase in PHASES[1:])
        seconds = round(time.perf_counter() - started)
        rest = (count.runs, count.lives, count.resumed, *phases, seconds)
        rows.append((name, f"{count.exact} of {number}", *map(str, rest)))
        total, exact = total + number, exact + count.exact
        print(rows[-1], flush=True)
    titles = ("training", "bit-exact", "runs", "lives", "resumed", *PHASES[1:])
    print(table((*titles, "seconds"), rows))
    print(f"seed {options.seed}: {exact} of {total} kills survived, bit for bit")
    sys.exit(exact != total)


if __name__ == "__main__":
    main()
