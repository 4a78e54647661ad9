"""Files that others wrote, or somebody wrecked, given to each reader.

`python tests/hostile.py --files 10000` prints how they ended: each is read, or refused
with a `ValueError` that names the file and the field, see `helpers.hostile`.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from helpers import hostile  # noqa: E402
from paged_optax.backend.text import table  # noqa: E402


def main() -> None:
    """Draws, reads, and says how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=hostile.READERS, help="this one alone")
    options = parser.parse_args()
    rows, failed, total = [], False, 0
    chosen = [options.reader] if options.reader else [*hostile.READERS]
    whole = sum(hostile.READERS[name].share for name in chosen)
    for name in chosen:
        count = round(options.files * hostile.READERS[name].share / whole)
        started = time.perf_counter()
        try:
            found = hostile.fuzz(name, count, options.seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed = True
            print(f"{name}: {type(error).__name__}: {error}"[:3000], file=sys.stderr)
            continue
        total += found.ended.total()
        seconds = f"{time.perf_counter() - started:.0f}"
        counts = (str(found.ended[x]) for x in ("read", "refused"))
        rows.append((name, *counts, f"{found.most_bytes / 1e6:.1f}", seconds))
    print(table(("reader", "read", "refused", "most MB", "seconds"), rows))
    resident = hostile.most_resident() / 1e6
    print(f"seed {options.seed}: {total} cases; {resident:.0f} MB resident at most")
    sys.exit(failed)


if __name__ == "__main__":
    main()
