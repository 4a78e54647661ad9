"""Meshes of explicit axes: what a layerwise step gathers, and which models run."""

import re
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import stacked

PAGED: Any = {"page_size": 1024, "min_paged_size": 0}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
#: Layers in eight bits would be cut through by an eighth of a matrix.
CODED = {"*": None, "embed": "dynamic_int8"}
SPECS = {"embed": P("x"), "layers": {"w": P(None, "x")}}


def mesh_of(axis_type):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


def arrays():
    random = np.random.default_rng(0)
    draw = lambda *shape: np.float32(random.normal(size=shape) / 8)
    return {"embed": draw(512, 64), "layers": {"w": draw(4, 64, 64)}}


def placed(params, mesh, specs):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs
    )


def gathers(compiled):
    return len(re.findall(r" all-gather(?:-start)?\(", compiled.as_text()))


TIED = po.LayerwiseModel(
    lambda rest, batch: (rest["embed"][batch], None),
    lambda weights, x, context, i: (x + jnp.tanh(x @ weights["w"]), None),
    lambda rest, x, kept, batch: jnp.mean((x @ rest["embed"].T) ** 2),
)
HEAD = po.LayerwiseModel(
    lambda rest, batch: (jax.nn.one_hot(batch, 64), None), TIED.layer, TIED.epilogue
)


def injected():
    build = lambda rate: po.paged_adamw(rate, **PAGED)
    return optax.inject_hyperparams(build)(1e-3)


CONFIGURATIONS: Any = {
    "head": {"model": HEAD},
    "tied": {},
    "8 bits": {"tx": lambda: po.paged_adamw(1e-3, codec=CODED, **PAGED)},
    "accumulate": {"accumulate": True},
    "clipped": {"max_norm": 1.0},
    "clipped on the host": {"max_norm": 1.0, "host_dtype": "float32"},
    "deferred": {"max_norm": 1.0, "host_dtype": "float32", "rest": True},
    "layers on the host": {"host": ("layers",)},
    "all on the host": {"host": ("layers", "embed")},
    "all on the host, 8 bits": {
        "host": ("layers", "embed"),
        "tx": lambda: po.paged_adamw(1e-3, codec=CODED, **PAGED),
    },
    "injected": {"tx": injected},
}


def compiled_on(
    axis_type,
    model=TIED,
    tx=lambda: po.paged_adamw(1e-3, **PAGED),
    host=(),
    accumulate=False,
    max_norm=None,
    **workspace,
):
    mesh, tx = mesh_of(axis_type), tx()
    with jax.set_mesh(mesh):
        params = placed(arrays(), mesh, SPECS)
        params |= {key: po.offload(params[key]) for key in host}
        batch = np.arange(32).reshape(2, 16) if accumulate else np.arange(16)
        spec = P(None, "x") if accumulate else P("x")
        step = po.layerwise_step(model, tx, accumulate=accumulate, max_norm=max_norm)
        args = params, tx.init(params), model.workspace(params, **workspace)
        args = *args, jax.device_put(batch, spec)
        return po.jit_step(step, *args, donate_argnums=(0, 1, 2)).compiled


@pytest.mark.quick("tied", "8 bits", "injected")
@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_gathers_of_layerwise_steps(case):
    """As many as on automatic axes; fewer where types alone say how moments divide."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, typed = (
            compiled_on(kind, **CONFIGURATIONS[case]) for kind in (AUTO, EXPLICIT)
        )
    print(case, "auto", gathers(plain), "explicit", gathers(typed))
    whole_plain, whole = (po.memory_report(x).unsharded for x in (plain, typed))
    assert whole <= whole_plain
    assert gathers(typed) <= gathers(plain)
    assert gathers(typed) == gathers(plain) or case == "injected"


def own_model(seen):
    """A model that says itself how things are divided, and keeps the axes it ran on."""

    def prologue(rest, batch):
        seen.append(jax.sharding.get_abstract_mesh().axis_types)
        x = rest["embed"].at[batch].get(out_sharding=P("x"))
        return x, {"scale": jnp.float32(0.5), "key": jax.random.key(0)}

    def layer(weights, x, context, i):
        made = jnp.matmul(x, weights["w"], out_sharding=P("x"))
        assert jax.typeof(made).sharding.spec[0] == "x"
        noise = jax.random.normal(jax.random.fold_in(context["key"], i), (64,))
        made = context["scale"] * jnp.tanh(made + 0.1 * noise)
        return jax.sharding.reshard(x + made, P("x")), {"kept": jnp.mean(x, axis=1)}

    def epilogue(rest, x, kept, batch):
        logits = jnp.einsum("bd,vd->bv", x, rest["embed"], out_sharding=P("x"))
        return jnp.mean(logits**2) + jnp.mean(kept["kept"] ** 2), {"x": x[:, 0]}

    return po.LayerwiseModel(prologue, layer, epilogue)


def by_jax(model, params, batch, several):
    """The loss and the gradients of the model's functions, one after the other."""

    def loss(params, batch):
        rest = {"embed": params["embed"]}
        x, context = model.prologue(rest, batch)
        kept = []
        for i in range(4):
            weights = {"w": params["layers"]["w"][i]}
            x, left = model.layer(weights, x, context, i)
            kept.append(left)
        return model.epilogue(
            rest, x, {"kept": jnp.stack([k["kept"] for k in kept])}, batch
        )

    if not several:
        (value, _), made = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            params, batch
        )
        return value, made
    parts = [
        by_jax(model, params, jax.sharding.reshard(one, P("x")), False) for one in batch
    ]
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


