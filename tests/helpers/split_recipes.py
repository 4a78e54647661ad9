"""Recipes of random models, as many as you like."""

import collections
import json
import random
from typing import Any

from helpers.split_blocks import BLOCKS, MATRICES
from helpers.split_fuzz import BY_MATRIX, OPTIMIZERS
from helpers.split_layer import ENDS, WRAPS
from helpers.split_ops import OPS
from helpers.split_plain import Recipe, brief, whole
from helpers.split_trees import LISTED, STACKED

MASKS = ["before", "each", "numpy", "window by layer", "padding"]
KEPT = ["stacked", "average", "metric", "mixed", "one", "concatenated"]
#: What is refused of a list of layers, and of a scan over stacked ones.
REFUSED_LISTS = ["twice", "side by side", "skips", "effect", "elsewhere"]
REFUSED_LISTS += ["neighbour", "returned"]
REFUSED_SCANS = ["twice", "reverse", "effect"]
#: How what is trained with differs from what `split_layers` was given: a batch that
#: takes the layers in another order, or has a number of Python's in place of an array,
#: or the reverse; parameters of another dtype; a precision or a mesh around.
THEN = ["order", "array", "number", "dtype", "precision", "Auto", "Explicit"]
#: Of layers: mostly few, which are sooner compiled.
_COUNTS = [1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 9, 12]


def _op(draw: random.Random, names: list[str], ago: int) -> list[Any]:
    return [draw.choice(names), draw.randrange(ago)]


