"""Parameters whose joined names are equal, or have a `/` at an end, or are patterns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import DictKey, GetAttrKey

import paged_optax as po
from helpers.moments import adam, filled, flat
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import HOST
from paged_optax.backend.text import key_names

SHAPE = (64, 128)
TREES = {
    "a key with a slash": lambda x, y: {"a/b": x, "a": {"b": y}},
    "deeper": lambda x, y: {"r": [{"a/b/c": x}, {"a/b/c": y, "a": {"b/c": y}}]},
    "slashes at the ends": lambda x, y: {"/a": x, "a": y, "a/": x + y, "/": {"": y}},
    "an empty key": lambda x, y: {"": x, "b": {"": y}},
    "groups": lambda x, y: {"a/b": {"c": x}, "a": {"b": {"c": y, "d": x}}, "b": y},
    "joined before": lambda x, y: {"a": x, "a/b": y},
}


def params_of(tree):
    return TREES[tree](jnp.ones(SHAPE), 2 * jnp.ones(SHAPE))


@pytest.fixture(params=TREES)
def params(request):
    return params_of(request.param)


def moment(state, key_path, field="mu"):
    """What Optax's own tree has at a key path."""
    (found,) = [
        x
        for path, x in flat(state)
        if path[-len(key_path) :] == key_path
        and path[-len(key_path) - 1] == GetAttrKey(field)
    ]
    return found


def test_each_is_read_and_edited_by_its_key_path(params):
    tx = adam(per_parameter_steps=True)
    state = filled(tx.init(params))
    for key_path, _ in flat(params):
        moments = po.page_in(state, key_path)
        assert_equal(moments["mu"], moment(state, key_path))
        assert_equal(moments["nu"], moment(state, key_path, "nu"))
        changed = po.page_out(state, key_path, moments | {"mu": moments["mu"] + 1})
        counted = po.increment_step(state, key_path)
        again = po.init_param(tx, state, params, key_path)
        moved = po.rebalance(
            adam(device_budget="64KiB"), jax.tree.map(jnp.copy, state), [key_path]
        )
        assert po.host_bytes(state, key_path) == 2 * 4 * 64 * 128
        assert po.device_resident_count(moved) == 1
        assert po.is_device_resident(moved, key_path)
        for other, _ in flat(params):
            own = other == key_path
            assert int(po.get_step(counted, other)) == own
            assert not po.is_device_resident(state, other)
            assert bool((moment(changed, other) != moment(state, other)).any()) == own
            assert bool((moment(again, other) != moment(state, other)).any()) == own


def test_a_parameter_joins_beside_them(params):
    tx = adam()
    state = filled(tx.init(params))
    more = {"more": params, "new": jnp.ones(SHAPE)}
    held = filled(tx.init({"more": params}))
    joined = po.init_param(tx, held, more, "new")
    assert jax.tree.structure(joined) == jax.tree.structure(tx.init(more))
    assert joined[0].mu["more"] == held[0].mu["more"]
    assert not jnp.any(np.asarray(joined[0].nu["new"]))
    back = po.place_state(tx, jax.device_get(state), params)
    assert_equal(back, state)
    assert kinds(back) == kinds(state)


def test_they_go_to_bitsandbytes_and_back(params):
    tx = adam()
    state = filled(tx.init(params))
    entries = po.to_bitsandbytes(state, params)
    assert len(entries) == len(flat(params))
    assert_equal(po.from_bitsandbytes(tx.init(params), entries), state)


def test_masters_are_found_by_key_path():
    params = jax.tree.map(jnp.bfloat16, params_of("a key with a slash"))
    tx = po.paged(optax.sgd(1e-4), master_dtype="float32", **SMALL_PAGES)
    updates, state = tx.update(params, tx.init(params), params)
    masters = po.master_weights(optax.apply_updates(params, updates), state)
    assert_equal(masters, jax.tree.map(jnp.asarray, state.master))
    assert float(masters["a"]["b"][0, 0]) < 2 < 2 * float(masters["a/b"][0, 0]) + 1


