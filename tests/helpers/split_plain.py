"""What a recipe of a random model says where it says nothing."""

from typing import Any

Recipe = dict[str, Any]

_ABSENT = "wrap rotary second router penalty cast frozen refused optimizer max_norm"
_ABSENT += " workspace then"
_OFF = "counted tied norm positions unused digits hybrid named alone abstract adamw"
_OFF += " paged on_host accumulate activations_on_host ahead"

#: A list of layers in float32 and nothing else, trained by plain gradient descent.
PLAIN: Recipe = {
    **dict.fromkeys(_ABSENT.split()),
    **dict.fromkeys(["raw key", *_OFF.split()], False),
    **{"container": "list", "sizes": [1, 3, 3, 4, 7], "kinds": [0, 0], "changes": []},
    **{"mask": "numpy", "keys": "constant", "kept": [], "which": 0, "again": 1},
    **{"penalty late": True, "dtype": "float32", "unlike": {}},
    **{"loss": "plain", "batch": "dict"},
}
#: Of one of its blocks, but for `ops`.
BLOCK: Recipe = {"end": "tanh", "wrap": None, "residual": True}
#: Of how its stacked layers are scanned.
SCAN: Recipe = {"body": 1, "unroll": 1, "rows": False, "index": True}
SCAN |= {"scaled": False, "whole": True}


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
