"""Random models: what is drawn, and that taking some apart changes no number."""

import json

import pytest

from helpers import apart, broken, split_fuzz, split_recipes
from helpers.split_blocks import BLOCKS
from helpers.split_layer import WRAPS
from helpers.split_ops import OPS
from helpers.split_trees import TREES

#: Of the first ones drawn a dozen that are soon compiled, and have much of it all.
QUICK = [8, 17, 34, 36, 42, 72, 83, 94, 109, 115, 124, 141]

CHOICES = {
    "ops": OPS,
    "blocks": BLOCKS,
    "container": TREES,
    "wrap": ["null" if x is None else x for x in WRAPS],
    "mask": split_recipes.MASKS,
    "kept": split_recipes.KEPT,
    "refused": ["null", *split_recipes.REFUSED_LISTS, *split_recipes.REFUSED_SCANS],
    "frozen": ["null", "half", "int8", "lora"],
    "then": ["null", *split_recipes.THEN],
    "layers": map(str, [1, 2, 3, 4, 5, 6, 9, 10, 12]),
}


@pytest.fixture(scope="module")
def covered():
    return split_recipes.covered(split_recipes.drawn(3000, 0))


@pytest.mark.parametrize("name", CHOICES)
def test_all_is_drawn(covered, name):
    """Several times each, in as many cases as `models.py` may compare."""
    assert {*covered[name]} == {*CHOICES[name]}
    assert min(covered[name].values()) >= 5


def test_more_cases_begin_with_those_of_fewer():
    drawn = split_recipes.drawn
    assert drawn(20, 3)[:10] == drawn(10, 3) != drawn(10, 4)


@pytest.fixture(scope="module")
def differing():
    with apart.process(split_fuzz.__file__, split_fuzz.FLAGS) as ask:
        yield ask


@pytest.mark.quick("8", "36", "83", "141")
@pytest.mark.parametrize("number", QUICK)
def test_any_model(differing, number):
    assert differing(split_recipes.drawn(number + 1, 0)[number]) == {}


FOUR = [["convolution", 0], ["logsumexp", 1], ["einsum", 0], ["concatenate", 2]]
#: Recipes that went wrong, as short as they do.
ONCE = {
    # The refusal named no line: `jnp.linalg.solve`'s own equations have none.
    "solved, twice": {"blocks": [{"ops": [["solve", 2]]}], "refused": "twice"},
    # All layers' means had the type of what goes on, and were taken for the last one's.
    "a last kind, means of all": {
        "kinds": [0, 0, 0, 0, 1],
        "changes": [[0, 0, "mlp, checkpoint"]],
        "kept": ["concatenated", "one"],
        "blocks": [{"ops": [["mlp, checkpoint of dots", 2]]}],
    },
    # A sum of norms, in the order of names: Block_1, Block_10, Block_11, Block_2.
    "norms out of order": {
        "container": "Block_0",
        "kinds": [*[0] * 11, 1],
        "changes": [[0, 2, "add"], [0, 3, "dropout"]],
        "blocks": [{"ops": FOUR, "residual": False}],
        "penalty": "all",
    },
    # A layer of another kind, before the last one, has less behind its parameters.
    "another kind before the last": {
        "container": "tuple",
        "kinds": [0, 0, 1, 0],
        "changes": [[0, 0, "experts, sorted"]],
        "blocks": [{"ops": [["experts", 2]], "end": "rms"}],
        "router": "sum",
        "kept": ["mixed", "stacked"],
    },
    # A sum of norms, before the layers.
    "norms before layers": {
        "container": "Block_0",
        "kinds": [*[0] * 9, 1, 0, 0],
        "blocks": [{"ops": [["mlp, checkpoint of dots", 0]], "wrap": "checkpoint"}],
        "penalty": "norm",
        "penalty late": False,
    },
}


@pytest.mark.parametrize("name", ONCE)
def test_what_went_wrong_once(differing, name):
    assert differing(json.dumps(ONCE[name])) == {}


def uses(*words):
    """Whether a recipe has layers in a list, and equations with one of these names."""
    return lambda recipe: (
        "stacked" not in recipe.get("container", "list")
        and "refused" not in recipe
        and any(
            word in name
            for block in recipe["blocks"]
            for name, _ in block["ops"]
            for word in words
        )
    )


#: What recipes a breakage concerns, by its name.
CONCERNED = {
    "always the first row": uses("by layer", "inputs", "dropout", "noise"),
    "layers of one kind": lambda x: uses("")(x) and x.get("changes"),
    "what the first layer kept": lambda x: (
        uses("")(x) and {"mixed", "concatenated"} & {*x.get("kept", [])}
    ),
    "derivatives are lost": uses("custom_", "round"),
    "the second value stays": lambda x: uses("")(x) and x.get("second"),
    "what all see has no gradient": uses("shared", "encoder"),
    "stacks are not prepared": lambda x: (
        "refused" not in x and x.get("scan", {}).get("scaled")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", broken.SPLITTING)
def test_what_is_broken_shows(breakage, monkeypatch):
    """In a good part of the cases that it concerns, of as few as a hundred."""
    monkeypatch.setenv("BROKEN", breakage)
    drawn = split_recipes.drawn(100, 0)
    chosen = [x for x in drawn if CONCERNED[breakage](json.loads(x))]
    with apart.process(split_fuzz.__file__, split_fuzz.FLAGS) as ask:
        differ = [ask(recipe) != {} for recipe in sorted(chosen, key=len)[:6]]
    assert sum(differ) >= 2
