"""Random models taken apart by `split_layers`, as many of them as you like.

`python tests/models.py --cases 2000` compares each with `jax.grad` and Optax, see
`helpers.split_fuzz`. It prints those that differ, as the JSON that `run` takes, and how
often each thing was drawn.
"""

import argparse
import json
import math
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from helpers import split_fuzz  # noqa: E402
from helpers.recipes import outcomes  # noqa: E402
from helpers.split_fuzz import run as run  # noqa: E402
from helpers.split_recipes import covered, drawn  # noqa: E402


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
    results = outcomes(
        chosen, options.workers, options.minutes, split_fuzz.__file__, split_fuzz.FLAGS
    )
    for recipe, result in results:
        reached.append(recipe)
        if result != {}:
            bad += 1
            print(recipe, "->", result, flush=True)
    for name, counts in covered(reached).items():
        listed = ", ".join(f"{x} {n}" for x, n in sorted(counts.items()))
        print(f"{len(counts)} of {name}: {listed}")
    refused = sum("refused" in json.loads(recipe) for recipe in reached)
    print(
        f"seed {options.seed}: {len(reached)} of {len(chosen)} cases, {refused} of them"
        f" to be refused, {bad} differ"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
