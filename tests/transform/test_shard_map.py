"""`init` and `update` within a `jax.shard_map` whose varying axes JAX checks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import reference
from helpers.meshes import divided

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
#: Divided along rows, along columns, along both, along neither; few values a part.
SHAPES = {"w": (64, 128), "c": (40, 512), "both": (64, 96), "r": (33, 65), "v": (64,)}
SPECS = {"w": P("x"), "c": P(None, "y"), "both": P("x", "y"), "r": P(), "v": P("x")}
PAGES: Any = {"page_size": 4096, "min_paged_size": 0}
adamw = functools.partial(optax.adamw, 1e-2)


def trees(axis_type, shapes, specs, dtype=jnp.float32):
    """A mesh, parameters and gradients."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    arrays = (reference.arrays(dtype, seed, shapes) for seed in (0, 1))
    return mesh, *(divided(x, mesh, specs) for x in arrays)


def specs_of(tree):
    return jax.tree.map(lambda x: getattr(x.sharding, "spec", P()), tree)


def train(tx, axis_type=AUTO, *, jit=True, within=False, steps=2, manual="xy", **given):
    """Parameters and state after some steps, and where its arrays were and are."""
    specs = given.get("specs", SPECS)
    shapes = {name: given.get("shapes", SHAPES)[name] for name in specs}
    dtype = given.get("dtype", jnp.float32)
    mesh, params, gradients = trees(axis_type, shapes, specs, dtype)
    compiled = jax.jit if jit else lambda function: function
    divide = functools.partial(jax.shard_map, mesh=mesh, axis_names=set(manual))

    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(params)
        own = specs_of(state)
        if within:
            init = divide(tx.init, in_specs=(specs,), out_specs=own)
            state = compiled(init)(params)
        before = kinds(state)
        ins, outs = (specs, own, specs), (specs, own)
        if manual:
            step = divide(step, in_specs=ins, out_specs=outs)
        for _ in range(steps):
            params, state = compiled(step)(gradients, state, params)
    return jax.device_get((params, state)), before, kinds(state)


def kinds(state):
    return [x.sharding.memory_kind for x in jax.tree.leaves(state)]


def assert_as_optax(tx, plain, *, counts=True, **how):
    found, before, after = train(tx, **how)
    wanted, *_ = train(plain, **how)
    moments = lambda tree: [x for x in jax.tree.leaves(tree) if counts or x.ndim]
    reference.assert_equal(moments(found[1]), moments(wanted[1]))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
        found[0],
        wanted[0],
    )
    assert before == after
    return after


CASES: Any = {
    "adamw": (adamw, {}),
    "whole pages": (adamw, {"page_size": "16MiB"}),
    "resident": (adamw, {"device_budget": None}),
    "own steps": (adamw, {"per_parameter_steps": True}),
    "lion": (lambda: optax.lion(1e-2), {}),
    "lamb": (lambda: optax.lamb(1e-2), {}),
    "muon": (lambda: optax.contrib.muon(1e-2), {}),
    "schedule": (lambda: optax.adamw(optax.linear_schedule(1e-2, 0, 5)), {}),
    "settings": (lambda: optax.inject_hyperparams(optax.adamw)(1e-2), {}),
}


@pytest.mark.quick("adamw", "muon")
@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    inner, settings = CASES[case]
    tx = po.paged(inner(), **{**PAGES, **settings})
    after = assert_as_optax(tx, inner(), counts="steps" not in case)
    assert ("pinned_host" in after) == (case != "resident")


@pytest.mark.quick("inside")
@pytest.mark.parametrize(
    "how",
    [
        {"within": True},
        {"axis_type": EXPLICIT},
        {"manual": "x", "axis_type": EXPLICIT, "specs": {"w": P("x"), "r": P()}},
        {"manual": "x", "specs": {"w": P("x"), "r": P()}},
    ],
    ids=["inside", "explicit", "some explicit", "some"],
)
def test_ways_of_dividing(how):
    """`init` inside too; explicit axes; over some axes of the mesh alone."""
    assert "pinned_host" in assert_as_optax(po.paged(adamw(), **PAGES), adamw(), **how)


def test_eager():
    """JAX returns from it in device memory; the next update says so."""
    how = {"jit": False, "specs": {"w": P("x")}, "steps": 1}
    found, *_ = train(po.paged(adamw(), **PAGES), **how)
    wanted, *_ = train(adamw(), **how)
    reference.assert_equal(found[1], wanted[1])
    with pytest.warns(UserWarning, match="are in device memory"):
        train(po.paged(adamw(), **PAGES), **{**how, "steps": 2})


@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
@pytest.mark.quick("multi")
@pytest.mark.parametrize("name", ["multi", "partition", "masked"])
def test_around(name):
    paged = lambda inner: po.paged(inner, **PAGES)
    build = {
        "multi": lambda of: optax.MultiSteps(of(adamw()), 2).gradient_transformation(),
        "partition": lambda of: optax.partition(
            {"a": of(adamw()), "b": of(optax.lion(1e-3))}, {"w": "a", "r": "b"}
        ),
        "masked": lambda of: optax.masked(of(adamw()), {"w": True, "r": False}),
    }[name]
    how = {"specs": {"w": P("x"), "r": P()}}
    assert_as_optax(build(paged), build(lambda inner: inner), **how)


@pytest.mark.parametrize(
    "kept", [{"master_dtype": "float32"}, {"master_remainders": True}], ids=str
)
def test_masters(kept):
    """As without a `shard_map`, bit for bit."""
    build = lambda: po.paged(adamw(), **PAGES, **kept)
    found, before, after = train(build(), dtype=jnp.bfloat16)
    reference.assert_equal(found, train(build(), dtype=jnp.bfloat16, manual="")[0])
    assert before == after


