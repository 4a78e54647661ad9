"""Random transformations, as many of them as you like.

`python tests/recipes.py --cases 2000` compares each, paged, with plain Optax, see
`helpers.fuzz`. It prints those that differ, as the JSON that `fuzz.run` takes.
"""

import argparse
import math
import sys

from helpers.recipes import drawn, outcomes


def main() -> None:
    """Draws, compares, and says how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then")
    options = parser.parse_args()
    chosen = drawn(options.cases, options.seed)
    bad = reached = 0
    for recipe, outcome in outcomes(chosen, options.workers, options.minutes):
        reached += 1
        if outcome != {}:
            bad += 1
            print(recipe, "->", outcome, flush=True)
    print(f"seed {options.seed}: {reached} of {len(chosen)} cases, {bad} differ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
