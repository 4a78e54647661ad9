"""Parameters that join a state, or start anew in it."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import paged_optax as po
from helpers.coded import NAMES
from helpers.moments import B, adam, assert_joined, filled, flat, small
from helpers.reference import SMALL_PAGES, arrays, kinds
from helpers.small import HOST
from paged_optax.backend.types import is_traced


@pytest.mark.parametrize("old", ["missing", "present"])
def test_a_group_joins_or_restarts(old):
    tx = adam(per_parameter_steps=True)
    adapter = {"down": jnp.ones((64, 33)), "up": jnp.ones((33, 64))}
    base = {"base": {"w": small()["b"]}}
    params = base | {"adapter": adapter}
    state = filled(tx.init(base if old == "missing" else params))
    state = po.increment_step(state, "base/w")
    if old == "present":
        state = po.increment_step(state, "adapter/up")
    new = po.init_param(tx, state, params, "adapter")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, tx.init(params))
    assert kinds(new) == kinds(tx.init(params))
    for name in ("adapter/down", "adapter/up"):
        assert float(jnp.abs(po.page_in(new, name)["mu"]).max()) == 0
        assert int(po.get_step(new, name)) == 0
    assert new[0].mu["base"]["w"] is state[0].mu["base"]["w"]
    assert int(po.get_step(new, "base/w")) == 1
    tx.update(params, new, params)


def test_joining_allocates_its_own_moments_alone():
    """The others' are neither copied nor made again."""
    made = []

    def init(params):
        state = adam().init(params)
        made.append([x for x in jax.tree.leaves(state) if not is_traced(x)])
        return state

    tx, params = adam()._replace(init=init), small()
    state = tx.init({name: params[name] for name in ("a", "c")})
    made.clear()
    po.init_param(tx, state, params, "b")
    assert 0 < sum(x.nbytes for each in made for x in each) <= B + 64


def test_small_ones_that_become_enough_to_be_paged():
    """Those that were there stay, and the next update tells why they should not."""
    tx = po.paged_adam(0.1, on_moved="raise")
    params = {name: jnp.ones((128, 128)) for name in "abc"}  # 64 KiB each
    state = tx.init(params)
    assert HOST not in kinds(state[0].mu)
    params["d"] = jnp.ones((128, 128))
    state = po.init_param(tx, state, params, "d")
    assert kinds(state[0].mu).count(HOST) == 1
    with pytest.raises(ValueError, match=r"now count as large together.*place_state"):
        tx.update(params, state, params)
    state = po.place_state(tx, state, params)
    assert kinds(state[0].mu) == [HOST] * 4
    tx.update(params, state, params)


SHAPES = {"a": (64, 128), "new": (72, 128), "odd": (65, 67), "row": (4100,), "s": (9,)}
OPTIONS = {name: {"codec": name} for name in NAMES} | {
    "by moment": {"codec": {"mu": "bfloat16", "nu": "dynamic_int8"}},
    "by name": {"codec": {"*": "dynamic_int8", "[on]*": "dynamic_int4"}},
    "masters": {"master_dtype": "float32"},
    "remainders": {"master_remainders": True},
    "masters in codes": {"master_dtype": "float32", "codec": "dynamic_int8"},
    "remainders in codes": {"master_remainders": True, "codec": "float8_e4m3"},
    "own steps": {"codec": "dynamic_int8", "per_parameter_steps": True},
}
MASTERS = ["masters in codes", "remainders in codes"]
adamw = functools.partial(po.paged_adamw, 1e-2)


def params_of(option, shapes=SHAPES):
    half = "master" in option or "remainder" in option
    return arrays(jnp.bfloat16 if half else jnp.float32, 0, shapes)


def joined(tx, params, new):
    """A state trained without a parameter, and with it: checked against `init`."""
    less = {name: x for name, x in params.items() if name != new}
    state, update = tx.init(less), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(less, state, less)
    found = po.init_param(tx, state, params, new)
    assert_joined(found, state, tx.init(params))
    _, after = update(params, found, params)
    assert kinds(after) == kinds(found)
    again = po.init_param(tx, after, params, new)
    chex.assert_trees_all_equal(po.page_in(again, new), po.page_in(found, new))
    return found


@pytest.mark.quick("pages-dynamic_int8-o", "pages-remainders-n", "default-by name-n")
@pytest.mark.parametrize("new", ["new", "odd", "row", "s"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("small", [True, False], ids=["small pages", "default"])
def test_it_equals_a_new_state(option, new, small):
    paging = SMALL_PAGES if small else {}
    tx = adamw(**OPTIONS[option], **paging)
    joined(tx, params_of(option), new)


lion = functools.partial(po.paged_lion_8bit, 1e-2, **SMALL_PAGES)
WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx, optax.scale(0.5)),
    "multi steps": lambda tx: po.MultiSteps(tx, 2),
    "finite": lambda tx: po.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, lambda x: {name: name != "s" for name in x}),
    "partition": lambda tx: optax.partition(
        {"first": tx, "lion": lion()},
        lambda x: {name: "first" if name < "o" else "lion" for name in x},
    ),
    # A label that a parameter's size decides.
    "by size": lambda tx: optax.partition(
        {"first": tx, "lion": lion()},
        lambda x: jax.tree.map(lambda x: "first" if x.size > 4500 else "lion", x),
    ),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=0.5),
}


