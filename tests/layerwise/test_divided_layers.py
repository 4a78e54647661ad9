"""Stacks of layers on several devices: the axis that is divided, and what is told."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import paged_optax as po

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TOLD = r"params\['layers'\]\['w'\] of shape \(8, 64, 64\) is divided along its layers"
PAGED = {"page_size": "4KiB", "min_paged_size": 0}


def mesh_of(axis_type=AUTO):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


def model():
    return po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda w, x, context, i: (x + jnp.tanh(x @ w["w"]), None),
        lambda rest, x, kept, batch: jnp.mean(x**2),
    )


def divided(spec, axis_type=AUTO):
    """Parameters, and a batch."""
    mesh = mesh_of(axis_type)
    w = np.full((8, 64, 64), 0.01, np.float32)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    batch = place(np.ones((8, 64), np.float32), P("x"))
    return {"layers": {"w": place(w, spec)}}, batch


def told(call):
    """What a call is warned of, of layers that are divided."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    messages = [str(each.message) for each in caught]
    return [text for text in messages if "divided along its layers" in text]


def compiled(tx, params, batch, how, init=None):
    """Compiles a step: by `jit_step`, `jax.jit`, or not at all."""
    args = (
        params,
        (init or tx.init)(params),
        po.GradientWorkspace.allocate(params["layers"]),
    )
    step = po.layerwise_step(model(), tx)
    if how == "jit_step":
        return po.jit_step(step, *args, batch, donate_argnums=(0, 1, 2))
    if how == "jit":
        return jax.jit(step).lower(*args, batch)
    return step(*args, batch)


# -- fully_sharded ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((512, 64, 64), P(None, "x")),
        ((512, 64), P(None, "x")),
        ((512, 3, 5), P()),
        ((512,), P()),
    ],
)
def test_the_axis_of_the_layers_stays_whole(shape, spec):
    params = {"layers": {"w": jnp.zeros(shape)}, "rest": jnp.zeros((512, 64))}
    found = po.fully_sharded(params, mesh_of())
    assert found["layers"]["w"].spec == spec
    assert found["rest"].spec == P("x")


def test_layers_under_another_key():
    params = {"blocks": {"w": jnp.zeros((512, 64, 64))}}
    assert po.fully_sharded(params, mesh_of())["blocks"]["w"].spec == P("x")
    found = po.fully_sharded(params, mesh_of(), layers="blocks")
    assert found["blocks"]["w"].spec == P(None, "x")


@pytest.mark.parametrize("kind", [list, lambda x: dict(enumerate(x))])
def test_layers_one_by_one_have_no_such_axis(kind):
    params = {"layers": kind([{"w": jnp.zeros((512, 64))}] * 2)}
    assert po.fully_sharded(params, mesh_of())["layers"][0]["w"].spec == P("x")


def test_two_axes_of_a_mesh():
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    params = {"layers": {"w": jnp.zeros((512, 8, 6))}}
    assert po.fully_sharded(params, mesh)["layers"]["w"].spec == P(None, "x", "y")


def test_a_plan_divides_likewise():
    params = {"layers": {"w": jax.ShapeDtypeStruct((512, 64, 3), jnp.float32)}}
    plan = po.plan(po.paged_adamw(1e-3, **PAGED), params, mesh=mesh_of())
    assert {x.shape for x in plan.moments if len(x.shape) == 3} == {(512, 8, 3)}


# -- layerwise_step -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["jit_step", "jit", "eager"])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
def test_layers_that_are_divided_are_told(how, axis_type):
    params, batch = divided(P("x"), axis_type)
    with jax.set_mesh(mesh_of(axis_type)):
        found = told(lambda: compiled(po.paged_adamw(1e-3), params, batch, how))
    assert len(found) == 1
    assert re.match(TOLD, found[0])
    for word in (str(P("x")), "{'x': 8}", "paged_optax.fully_sharded(params, mesh)"):
        assert word in found[0]


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("spec", [P(None, "x"), P()], ids=str)
def test_nothing_is_told_of_other_axes(spec, axis_type):
    """And no stack is gathered."""
    params, batch = divided(spec, axis_type)
    with jax.set_mesh(mesh_of(axis_type)), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*divided along its layers")
        step = compiled(po.paged_adamw(1e-3), params, batch, "jit_step")
    assert not re.findall(r"= f32\[8,\S+? all-gather\(", step.compiled.as_text())


def test_once():
    """Of a step, whatever it is compiled for."""
    params, batch = divided(P("x"))
    tx = po.paged_adamw(1e-3)
    args = params, tx.init(params), po.GradientWorkspace.allocate(params["layers"])
    step = po.layerwise_step(model(), tx)
    assert len(told(lambda: jax.jit(step).lower(*args, batch))) == 1
    assert told(lambda: jax.jit(step).lower(*args, batch[:4])) == []


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.masked(tx, True),
        lambda tx: optax.partition({"a": tx}, "a"),
    ],
    ids=["alone", "chain", "masked", "partition"],
)
def test_what_init_saw_is_told_in_a_jit_of_shapes(wrapped):
    """Where neither types nor arrays say how parameters are divided."""
    params, batch = divided(P("x"))
    tx = wrapped(po.paged_adamw(1e-3, **PAGED))
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = jax.eval_shape(tx.init, jax.tree.map(plain, params))
    tx.init(params)
    workspace = po.GradientWorkspace.allocate(jax.tree.map(plain, params)["layers"])
    args = jax.tree.map(plain, (params, state, workspace, batch))
    step = po.layerwise_step(model(), tx)
    assert len(told(lambda: jax.eval_shape(step, *args))) == 1


def test_a_transformation_that_pages_nothing():
    params, batch = divided(P("x"))
    tx = optax.adamw(1e-3)
    found = told(lambda: compiled(tx, params, batch, "jit_step", jax.jit(tx.init)))
    assert len(found) == 1


def test_frozen_layers():
    mesh = mesh_of()
    place = NamedSharding(mesh, P("x"))
    base = {"layers": {"k": jax.device_put(np.ones((8, 64, 64), np.float32), place)}}
    params, batch = divided(P(None, "x"))
    frozen = po.LayerwiseModel(
        lambda rest, fixed, batch: (batch, None),
        lambda w, fixed, x, c, i: (x + jnp.tanh(x @ w["w"] @ fixed["k"]), None),
        lambda rest, fixed, x, kept, batch: jnp.mean(x**2),
    )
    tx = po.paged_adamw(1e-3)
    step = po.layerwise_step(frozen, tx)
    workspace = frozen.workspace(params)
    args = params, tx.init(params), workspace, batch, base
    (found,) = told(lambda: po.jit_step(step, *args, donate_argnums=(0, 1, 2)))
    assert found.startswith("frozen['layers']['k'] of shape (8, 64, 64) is divided")


def test_what_is_no_stack_of_layers():
    """Modules under the key, one width long each, are divided as all else."""
    params = {"layers": {"norm": {"scale": (1024,)}, "dense": {"kernel": (1024, 7)}}}
    params = jax.tree.map(jnp.ones, params, is_leaf=lambda x: isinstance(x, tuple))
    mesh = jax.make_mesh((8,), ("x",))
    found = jax.tree.leaves(po.fully_sharded(params, mesh))
    assert {x.spec for x in found} == {P("x")}
