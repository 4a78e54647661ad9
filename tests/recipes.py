"""Random transformations, as many of them as you like.

`python tests/recipes.py --cases 2000` compares each, paged, with plain Optax, see
`helpers.fuzz`. It prints those that differ, as the JSON that `fuzz.run` takes, and how
often each thing was drawn.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from helpers import fuzz_parts  # noqa: E402
from helpers.recipes import compared, covered, drawn  # noqa: E402


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
    _, bad, said = compared(__doc__, drawn, covered, differs)
    primitives = fuzz_parts.primitives()
    print(f"{len(primitives)} primitives: {', '.join(sorted(primitives))}")
    print(f"{said}, {bad} differ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