NAMED = {  # what a string names: the keys of one, or two that are refused
    ("a key with a slash", "a"): [("a", "b")],
    ("slashes at the ends", "/a"): [("/a",)],
    ("slashes at the ends", "a"): [("a",)],
    ("slashes at the ends", "a/"): [("a/",)],
    ("slashes at the ends", "/a/"): [("a",)],
    ("slashes at the ends", "//"): [("/", "")],
    ("an empty key", "b/"): [("b", "")],
    ("an empty key", "b"): [("b", "")],
    ("groups", "a/b/d"): [("a", "b", "d")],
    ("groups", "/b"): [("b",)],
    ("joined before", "a"): [("a",)],
    ("joined before", "a/b/"): [("a/b",)],
}


@pytest.mark.parametrize(("tree", "text"), NAMED)
def test_a_string_names_what_it_says(tree, text):
    params = params_of(tree)
    state = filled(adam().init(params))
    (keys,) = NAMED[tree, text]
    wanted = po.page_in(state, tuple(map(DictKey, keys)))
    assert_equal(po.page_in(state, text), wanted)


AMBIGUOUS = {
    ("a key with a slash", "a/b"): {("a/b",), ("a", "b")},
    ("a key with a slash", "/a/b/"): {("a/b",), ("a", "b")},
    ("deeper", "r/1/a/b/c"): {("r", "1", "a/b/c"), ("r", "1", "a", "b/c")},
    ("groups", "a/b"): {("a/b",), ("a", "b")},
    ("groups", "a/b/c"): {("a/b", "c"), ("a", "b", "c")},
    ("an empty key", ""): {(), ("",)},
}


@pytest.mark.parametrize(("tree", "text"), AMBIGUOUS)
def test_a_string_that_names_several_is_refused(tree, text):
    """The error has a key path of each, and each of them can be used as it is."""
    state = adam().init(params_of(tree))
    with pytest.raises(ValueError) as error:
        po.page_in(state, text)
    message = str(error.value)
    assert f"path={text!r} names 2 parameters or groups" in message
    shown = re.search("has them, (.*), where DictKey and its like", message).group(1)
    found = [eval(each, vars(jax.tree_util)) for each in shown.split(" or ")]
    assert set(map(key_names, found)) == AMBIGUOUS[tree, text]
    assert all(po.host_bytes(state, each) for each in found)


def test_states_whose_joined_names_are_equal():
    """No moment of a parameter hides another's name."""
    inner = lambda: optax.named_chain(("y", adam()))
    tx = optax.named_chain(("x/y", adam()), ("x", inner()))
    params = {"w": jnp.ones(SHAPE)}
    state = filled(tx.init(params))
    moments = po.page_in(state, "w")
    assert len(moments) == 4
    assert_equal(po.page_out(state, "w", moments), state)


# -- codecs by name -----------------------------------------------------------------


def coded(tx, params):
    state = tx.init(params)
    names = [x for x in params if po.page_in(state, x)["mu"].dtype != jnp.float32]
    assert kinds(state[0].mu) == [HOST] * len(params)
    return names


@pytest.mark.parametrize(
    ("names", "key", "wanted"),
    [
        (["w[0]", "w0", "w1"], "w[0]", ["w[0]"]),
        (["w0", "w1"], "w[0]", ["w0"]),
        (["w*", "wx", "w"], "w*", ["w*"]),
        (["w?", "wx"], "w?", ["w?"]),
        (["*", "wx"], "*", ["*"]),
        (["w[!0]", "w1"], "w[!0]", ["w[!0]"]),
        (["/w", "w", "w/"], "/w", ["/w"]),
        (["/w", "w", "w/"], "*w*", ["/w", "w", "w/"]),
    ],
)
def test_a_name_wins_over_a_pattern(names, key, wanted):
    params = {name: jnp.ones(SHAPE) for name in names}
    assert coded(adam(codec={key: "bfloat16"}), params) == wanted
    tx = adam(codec={"*" if key != "*" else "w*": "float32", key: "bfloat16"})
    assert coded(tx, params) == wanted
    with pytest.raises(ValueError, match="key 'w"):
        adam(codec={"w[8]": "bfloat16"}).init(params)
