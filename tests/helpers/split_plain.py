"""What a recipe of a random model says where it says nothing."""

from typing import Any

Recipe = dict[str, Any]

#: A list of layers in float32 and nothing else, trained by plain gradient descent.
PLAIN: Recipe = {
    "container": "list",
    "sizes": [1, 3, 3, 4, 7],
    "kinds": [0, 0],
    "changes": [],
    "wrap": None,
    "mask": "numpy",
    "rotary": None,
    "keys": "constant",
    "raw key": False,
    "second": None,
    "counted": False,
    "router": None,
    "kept": [],
    "which": 0,
    "penalty": None,
    "penalty late": True,
    "cast": None,
    "dtype": "float32",
    "tied": False,
    "norm": False,
    "positions": False,
    "unused": False,
    "digits": False,
    "hybrid": False,
    "unlike": {},
    "loss": "plain",
    "batch": "dict",
    "frozen": None,
    "refused": None,
    "again": 1,
    "named": False,
    "alone": False,
    "abstract": False,
    "adamw": False,
    "optimizer": None,
    "paged": False,
    "on_host": False,
    "max_norm": None,
    "accumulate": False,
    "workspace": None,
    "activations_on_host": False,
    "ahead": False,
    "then": None,
}

#: Of one of its blocks, but for `ops`.
BLOCK: Recipe = {"end": "tanh", "wrap": None, "residual": True}

#: Of how its stacked layers are scanned.
SCAN: Recipe = {
    "body": 1,
    "unroll": 1,
    "rows": False,
    "index": True,
    "scaled": False,
    "whole": True,
}


def whole(recipe: Recipe) -> Recipe:
    """A recipe that says everything."""
    blocks = [BLOCK | block for block in recipe["blocks"]]
    scan = SCAN | recipe.get("scan", {})
    return PLAIN | recipe | {"blocks": blocks, "scan": scan}


def brief(recipe: Recipe) -> Recipe:
    """A recipe that says what is not plain."""
    but = lambda x, plain: {
        name: y for name, y in x.items() if name not in plain or plain[name] != y
    }
    scan = but(recipe["scan"], SCAN) if "stacked" in recipe["container"] else {}
    blocks = [but(block, BLOCK) for block in recipe["blocks"]]
    said = but(recipe, PLAIN) | {"blocks": blocks}
    del said["scan"]
    return said | ({"scan": scan} if scan else {})