OWN: Any = {
    "plain": {},
    "accumulate": {"accumulate": True},
    "clipped": {"max_norm": 0.1},
    "deferred": {"max_norm": 0.1, "host_dtype": "float32", "rest": True},
    "all on the host": {"host": ("layers", "embed")},
    "gradients on the host": {"host_dtype": "float32", "accumulate": True},
    "activations on the host": {"activations_on_host": True},
}


@pytest.mark.quick("plain", "accumulate")
@pytest.mark.parametrize("case", OWN)
def test_a_model_of_explicit_axes(case):
    """It runs on them, with the numbers of `jax.grad` and Optax."""
    settings, seen = dict(OWN[case]), []
    host = settings.pop("host", ())
    on = {k: settings.pop(k) for k in ("host_dtype", "rest") if k in settings}
    several, mesh = settings.get("accumulate", False), mesh_of(EXPLICIT)
    model, tx = own_model(seen), po.paged_adamw(1e-2, **PAGED)
    with jax.set_mesh(mesh):
        params = placed(arrays(), mesh, SPECS)
        batch = np.arange(64).reshape(2, 32) if several else np.arange(32)
        batch = jax.device_put(batch, P(None, "x") if several else P("x"))
        loss, gradients = by_jax(model, params, batch, several)
        plain = optax.chain(
            optax.clip_by_global_norm(settings.get("max_norm", 1e9)), optax.adamw(1e-2)
        )
        updates, _ = jax.jit(plain.update)(gradients, plain.init(params), params)
        wanted = optax.apply_updates(params, updates)
        seen.clear()
        given = params | {key: po.offload(params[key]) for key in host}
        step = po.layerwise_step(model, tx, **settings)
        args = given, tx.init(given), model.workspace(given, **on), batch
        compiled = po.jit_step(step, *args, donate_argnums=(1, 2))
        assert (EXPLICIT,) in seen
        *new, output = compiled(*args)
        if "rest" in on:
            new = jax.jit(step.finish)(*new)
        if not several:
            value, _ = jax.jit(model.loss)(given, batch)
            np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(output.loss, loss, rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (new[0], wanted)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert jax.typeof(found).sharding.spec == jax.typeof(expected).sharding.spec


def test_a_model_of_explicit_axes_on_one_device():
    """Where a layer is updated beside others, its gradients are made in segments."""
    mesh, tx = jax.make_mesh((1,), ("x",)), po.paged_adamw(1e-2, **PAGED)
    own, batch = own_model([]), jnp.arange(16)

    def layer(weights, x, context, i):
        x, kept = own.layer(weights, x, context, i)
        return jnp.matmul(x, weights["v"], out_sharding=P("x")), kept

    model = po.LayerwiseModel(own.prologue, layer, own.epilogue)
    with jax.set_mesh(mesh):
        given = arrays()
        given["layers"]["v"] = given["layers"]["w"] * 2
        params = jax.device_put(given, NamedSharding(mesh, P()))
        args = params, tx.init(params), model.workspace(params), batch
        *_, output = jax.jit(po.layerwise_step(model, tx))(*args)
        loss, _ = jax.jit(model.loss)(params, batch)
    np.testing.assert_allclose(output.loss, loss, rtol=1e-5)


def test_frozen_parameters_of_a_model_of_explicit_axes():
    """They keep their types too; a weighted loss is one."""
    product = lambda x, w: jnp.matmul(x, w, out_sharding=P("x"))
    model = po.LayerwiseModel(
        lambda rest, fixed, batch: (product(batch, fixed["in"]), None),
        lambda weights, fixed, x, context, i: (
            x + product(product(x, fixed["w"]), weights["w"]),
            None,
        ),
        lambda rest, fixed, x, kept, batch: po.WeightedLoss(
            jnp.sum(product(x, fixed["in"]) ** 2), jnp.float32(16)
        ),
    )
    mesh, tx = mesh_of(EXPLICIT), po.paged_sgd(0.1, **PAGED)
    with jax.set_mesh(mesh):
        given = placed(arrays(), mesh, SPECS)
        params, whole = {"layers": given["layers"]}, given["layers"]["w"]
        fixed = {"in": jax.sharding.reshard(whole[0], P()), "layers": {"w": whole}}
        batch = jax.device_put(np.ones((16, 64), "f"), P("x"))
        args = params, tx.init(params), model.workspace(params), batch, fixed
        *_, output = jax.jit(po.layerwise_step(model, tx))(*args)
    x = np.ones((16, 64)) @ (first := arrays()["layers"]["w"])[0]
    for w in first:
        x = x + x @ w @ w
    np.testing.assert_allclose(output.loss, np.sum((x @ first[0]) ** 2) / 16, rtol=1e-4)


def test_a_model_that_is_ambiguous_on_explicit_axes():
    """It runs on automatic ones, as does one that says nothing of axes."""
    specs = {"embed": P(None, "x"), "layers": {"w": P(None, "x")}}
    mesh, tx = mesh_of(EXPLICIT), po.paged_sgd(0.1, **PAGED)
    with jax.set_mesh(mesh):
        params, batch = placed(arrays(), mesh, specs), jnp.arange(16)
        rest, weights = {"embed": params["embed"]}, {"w": params["layers"]["w"][0]}
        x, _ = TIED.prologue(rest, batch)
        with pytest.raises(Exception, match="out_sharding"):
            TIED.layer(weights, x, None, 0)
        step = po.layerwise_step(TIED, tx)
        args = params, tx.init(params), TIED.workspace(params), batch
        *_, output = jax.jit(step)(*args)
    plain = jax.tree.map(jnp.asarray, arrays())
    wanted = TIED.loss(plain, np.arange(16))
    np.testing.assert_allclose(output.loss, wanted, rtol=1e-5)


def test_a_model_that_runs_on_neither_kind_of_axes():
    """JAX's own error."""
    mesh, tx = mesh_of(EXPLICIT), po.paged_sgd(0.1, **PAGED)
    own = own_model([])
    model = po.LayerwiseModel(own.prologue, own.layer, lambda rest, x, *_: x @ x)
    with jax.set_mesh(mesh):
        params = placed(arrays(), mesh, SPECS)
        args = params, tx.init(params), model.workspace(params), jnp.arange(16)
        with pytest.raises(TypeError, match="dot_general"):
            jax.jit(po.layerwise_step(model, tx)).lower(*args)
        with pytest.raises(TypeError, match="dot_general"):
            jax.jit(model.loss).lower(params, jnp.arange(16))


def test_an_error_of_the_model_is_its_own():
    """Not that of the embedding before it, which says nothing of explicit axes."""

    def layer(weights, x, context, i):
        raise KeyError("mine")

    mesh, tx = mesh_of(EXPLICIT), po.paged_sgd(0.1, **PAGED)
    model = po.LayerwiseModel(
        lambda rest, tokens: (rest["embed"][tokens], None),
        layer,
        lambda rest, x, *_: jnp.mean(x),
    )
    with jax.set_mesh(mesh):
        params = placed(arrays(), mesh, SPECS)
        step = po.layerwise_step(model, tx)
        workspace = po.GradientWorkspace.allocate(params["layers"])
        with pytest.raises(KeyError, match="mine"):
            step(params, tx.init(params), workspace, jnp.arange(16))


def automatic(tx, params):
    """A step that a user has put on automatic axes."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    return jax.jit(
        jax.sharding.auto_axes(
            lambda g, s, p: tx.update(g, s, p)[0], axes=("x",), out_sharding=shardings
        )
    )


def test_an_update_on_automatic_axes_of_ones_own():
    """What `init` saw is known there; of what forgets there is a warning."""
    mesh, tx = mesh_of(EXPLICIT), po.paged_adamw(1e-3, **PAGED)
    with jax.set_mesh(mesh):
        params = placed({"auto": np.ones((512, 64), "f")}, mesh, {"auto": P("x")})
        state = tx.init(params)
        compiled = automatic(tx, params).lower(params, state, params).compile()
        assert gathers(compiled) == 0
        assert not po.memory_report(compiled).unsharded
        wanted, _ = jax.jit(tx.update)(params, state, params)
        found = compiled(params, state, params)
        np.testing.assert_array_equal(found["auto"], wanted["auto"])
        tx = injected()
        with pytest.warns(UserWarning, match=r"\['auto'\].*shardings=") as told:
            automatic(tx, params).lower(params, tx.init(params), params)
        assert len(told) == 1


@pytest.mark.parametrize(
    ("codec", "least"), [(None, "512KiB"), ("dynamic_int8", "256KiB")]
)
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
def test_small_parts_of_large_moments(axis_type, codec, least):
    """A device's part is small, and stays where `init` put it: nothing has moved."""
    mesh = mesh_of(axis_type)
    params = {"embed": jnp.ones((16, 64)), "layers": {"w": jnp.ones((2, 128, 2048))}}
    specs = {"embed": P(), "layers": {"w": P(None, None, "x")}}
    model = po.LayerwiseModel(
        lambda rest, batch: (rest["embed"] @ jnp.ones((64, 128)), None),
        lambda weights, x, context, i: (x + x @ weights["w"] @ weights["w"].T, None),
        lambda rest, x, kept, batch: jnp.mean(x**2),
    )
    with jax.set_mesh(mesh):
        params = placed(params, mesh, specs)
        tx = po.paged_adamw(1e-2, codec=codec, min_paged_size=least, on_moved="raise")
        state = tx.init(params)
        workspace = po.GradientWorkspace.allocate(params["layers"])
        step = jax.jit(po.layerwise_step(model, tx))
        _, state, *_ = step(params, state, workspace, jnp.zeros(()))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state)}
    assert kinds == {"device"}


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((257, 1024), {"codec": "dynamic_int8"}),
        ((264, 512), {"codec": "float8_e4m3"}),
        ((256, 1024), {"codec": "dynamic_int8", "master_remainders": True}),
    ],
    ids=["int8", "fp8", "remainders"],
)
def test_blocks_that_end_with_a_devices_part(shape, settings, deferred):
    """What is outside the layers has parts of no whole blocks: as on automatic axes."""
    dtype = jnp.bfloat16 if "master_remainders" in settings else jnp.float32
    model = po.LayerwiseModel(
        stacked.start,
        stacked.layer,
        lambda rest, x, kept, batch: jnp.mean(x**2) + jnp.mean(rest["embed"] ** 2),
    )

    def trained(axis_type):
        mesh = mesh_of(axis_type)
        key = jax.random.key(0)
        params = {
            "layers": {"w": jax.random.normal(key, (2, 512, 512), dtype) / 64},
            "embed": jax.random.normal(key, shape, dtype) / 64,
        }
        specs = {"layers": {"w": P(None, "x", None)}, "embed": P(None, "x")}
        with jax.set_mesh(mesh):
            params = placed(params, mesh, specs)
            tx = po.paged_adamw(1e-3, min_paged_size=0, **settings)
            state = tx.init(params)
            held = {"host_dtype": dtype, "rest": True} if deferred else {}
            workspace = model.workspace(params, **held)
            step = po.layerwise_step(model, tx)
            batch = jnp.ones((8, 512), dtype)
            for _ in range(2):
                params, state, workspace, _ = jax.jit(step)(
                    params, state, workspace, batch
                )
            return jax.device_get((params, state))

    chex.assert_trees_all_equal(trained(EXPLICIT), trained(AUTO))


