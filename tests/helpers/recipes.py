"""Recipes of random transformations, as many as you like, and what each comes to."""

import argparse
import collections
import json
import math
import random
from collections.abc import Callable
from typing import Any

from helpers import apart, fuzz
from helpers import fuzz_parts as parts

Recipe = dict[str, Any]


def _steps(draw: random.Random, names: Any, most: int = 10) -> list[Any]:
    """Names of steps, and how many values ago each one's two operands were made."""
    names = [*names]
    return [
        (draw.choice(names), draw.randrange(5), draw.randrange(5))
        for _ in range(draw.randint(1, most))
    ]


def _any_steps(draw: random.Random) -> list[Any]:
    kind = draw.randrange(3)
    if kind == 0:
        return _steps(draw, parts.ELEMENTWISE)
    if kind == 1:
        return _steps(draw, parts.STEPS)
    # One step that looks at the rest of the leaf hides what others do to its pages.
    within = _steps(draw, parts.WITHIN, 1)
    few = lambda: _steps(draw, parts.ELEMENTWISE, 5)
    return few() + within + few()


def _some(draw: random.Random, of: Any, least: int, most: int) -> list[Any]:
    return draw.choices([*of], k=draw.randint(least, most))


def _gates(draw: random.Random, leaves: int, traced: bool) -> list[Any]:
    """Which parameters each of two steps updates, None where nothing is said."""
    some = lambda: [draw.random() < 0.5 for _ in range(leaves)]
    if draw.random() < 0.4:
        return [None, None]
    # Each choice that is not traced is a program.
    return [some(), some()] if traced else [some()] * 2


def _plain(draw: random.Random) -> Recipe:
    shapes, traced = _some(draw, parts.SHAPES, 1, 3), draw.random() < 0.5
    dtype = draw.choice(parts.DTYPES)
    mixed = draw.random() < 0.2
    dtypes = [draw.choice(parts.DTYPES) if mixed else dtype for _ in shapes]
    before, after = _some(draw, parts.BLOCKS, 0, 2), _some(draw, parts.BLOCKS, 0, 1)
    # A scheduled hyperparameter is float32, and others have one dtype for all leaves.
    refused = ["inject_schedule"] if {*dtypes} != {"float32"} else []
    refused += ["inject_hyperparams"] * mixed
    before, after = ([x for x in y if x not in refused] for y in (before, after))
    # Some of Optax's moments turn into the gradients' dtype, which is refused.
    narrow = draw.choice(parts.DTYPES) if not before + after else "float32"
    return {
        "before": before,
        "steps": _any_steps(draw),
        "after": after,
        "mask": draw.choice([None, None, None, *parts.MASKS]),
        "shapes": shapes,
        "tree": draw.choice([*parts.TREES]),
        "dtypes": dtypes,
        "gradients": [narrow if x == "float32" else x for x in dtypes],
        "page_size": draw.choice(parts.PAGE_SIZES),
        "min_paged_size": draw.choice([0, 0, 0, 200]),
        "device_budget": draw.choice([0, 0, 0, 2000]),
        "codec": None,
        "mesh": None,
        "active": _gates(draw, len(shapes), traced),
        "traced": traced,
        "eager": draw.random() < 0.2,
        "traced_init": draw.random() < 0.2,
        "wrapper": None,
        "following": [],
        "masters": None,
        "shard_map": False,
        "infinite": [],
        "platform": draw.choice(["cpu", "cpu", "gpu", "tpu"]),
    }


def _coded(draw: random.Random) -> Recipe:
    shapes = _some(draw, parts.CODED_SHAPES, 1, 2)
    recipe = _plain(draw) | {
        "shapes": shapes,
        "dtypes": ["float32"] * len(shapes),
        "gradients": ["float32"] * len(shapes),
        "page_size": draw.choice(parts.CODED_PAGE_SIZES),
        "codec": draw.choice(parts.CODECS),
    }
    return recipe | {"active": _gates(draw, len(shapes), recipe["traced"])}


def _sharded(draw: random.Random) -> Recipe:
    return _on_mesh(draw, _plain(draw))


def _on_mesh(draw: random.Random, recipe: Recipe) -> Recipe:
    """Over a mesh; a sum over shards is rounded otherwise than one over the whole."""
    kind, sizes = draw.choice(["Auto", "Explicit"]), draw.choice(parts.MESHES)
    steps = _steps(draw, parts.ELEMENTWISE)
    mesh = {"kind": kind, "sizes": sizes}
    blocks = {"before": [], "after": []}
    return recipe | blocks | {"steps": steps, "mesh": mesh}


def _sharded_and_coded(draw: random.Random) -> Recipe:
    recipe = _on_mesh(draw, _coded(draw))
    shapes = draw.choices(parts.EVEN_SHAPES, k=len(recipe["shapes"]))
    mesh = recipe["mesh"] | {"sizes": parts.MESHES[0]}
    return recipe | {"shapes": shapes, "mesh": mesh}


def _wrapped(draw: random.Random) -> Recipe:
    name = draw.choice([*parts.WRAPPERS])
    # Optax's own multiplies host arrays.
    whose = "po" if "resets" in name else draw.choice(["po", "optax"])
    infinite = [1] if name == "apply_if_finite" else []
    recipe = _plain(draw)
    # Of Optax's some take no extra arguments.
    refused = parts.WITH_VALUE if name.startswith(("lookahead", "condition")) else ()
    for blocks in ("before", "after"):
        kept = [x for x in recipe[blocks] if x not in refused]
        recipe[blocks] = [x for x in kept if "resets" not in name or parts.resets(x)]
    # Of other dtypes than the gradients some updates are wider, which `lax.cond` of
    # Optax refuses.
    dtypes = ["float32"] * len(recipe["shapes"])
    return recipe | {
        "active": [None] * 3,
        "wrapper": [whose, name],
        "infinite": infinite,
        "dtypes": dtypes,
        "gradients": dtypes,
    }