@pytest.mark.quick("dynamic_int8-new", "by size-dynamic_int4-odd")
@pytest.mark.parametrize("new", ["new", "odd"])
@pytest.mark.parametrize("option", ["dynamic_int8", "dynamic_int4", "masters in codes"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_other_transformations(wrapper, option, new):
    tx = WRAPPERS[wrapper](adamw(**OPTIONS[option], **SMALL_PAGES))
    joined(tx, params_of(option), new)


SPECS = {
    "rows": PartitionSpec("x"),
    "columns": PartitionSpec(None, "x"),
    "whole": PartitionSpec(),
}


@pytest.mark.quick("dynamic_int8-rows", "explicit-remainders in codes-columns")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("option", ["dynamic_int8", "dynamic_int4", *MASTERS])
@pytest.mark.parametrize("axes", ["auto", "explicit", "shardings"])
def test_on_a_mesh(axes, option, spec):
    """Divided as its parameter is, whichever way that is said."""
    kind = AxisType.Explicit if axes == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind, kind), devices=jax.devices()[:4])
    shapes = {"a": (64, 512), "new": (72, 1024), "b": (64, 256)}
    sharding = NamedSharding(mesh, SPECS[spec])
    params = jax.device_put(params_of(option, shapes), sharding)
    said = {"shardings": SPECS[spec]} if axes == "shardings" else {}
    tx = adamw(**OPTIONS[option], **SMALL_PAGES, **said)
    with jax.set_mesh(mesh):
        found = joined(tx, params, "new")
        fresh = tx.init(params)
    for (path, x), (_, wanted) in zip(flat(found), flat(fresh), strict=True):
        same = x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
        assert same or not x.ndim, path


@pytest.mark.quick("int8", "remainders in")
@pytest.mark.parametrize("option", ["dynamic_int8", "dynamic_int4", *MASTERS])
def test_in_an_nnx_state(option):
    """Also one that an `nnx.Optimizer` has trained; its containers remain."""
    params = nnx.State({name: nnx.Param(x) for name, x in params_of(option).items()})
    less = nnx.State({name: x for name, x in params.items() if name != "new"})
    tx = adamw(**OPTIONS[option], **SMALL_PAGES)
    _, state = tx.update(less, tx.init(less), less)
    fresh = tx.init(params)
    found = po.init_param(tx, state, params, "new")
    assert_joined(found, state, fresh)
    _, after = tx.update(params, found, params)
    again = po.init_param(tx, after, params, "new/value")
    chex.assert_trees_all_equal(po.page_in(again, "new"), po.page_in(fresh, "new"))
    chex.assert_trees_all_equal(po.page_in(again, "odd"), po.page_in(after, "odd"))


def test_an_nnx_state_and_plain_parameters():
    """A moment is the same in Flax's variables or not."""
    tx = adamw(codec="dynamic_int8", **SMALL_PAGES)
    boxed = nnx.State({name: nnx.Param(x) for name, x in params_of("codec").items()})
    plain = nnx.to_pure_dict(boxed)
    for before, after in ((boxed, plain), (plain, boxed)):
        state = tx.init({name: x for name, x in before.items() if name != "new"})
        found = po.init_param(tx, state, after, "new")
        assert_joined(found, (), tx.init(after))


@pytest.mark.parametrize("option", ["dynamic_int8", "by moment", "masters"])
def test_within_jit(option):
    params = params_of(option)
    less = {name: x for name, x in params.items() if name != "new"}
    tx = adamw(**OPTIONS[option], **SMALL_PAGES)
    state = tx.init(less)
    join = jax.jit(lambda state, params: po.init_param(tx, state, params, "new"))
    found = join(state, params)
    assert_joined(found, (), tx.init(params))
    with pytest.raises(ValueError, match=r"'a' is .* and .* in that of tx"):
        join(state, params | {"a": jnp.ones((64, 64), params["a"].dtype)})


def test_a_state_of_another_codec_is_refused():
    params = params_of("codec")
    tx, other = (adamw(codec=codec, **SMALL_PAGES) for codec in ("dynamic_int8", None))
    with pytest.raises(
        ValueError, match=r"'a' is float32.* in the state, and .*transform"
    ):
        po.init_param(tx, other.init(params), params, "new")
    found = po.init_param(tx, tx.init(params), params | {"new": params["a"]}, "new")
    assert_joined(found, (), tx.init(params | {"new": params["a"]}))
