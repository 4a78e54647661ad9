"""Random transformations, as many of them as you like.

`python tests/recipes.py --cases 2000` compares each, paged, with plain Optax, see
`helpers.fuzz`. It prints those that differ, as the JSON that `fuzz.run` takes, and how
often each thing was drawn.
"""

import argparse
import json
import math
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from helpers import fuzz_parts  # noqa: E402
from helpers.recipes import covered, drawn, outcomes  # noqa: E402


def differs(recipe: str, outcome: Any) -> bool:
    """Whether it is more than the last bits of sums, of `erf`, or of what is folded.

    XLA:CPU folds what is computed of constants alone, with another `tanh` and `erf`
    than its own; of those that a transformation closes over, pages are given each one's
    part. Integers made of a constant are folded so in the whole, and not in a page.
    """
    if not isinstance(outcome, dict):
        return True
    asked = json.loads(recipe)
    used = {*asked["before"], *asked["after"], *asked["following"]}
    used |= {name for name, *_ in asked["steps"]}
    rounded = used & (fuzz_parts.SUMS | fuzz_parts.ROUNDED)
    folded = used & {"closure", "erf"} or {"integers", "tanh"} <= used
    rounded = rounded or ("fill" in used and folded)
    return max(outcome.values(), default=0) > (4 if rounded else 0)


def main() -> None:
    """Draws, compares, and says how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then")
    options = parser.parse_args()
    chosen = drawn(options.cases, options.seed)
    reached, bad = [], 0
    for recipe, outcome in outcomes(chosen, options.workers, options.minutes):
        reached.append(recipe)
        if differs(recipe, outcome):
            bad += 1
            print(recipe, "->", outcome, flush=True)
    for name, counts in covered(reached).items():
        listed = ", ".join(f"{x} {n}" for x, n in sorted(counts.items()))
        print(f"{len(counts)} of {name}: {listed}")
    primitives = fuzz_parts.primitives()
    print(f"{len(primitives)} primitives: {', '.join(sorted(primitives))}")
    print(f"seed {options.seed}: {len(reached)} of {len(chosen)} cases, {bad} differ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