def _followed(draw: random.Random) -> Recipe:
    """Something is chained after what is paged; it sees what gates leave out, too."""
    recipe = draw.choice([_plain, _coded, _sharded])(draw)
    names = parts.FOLLOWING_ELEMENTWISE if recipe["mesh"] else parts.FOLLOWING
    # What follows is not paged. Op by op it rounds to 16 bits after each, and in one
    # program at the end.
    narrow = {"bfloat16", "float16"} & {*recipe["gradients"]}
    return recipe | {
        "following": _some(draw, names, 1, 2),
        "active": [None] * 2,
        "eager": recipe["eager"] and not narrow,
    }


def _on_masters(draw: random.Random) -> Recipe:
    """Kept of parameters in fewer bits, which something else may change besides."""
    recipe = draw.choice([_plain, _plain, _coded, _sharded])(draw)
    masters = draw.choice(parts.MASTERS)
    narrow = ["bfloat16", "bfloat16", "float32"]
    narrow += ["float16"] * ("master_dtype" in masters)
    dtypes = [draw.choice(narrow) for _ in recipe["shapes"]]
    gradients = [draw.choice(["float32", x]) for x in dtypes]
    names = parts.FOLLOWING_ELEMENTWISE
    return recipe | {
        "masters": masters,
        "dtypes": dtypes,
        "gradients": gradients,
        "following": _some(draw, names, 0, 1),
        "active": [None] * 3,
    }


def _by_parts(draw: random.Random) -> Recipe:
    """Within a `jax.shard_map`, which checks what varies, as JAX does by default.

    Not eagerly: JAX then hands on no part of an array in host memory.
    """
    recipe = draw.choice([_sharded, _sharded, _sharded_and_coded])(draw)
    # What depends on the shape that it sees is another one of a part.
    steps = [x for x in recipe["steps"] if x[0] != "closure"] or [("neg", 0, 0)]
    names = [x for x in parts.FOLLOWING_ELEMENTWISE if x != "zero_nans"]
    return recipe | {
        "shard_map": True,
        "steps": steps,
        "following": _some(draw, names, 0, 1),
        "active": [None] * 2,
        "eager": False,
    }


#: And how often each is drawn: XLA takes longest with codecs.
_KINDS = {
    _plain: 8,
    _wrapped: 3,
    _coded: 3,
    _sharded: 4,
    _sharded_and_coded: 2,
    _followed: 3,
    _on_masters: 4,
    _by_parts: 3,
}


def drawn(cases: int, seed: int) -> list[str]:
    """So many recipes, as JSON; more cases begin with those of fewer."""
    draws = (random.Random(f"{seed} {number}") for number in range(cases))
    kinds, weights = [*_KINDS], [*_KINDS.values()]
    return [json.dumps(draw.choices(kinds, weights)[0](draw)) for draw in draws]


_CHOICES = ["mask", "tree", "page_size", "min_paged_size", "device_budget", "codec"]
_CHOICES += ["mesh", "eager", "traced_init", "wrapper", "platform"]
_CHOICES += ["masters", "shard_map"]


def covered(recipes: list[str]) -> dict[str, dict[str, int]]:
    """How many recipes have each thing that can be drawn, by what it is a choice of."""
    counts = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for recipe in map(json.loads, recipes):
        blocks = recipe["before"] + recipe["after"]
        counts["steps"].update({name for name, *_ in recipe["steps"]})
        counts["blocks"].update({*blocks})
        counts["following"].update({*recipe["following"]})
        gates = "traced" if recipe["traced"] else "static"
        some = any(gates is not None for gates in recipe["active"])
        counts["gates"][gates if some else "none"] += 1
        for name in _CHOICES:
            counts[name][json.dumps(recipe[name]).replace('"', "")] += 1
        for name in ("shapes", "dtypes", "gradients"):
            counts[name].update({*map(str, recipe[name])})
    return {name: dict(count) for name, count in counts.items()}


def compared(
    doc: str | None,
    draw: Callable[[int, int], list[str]],
    count: Callable[[list[str]], dict[str, dict[str, int]]],
    differs: Callable[[str, Any], bool],
    script: str = fuzz.__file__,
    flags: str = fuzz.FLAGS,
) -> tuple[list[str], int, str]:
    """Draws and compares as many recipes as the command line asks for, and prints.

    Args:
      doc: The command's.
      draw: See `drawn`.
      count: See `covered`.
      differs: Whether a recipe came to what it should not.
      script, flags: See `apart.outcomes`.

    Returns:
      The recipes that were reached, how many differ, and how the last line begins.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then")
    options = parser.parse_args()
    chosen = draw(options.cases, options.seed)
    reached, bad = list[str](), 0
    # Those of one platform share what is compiled.
    chosen.sort(key=lambda recipe: json.loads(recipe).get("platform", ""))
    how = options.workers, options.minutes, script, flags
    for recipe, outcome in apart.outcomes([[x] for x in chosen], *how):
        reached.append(recipe)
        if differs(recipe, outcome):
            bad += 1
            print(recipe, "->", outcome, flush=True)
    for name, counts in count(reached).items():
        listed = ", ".join(f"{x} {n}" for x, n in sorted(counts.items()))
        print(f"{len(counts)} of {name}: {listed}")
    return reached, bad, f"seed {options.seed}: {len(reached)} of {len(chosen)} cases"
