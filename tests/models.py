"""Random models taken apart by `split_layers`, as many of them as you like.

`python tests/models.py --cases 2000` compares each with `jax.grad` and Optax, see
`helpers.split_fuzz`. It prints those that differ, as the JSON that `run` takes, and how
often each thing was drawn.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from helpers import split_fuzz  # noqa: E402
from helpers.recipes import compared  # noqa: E402
from helpers.split_fuzz import run as run  # noqa: E402
from helpers.split_recipes import covered, drawn  # noqa: E402


def main() -> None:
    """Draws, compares, and says how many differ."""
    differs = lambda recipe, outcome: outcome != {}
    process = split_fuzz.__file__, split_fuzz.FLAGS
    reached, bad, said = compared(__doc__, drawn, covered, differs, *process)
    refused = sum("refused" in json.loads(recipe) for recipe in reached)
    print(f"{said}, {refused} of them to be refused, {bad} differ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