#: Blocks are rows, or run on; scales have a row for each part; codes share words along
#: another axis than they would if a part were all.
CODED: Any = {
    "rows": ((64, 128), P("x")),
    "both": ((64, 128), P("x", "y")),
    "columns": ((64, 1024), P(None, ("x", "y"))),
    "stack": ((4, 64, 65), P("x")),
    "words": ((64, 64), P(None, "x")),
}


@pytest.mark.quick("dynamic_int8-AxisType.Auto")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize(
    "codec", ["dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16"]
)
def test_codecs(codec, axis_type):
    """As without a `shard_map`, also where a part has too few values to be coded."""
    build = lambda: po.paged(adamw(), codec=codec, **PAGES)
    shapes, specs = ({k: x[n] for k, x in CODED.items()} for n in (0, 1))
    how = {"shapes": shapes, "specs": specs, "axis_type": axis_type}
    found, before, after = train(build(), **how)
    wanted, *_ = train(build(), manual="", **how)
    reference.assert_equal(found[1], wanted[1])
    jax.tree.map(np.testing.assert_array_equal, found[0], wanted[0])
    assert before == after


def test_noise_of_parts():
    """Equal parts are rounded by bits of their own, and copies of one part alike."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO,) * 2)
    tx = po.paged(adamw(), codec="bfloat16_stochastic", **PAGES)
    params = jax.device_put(
        {"w": jnp.full((64, 128), 0.3)}, NamedSharding(mesh, P("x"))
    )
    state = tx.init(params)
    own = specs_of(state)
    step = lambda p, s: tx.update(p, s, p)[1]
    step = jax.shard_map(step, mesh=mesh, in_specs=({"w": P("x")}, own), out_specs=own)
    new = optax.tree.get(jax.jit(step)(params, state), "mu")["w"]
    parts = np.split(np.float32(new), 4)
    for i, one in enumerate(parts):
        assert len(np.unique(one)) > 1
        assert all(0.2 < (one != other).mean() < 0.8 for other in parts[:i])
    copies = {}
    for shard in new.addressable_shards:
        copies.setdefault(shard.index[0].start, []).append(np.float32(shard.data))
    for first, second in copies.values():
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("device_budget", [0, None])
def test_moments_that_begin_alike(device_budget):
    """A moment that all devices share takes in gradients that differ."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AUTO,))
    whole = NamedSharding(mesh, P())

    def step(tx, gradients):
        state = tx.init(jax.device_put({"w": jnp.zeros((64, 64))}, whole))
        update = lambda g, s: tx.update(g, s)
        own = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
        ins, outs = (P("x"), P()), ({"w": P("x")}, own)
        update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=outs)
        return jax.jit(update)(gradients, state)

    gradients = {"w": jnp.linspace(0, 1, 512 * 64).reshape(512, 64)}
    gradients = jax.device_put(gradients, whole)
    inner = optax.trace(0.9)
    tx = po.paged(inner, **PAGES, device_budget=device_budget)
    reference.assert_equal(step(tx, gradients), step(inner, gradients))


@pytest.mark.parametrize("device_budget", [0, None])
def test_gates_that_differ_between_devices(device_budget):
    """Each device skips its own part, or its copy; what is open stays alike on all."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AUTO,))
    specs = {"parts": P("x"), "copies": P(), "open": P()}
    shapes = {"parts": (64, 64), "copies": (9, 65), "open": (9, 65)}
    gradients = divided(reference.arrays(jnp.float32, 0, shapes), mesh, specs)
    tx = po.paged(optax.trace(0.9), **PAGES, device_budget=device_budget)
    state = tx.init(gradients)

    def update(gradients, state):
        even = jax.lax.axis_index("x") % 2 == 0
        active = {"parts": even, "copies": even, "open": True}
        updates, state = tx.update(gradients, state, active=active)
        for found in (updates, state.trace):
            axes = {k: jax.typeof(x).manual_axis_type.varying for k, x in found.items()}
            assert axes == {"parts": {"x"}, "copies": {"x"}, "open": set()}
        return updates, state

    ins = specs, specs_of(state)
    outs = jax.tree.map(lambda spec: spec, ins)
    for tree in (outs[0], outs[1].trace):
        tree["copies"] = P("x")
    update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=outs)
    updates, new = jax.jit(update)(gradients, state)
    even = lambda rows: np.repeat(np.arange(8) % 2 == 0, rows)[:, None]
    copies = np.tile(gradients["copies"], (8, 1))
    for found in (updates, new.trace):
        parts = np.where(even(8), gradients["parts"], 0)
        np.testing.assert_array_equal(found["parts"], parts)
        np.testing.assert_array_equal(found["copies"], np.where(even(9), copies, 0))
        np.testing.assert_array_equal(found["open"], gradients["open"])


def counting():
    """Moments that no gradient enters."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"count": jnp.zeros((), jnp.int32), "m": zeros}

    def update(updates, state, params=None):
        count = state["count"] + 1
        moments = jax.tree.map(
            lambda x: jnp.full_like(x, 1.0) * count.astype(x.dtype), state["m"]
        )
        return updates, {"count": count, "m": moments}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("codec", ["dynamic_int8", "bfloat16"])
def test_moments_of_no_gradient(codec):
    """They are stored as any other, and vary over the mesh as what they replace."""
    tx = po.paged(counting(), codec=codec, **PAGES)
    how = {"specs": {"w": P("x", "y")}, "shapes": {"w": (64, 128)}}
    (_, found), before, after = train(tx, **how)
    assert before == after
    (_, wanted), *_ = train(tx, **how, manual="")
    reference.assert_equal(found, wanted)
