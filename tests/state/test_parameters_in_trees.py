"""One parameter's state, whatever tree, optimizer or equal names there are."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.tree_util import DictKey, GetAttrKey

import paged_optax as po
from helpers.moments import (
    BUDGET,
    MOMENTS,
    SHAPES,
    adam,
    assert_joined,
    belonging,
    filled,
    flat,
    named,
    small,
)
from helpers.reference import ALIASES, SMALL_PAGES, arrays, assert_equal, kinds
from helpers.small import DEVICE, HOST
from paged_optax.backend.text import key_names


class Pair(NamedTuple):
    left: Any
    right: Any


class CarryState(NamedTuple):
    """Parameters may have a name that ends as those of Optax's states do."""

    hidden: Any
    cell: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    inner: Any


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A pytree that gives its children no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


TREES = {
    "dicts": lambda a, b, c: {"x": {"a": a, "a2": {"b": b}}, "y": {"": c}},
    "like fields": lambda a, b, c: {"mu": a, "count": b, "nu": {"mu": c}},
    "lists": lambda a, b, c: [a, [b, [c]]],
    "tuples": lambda a, b, c: (a, (b, (c,))),
    "named tuples": lambda a, b, c: Pair(a, Pair(b, [c])),
    "named like a state": lambda a, b, c: CarryState(a, {"z": CarryState(b, c)}),
    "dataclasses": lambda a, b, c: Layer(a, (Layer(b, c),)),
    "keyless": lambda a, b, c: {"k": Keyless(a, b), "l": c},
    "nnx state": lambda a, b, c: nnx.State(
        {"m": {"a": nnx.Param(a), "b": nnx.Param(b)}, "c": nnx.Param(c)}
    ),
    "with none": lambda a, b, c: {"a": a, "b": None, "c": [b, None, c]},
    "numbers": lambda a, b, c: {0: a, 1: {10: b, 1: c}},
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_trees_of_parameters(tree, own):
    """Every function, for parameters in every container, by both kinds of path."""
    params = TREES[tree](*small().values())
    tx = adam(device_budget=BUDGET, per_parameter_steps=own)
    state = filled(tx.init(params))
    scale = state[0]
    for i, (key_path, x) in enumerate(flat(params)):
        stays = x.shape != SHAPES["b"]
        mu, nu = (jax.tree.leaves(x)[i] for x in (scale.mu, scale.nu))
        for path in (key_path, named(key_path)):
            moments = po.page_in(state, path)
            assert set(moments) == {"mu", "nu"}
            assert_equal((moments["mu"], moments["nu"]), (mu, nu))
            assert po.is_device_resident(state, path) == stays
            where = po.device_bytes if stays else po.host_bytes
            assert where(state, path) == 2 * mu.nbytes
            assert_equal(po.page_out(state, path, moments), state)
            assert int(po.get_step(state, path)) == 0
            if own:
                more = po.increment_step(state, path)
                counts = [int(x) for x in jax.tree.leaves(more[0].count)]
                assert counts == [int(i == j) for j in range(3)]
                assert int(po.get_step(more, path)) == 1
    fresh = po.init_param(tx, state, params, path)
    for j, moment in enumerate(jax.tree.leaves(fresh[0].mu)):
        assert bool(np.abs(moment).max() > 0) == (i != j)
    assert kinds(fresh) == kinds(state)
    assert po.device_resident_count(state) == 2
    moved = po.rebalance(tx, state, [path for path, x in flat(params) if x.size == 9])
    assert po.device_resident_count(moved) == 1


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_bare_array(own):
    """Parameters that are one array have the empty path."""
    params = small()["b"]
    tx = adam(per_parameter_steps=own)
    state = filled(tx.init(params))
    for path in ("", (), "/"):
        moments = po.page_in(state, path)
        assert_equal(moments["mu"], state[0].mu)
        assert_equal(po.page_out(state, path, moments), state)
        assert not po.is_device_resident(state, path)
        assert po.host_bytes(state, path) == 2 * params.nbytes
    _, state = tx.update(params, state, params)
    assert int(po.get_step(state, "")) == 1
    if own:
        assert int(po.get_step(po.increment_step(state, ""), "")) == 2
    assert po.device_resident_count(state) == 0
    fresh = po.init_param(tx, state, params, "")
    assert float(jnp.abs(fresh[0].mu).max()) == 0
    assert kinds(fresh) == kinds(state)
    state = po.rebalance(adam(device_budget="1MiB"), state, [""])
    assert po.device_resident_count(state) == 1


@pytest.mark.quick("paged_adamw", "paged_muon")
@pytest.mark.parametrize("alias", MOMENTS)
def test_optimizers(alias):
    """Moments by Optax's names; identity; a new parameter joins; all numbers kept."""
    _, kwargs = ALIASES[alias]
    tx = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    # Adafactor factors from 128 rows and columns on.
    params = arrays(shapes={"w": (130, 140), "v": (300,), "s": (), "new": (129, 128)})
    state = filled(tx.init(params))
    assert set(po.page_in(state, "w")) == MOMENTS[alias]
    for name in params:
        moments = po.page_in(state, name)
        assert_equal(moments, belonging(state, (jax.tree_util.DictKey(name),)))
        assert_equal(po.page_out(state, name, moments), state)
    less = {name: x for name, x in params.items() if name != "new"}
    start = filled(tx.init(less))
    joined = po.init_param(tx, start, params, "new")
    assert_joined(joined, start, tx.init(params))
    jax.jit(tx.update)(params, joined, params)


@pytest.mark.slow
def test_coded_moments():
    """A moment in codes and scales goes in and out, moves and joins as one."""
    own = {"per_parameter_steps": True, "codec": "dynamic_int8"}
    tx, params = adam(device_budget="9KiB", **own), small()
    _, state = tx.update(params, tx.init(params), params)
    size = 2 * (64 * 64 + 64 * 64 // 256 * 4)
    moments = po.page_in(state, "a")
    assert [str(x.dtype) for x in jax.tree.leaves(moments)] == [
        "int32",
        "float32",
        "uint32",
        "float32",
    ]
    assert set(kinds(moments)) == {DEVICE}
    assert po.is_device_resident(state, "a")
    assert po.device_bytes(state, "a") == size
    out = po.page_out(state, "a", moments)
    assert_equal(out, state)
    assert po.host_bytes(out, "a") == size
    with pytest.raises(ValueError, match="'mu'"):
        po.page_out(state, "a", moments | {"mu": jnp.ones((64, 64))})
    wanted = jax.tree.map(np.array, out)
    moved = po.rebalance(tx, out, ["a"])
    assert_equal(moved, wanted)
    assert po.is_device_resident(moved, "a")
    assert not po.is_device_resident(moved, "b")
    again = po.init_param(tx, moved, params, "b")
    assert_equal(po.page_in(again, "b"), po.page_in(tx.init(params), "b"))
    assert_equal(po.page_in(again, "a"), moments)
    assert [int(po.get_step(again, name)) for name in "abc"] == [1, 0, 1]
    target = po.abstract_state(tx, params)
    assert jax.tree.structure(target) == jax.tree.structure(tx.init(params))
    assert kinds(target) == kinds(tx.init(params))
    tx.update(params, again, params)


def test_two_fields_of_one_name_are_told_apart():
    tx = optax.chain(adam(), adam())
    state = filled(tx.init(small()))
    moments = po.page_in(state, "b")
    assert len(moments) == 4
    assert all(re.search("(mu|nu)$", name) for name in moments)
    found = sorted(float(x.sum()) for x in moments.values())
    own = [x for path, x in flat(state) if path[-1:] == (jax.tree_util.DictKey("b"),)]
    assert found == sorted(float(jnp.asarray(np.asarray(x)).sum()) for x in own)
    assert_equal(po.page_out(state, "b", moments), state)


SHAPE = (64, 128)
SAME_NAMES = {
    "a key with a slash": lambda x, y: {"a/b": x, "a": {"b": y}},
    "deeper": lambda x, y: {"r": [{"a/b/c": x}, {"a/b/c": y, "a": {"b/c": y}}]},
    "slashes at the ends": lambda x, y: {"/a": x, "a": y, "a/": x + y, "/": {"": y}},
    "an empty key": lambda x, y: {"": x, "b": {"": y}},
    "groups": lambda x, y: {"a/b": {"c": x}, "a": {"b": {"c": y, "d": x}}, "b": y},
    "joined before": lambda x, y: {"a": x, "a/b": y},
}


def params_of(tree):
    return SAME_NAMES[tree](jnp.ones(SHAPE), 2 * jnp.ones(SHAPE))


@pytest.fixture(params=SAME_NAMES)
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