def test_parts_of_no_whole_blocks_are_named():
    """64 columns a device: a block of 256 values runs through four of its rows."""
    mesh = mesh_of(AUTO)
    params = {"layers": {"w": jnp.ones((2, 512, 512))}}
    params = placed(params, mesh, {"layers": {"w": P(None, None, "x")}})
    tx = po.paged_adamw_8bit(1e-3, min_paged_size=0)
    model = po.LayerwiseModel(stacked.start, stacked.layer, stacked.finish)
    step, state = jax.jit(po.layerwise_step(model, tx)), tx.init(params)
    with pytest.raises(ValueError, match="8 parts, and a block runs.*another axis"):
        step(params, state, model.workspace(params), jnp.ones((8, 512)))


def test_a_loss_of_explicit_axes_is_not_split():
    """The error is that of the loss, and a note has the way out."""
    product = lambda x, w: jnp.matmul(x, w, out_sharding=P("x"))
    loss = lambda layers, x: jnp.mean(product(product(x, layers[0]), layers[1]))
    with jax.set_mesh(mesh_of(EXPLICIT)):
        with pytest.raises(ValueError, match="mesh context") as raised:
            po.split_layers(loss, [jnp.ones((8, 8))] * 2, jnp.ones((8, 8)))
    assert "LayerwiseModel" in "".join(raised.value.__notes__)