def _block(draw: random.Random, weights: bool) -> Recipe:
    """A few equations, one of them with weights if so."""
    ops = [_op(draw, [*OPS], 3) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    if draw.random() < 0.3:
        ops.insert(0, ["rms norm", 0])
    if weights or not ops:
        for _ in range(draw.choice([1, 1, 1, 2])):
            ops.insert(draw.randint(0, len(ops)), _op(draw, [*BLOCKS], 3))
    post = draw.random() < 0.15
    if post:
        ops.append([draw.choice(["layer norm", "rms norm"]), 0])
    return {
        "ops": ops,
        "end": draw.choice([*ENDS]),
        "wrap": draw.choice([None, None, None, None, *WRAPS]),
        "residual": not post and draw.random() < 0.9,
    }


def _like(name: str) -> list[str]:
    """Equations of the same weights, or of none."""
    if name in OPS:
        return [x for x in OPS if x != name]
    weights = BLOCKS[name].weights
    return [x for x in BLOCKS if x != name and BLOCKS[x].weights == weights]


def _changes(draw: random.Random, blocks: list[Recipe]) -> list[Any]:
    """What layers of the second kind compute in the place of one or two equations."""
    places = [
        (b, k, name)
        for b, block in enumerate(blocks)
        for k, (name, _) in enumerate(block["ops"])
        if _like(name)
    ]
    chosen = draw.sample(places, min(len(places), draw.choice([1, 1, 2])))
    return [[b, k, draw.choice(_like(name))] for b, k, name in sorted(chosen)]


def _kinds(draw: random.Random, count: int) -> list[int]:
    how = draw.choice(["same"] * 4 + ["alternate", "period", "one", "last", "any"])
    period = draw.choice([3, 4]) if how == "period" else 2
    odd = draw.randrange(count) if how == "one" else count - 1
    if how == "any":
        return [draw.randrange(2) for _ in range(count)]
    if how in ("alternate", "period"):
        return [int(n % period == period - 1) for n in range(count)]
    return [int(n == odd and how != "same") for n in range(count)]


def _any(draw: random.Random) -> Recipe:
    """A model of layers in a list, or stacked."""
    count = draw.choice(_COUNTS)
    stacked = draw.random() < 0.35
    several = draw.choice([1, 1, 1, 2, 2, 3]) if count < 4 else 1
    blocks = [_block(draw, n == 0) for n in range(several)]
    kinds = _kinds(draw, count)
    rare = lambda chance: draw.random() < chance
    maybe = lambda chance, choices: draw.choice(choices) if rare(chance) else None
    keys = ["folded", "before", "constant", "split"]
    return {
        "container": draw.choice(STACKED if stacked else LISTED),
        "sizes": [
            draw.choice(x) for x in ([1, 2, 3], [3, 4, 5], [3, 5, 6], [4, 7], [7, 11])
        ],
        "kinds": kinds,
        "changes": _changes(draw, blocks) if any(kinds) else [],
        "blocks": blocks,
        "wrap": maybe(0.3, [*WRAPS]),
        "mask": draw.choice(MASKS),
        "rotary": draw.choice([None, "before", "each"]),
        "keys": draw.choice(keys),
        "raw key": rare(0.3),
        "second": maybe(0.25, ["small", "full", "swapped"]),
        "counted": rare(0.15),
        "router": maybe(0.35, ["zero", "sum"] if stacked else ["zero", "first", "sum"]),
        "kept": sorted(draw.sample(KEPT, draw.choice([0, 0, 0, 1, 1, 2]))),
        "which": draw.randrange(count),
        # Stacks that are used outside of their scan are refused.
        "penalty": None if stacked else maybe(0.25, ["all", "layers", "norm"]),
        "penalty late": rare(0.5),
        "cast": maybe(0.25, ["bfloat16", "scaled", "in layer"]),
        "dtype": draw.choice(["float32"] * 6 + ["bfloat16", "mixed"]),
        "tied": rare(0.4),
        "norm": rare(0.7),
        "positions": rare(0.3),
        "unused": rare(0.15),
        "digits": rare(0.15),
        "hybrid": False,
        "unlike": {},
        "scan": {
            "body": 1,
            "unroll": draw.choice([1, 1, 2]),
            "rows": rare(0.5),
            "index": rare(0.7),
            "scaled": rare(0.15),
            "whole": rare(0.7),
        },
        "loss": draw.choice(["plain", "metrics", "weighted", "weighted metrics"]),
        "batch": draw.choice(["dict", "dict", "tuple"]),
        "frozen": None,
        "refused": None,
        "again": 1,
        "named": rare(0.25),
        "alone": rare(0.4),
        **_training(draw),
    }


def _training(draw: random.Random) -> Recipe:
    """How a model is trained."""
    rare = lambda chance: draw.random() < chance
    return {
        "abstract": rare(0.5),
        "adamw": rare(0.5),
        "paged": rare(0.3),
        "on_host": rare(0.3),
        "max_norm": draw.choice([None, None, 0.5]),
        "accumulate": rare(0.2),
        "workspace": draw.choice([None, None, None, "host", "deferred"]),
        "activations_on_host": rare(0.2),
        "ahead": rare(0.2),
    }


def _of_pairs(draw: random.Random) -> Recipe:
    """Two layers in a scan's body, or two of other weights in turn."""
    recipe = _any(draw)
    count = draw.choice([2, 4, 4, 6])
    kinds = [n % 2 for n in range(count)]
    recipe |= {"kinds": kinds, "which": draw.randrange(count)}
    recipe["changes"] = _changes(draw, recipe["blocks"])
    if recipe["container"] in STACKED:
        recipe["scan"]["body"] = 2
    else:
        recipe["hybrid"] = True
    return recipe


def _unlike(draw: random.Random) -> Recipe:
    """The first layer, or the last, has other weights."""
    recipe = _any(draw) | {"container": draw.choice(LISTED)}
    count = draw.choice([3, 4, 5])
    ends = draw.choice([["first"], ["last"], ["first", "last"]])
    count += len(ends) - 1
    recipe["unlike"] = {end: draw.choice(["extra", "wider"]) for end in ends}
    recipe |= {"kinds": [0] * count, "changes": [], "which": draw.randrange(count)}
    return recipe


def _frozen(draw: random.Random) -> Recipe:
    """Some parameters, or all but adapters, are not trained."""
    recipe = draw.choice([_any, _any, _of_pairs])(draw)
    how = draw.choice(["lora", "lora", "half", "int8"])
    # Adapters go beside matrices; and of two leaves one is trained.
    recipe["blocks"][0]["ops"].insert(0, [draw.choice(MATRICES), 0])
    recipe["changes"] = [[b, k + (b == 0), name] for b, k, name in recipe["changes"]]
    return recipe | {"frozen": how}


def _refused(draw: random.Random) -> Recipe:
    """What is not computed layer by layer."""
    recipe = _any(draw)
    stacked = recipe["container"] in STACKED
    how = draw.choice(REFUSED_SCANS if stacked else REFUSED_LISTS)
    # Of fewer layers no more than two values skip layers, which is not refused.
    count = draw.choice([10, 12]) if how == "skips" else draw.choice([3, 4, 5])
    kinds = [0] * count
    recipe |= {"kinds": kinds, "changes": [], "which": draw.randrange(count)}
    if how in ("elsewhere", "returned", "neighbour"):
        # What is computed of a layer's weights alone may be kept of each.
        recipe |= {"loss": "plain", "accumulate": False, "cast": None}
    again = draw.randint(1, count - 1)
    # There may be other lists, which could be taken apart.
    return recipe | {"refused": how, "again": again, "named": True}


#: And how often each is drawn.
_KINDS = {_any: 12, _of_pairs: 3, _unlike: 2, _frozen: 4, _refused: 2}


def drawn(cases: int, seed: int) -> list[str]:
    """So many recipes, as JSON; more cases begin with those of fewer."""
    draws = (random.Random(f"{seed} {number}") for number in range(cases))
    kinds, weights = [*_KINDS], [*_KINDS.values()]
    recipes = (_around(draw, draw.choices(kinds, weights)[0](draw)) for draw in draws)
    return [json.dumps(brief(recipe)) for recipe in recipes]


def _around(draw: random.Random, recipe: Recipe) -> Recipe:
    """With an optimizer, and what differs when it is trained."""
    recipe |= {"then": draw.choice([None] * 4 + THEN)}
    stacked = recipe["container"] in STACKED
    chosen = [x for x in OPTIMIZERS if not (stacked and x in BY_MATRIX)]
    return recipe | {"optimizer": draw.choice([None] * 4 + chosen)}


def covered(recipes: list[str]) -> dict[str, dict[str, int]]:
    """How many recipes have each thing that can be drawn, by what it is a choice of."""
    counts = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for recipe in map(whole, map(json.loads, recipes)):
        names = {name for block in recipe["blocks"] for name, _ in block["ops"]}
        counts["ops"].update(names & {*OPS})
        counts["blocks"].update(names & {*BLOCKS})
        counts["changes"].update({name for *_, name in recipe["changes"]})
        counts["layers"][str(len(recipe["kinds"]))] += 1
        counts["kinds"]["".join(map(str, recipe["kinds"]))] += 1
        for name, x in recipe.items():
            if name not in ("blocks", "changes", "kinds", "which", "again", "sizes"):
                for value in x if isinstance(x, list) else [x]:
                    counts[name][json.dumps(value).replace('"', "")] += 1
    return {name: dict(count) for name, count in counts.items()}
