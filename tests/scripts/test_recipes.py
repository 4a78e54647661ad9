"""Random transformations: what is drawn, and that paging changes no number of some."""

import json

import pytest

from helpers import apart, broken, fuzz, fuzz_parts, recipes

CHOICES = {
    "steps": fuzz_parts.STEPS,
    "blocks": fuzz_parts.BLOCKS,
    "mask": ["null", *fuzz_parts.MASKS],
    "tree": fuzz_parts.TREES,
    "shapes": map(
        str,
        map(
            list,
            fuzz_parts.SHAPES + fuzz_parts.CODED_SHAPES + fuzz_parts.EVEN_SHAPES,
        ),
    ),
    "dtypes": fuzz_parts.DTYPES,
    "gradients": fuzz_parts.DTYPES,
    "page_size": map(str, fuzz_parts.PAGE_SIZES + fuzz_parts.CODED_PAGE_SIZES),
    "codec": [json.dumps(x).replace('"', "") for x in [None, *fuzz_parts.CODECS]],
    "mesh": [
        "null",
        *(
            f"{{kind: {kind}, sizes: {sizes}}}"
            for kind in ("Auto", "Explicit")
            for sizes in fuzz_parts.MESHES
        ),
    ],
    "gates": ["none", "static", "traced"],
    "wrapper": [
        "null",
        "[po, lookahead that resets]",
        *(
            f"[{whose}, {name}]"
            for whose in ("po", "optax")
            for name in fuzz_parts.WRAPPERS
            if "resets" not in name
        ),
    ],
    "platform": ["cpu", "gpu", "tpu"],
    "following": fuzz_parts.FOLLOWING,
    "masters": ["null", "[master_dtype, float32]", "[master_remainders, true]"],
    "shard_map": ["false", "true"],
}


@pytest.fixture(scope="module")
def covered():
    return recipes.covered(recipes.drawn(2000, 0))


@pytest.mark.parametrize("name", CHOICES)
def test_all_is_drawn(covered, name):
    """Several times each, in as many cases as CI compares."""
    assert {*covered[name]} == {*CHOICES[name]}
    assert min(covered[name].values()) >= 5


def test_forty_primitives():
    assert len(fuzz_parts.primitives()) >= 40


def test_more_cases_begin_with_those_of_fewer():
    assert recipes.drawn(20, 3)[:10] == recipes.drawn(10, 3) != recipes.drawn(10, 4)


@pytest.fixture(scope="module")
def distances():
    with apart.process(fuzz.__file__, fuzz.FLAGS) as ask:
        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_any_transformation_bit_for_bit(distances, number):
    assert distances(recipes.drawn(10, 0)[number]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("following", ["ema", "scale_by_adam"])
def test_float32_moments_follow_bfloat16_updates_over_explicit_axes(
    distances, following
):
    """Few are drawn. Plain Optax alone has other roundings there than on one device."""
    explicit = lambda x: (
        x["following"]
        and (x["mesh"] or {}).get("kind") == "Explicit"
        and not (x["masters"] or x["shard_map"] or x["eager"])
    )
    recipe = next(filter(explicit, map(json.loads, recipes.drawn(2000, 0))))
    chosen = {
        "steps": [["neg", 4, 0]],
        "shapes": [[16, 40]],
        "dtypes": ["float32"],
        "gradients": ["bfloat16"],
        "tree": "list",
        "following": [following],
    }
    assert distances(json.dumps(recipe | chosen)) == {}


def test_moments_keep_their_division(distances):
    """One that only an array which is closed over makes, eagerly, beside masters."""
    steps = [["tanh", 0, 0], ["mul", 1, 1], ["abs", 1, 4], ["copy", 2, 0]]
    steps += [["mul", 0, 0], ["is_finite", 2, 3], ["closure", 4, 3], ["sub", 2, 1]]
    steps += [["exp", 0, 3], ["convert", 4, 2]]
    chosen = {"before": [], "after": [], "following": [], "mask": "masked"}
    chosen |= {"shapes": [[300]], "tree": "list", "steps": steps, "eager": True}
    chosen |= {"dtypes": ["bfloat16"], "gradients": ["float32"], "infinite": []}
    chosen |= {"page_size": 500, "min_paged_size": 200, "device_budget": 0}
    chosen |= {"mesh": {"kind": "Auto", "sizes": [4, 2]}, "active": [None] * 3}
    chosen |= {"traced": False, "traced_init": False, "wrapper": None, "codec": None}
    chosen |= {"masters": ["master_remainders", True], "shard_map": False}
    assert distances(json.dumps(chosen | {"platform": "cpu"})) == {}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", broken.ENGINE)
def test_a_broken_engine_shows(breakage, monkeypatch):
    """In a good part of the cases that it concerns, of as few as 200."""
    monkeypatch.setenv("BROKEN", breakage)
    concerned = {
        "always the first page": lambda x: x["page_size"] < 1000 and not x["codec"],
        "gates are not read": lambda x: x["traced"] and not x["device_budget"],
        "codecs decode too much": lambda x: x["codec"] and not x["device_budget"],
        "masters go on": lambda x: (
            x["masters"] and "master_dtype" in x["masters"] and x["following"]
        ),
    }[breakage]
    chosen = [x for x in recipes.drawn(200, 0) if concerned(json.loads(x))][:12]
    with apart.process(fuzz.__file__, fuzz.FLAGS) as ask:
        differ = [ask(recipe) != {} for recipe in chosen]
    assert sum(differ) >= 2
