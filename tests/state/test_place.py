"""States that lost their place, and `place_state`, which puts them back."""

import pickle
import pickletools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import paged_optax as po
from helpers.checkpoints import standard
from helpers.reference import assert_equal
from paged_optax.backend import memory
from paged_optax.backend.memory import on_host

PAGES = {"page_size": 4096, "min_paged_size": 1024}


def params_of(seed=0):
    draw = lambda i, shape: jax.random.normal(jax.random.key(seed + i), shape)
    return {"w": draw(0, (64, 64)), "b": draw(1, (8,))}


def transformation(**options: Any) -> Any:
    return po.paged_adamw(1e-2, **PAGES, **options)


def updated(tx, params) -> Any:
    gradients = jax.tree.map(lambda x: x + 1.0, params)
    return tx.update(gradients, tx.init(params), params)[1]


def device():
    return jax.devices()[0]


def mistyped(x):
    """On the host by its sharding, on the device by its type."""
    if not on_host(x):
        return x
    value, sharding = (
        np.asarray(x),
        SingleDeviceSharding(device(), memory_kind="pinned_host"),
    )
    return jax.make_array_from_callback(x.shape, sharding, lambda i: value[i])


LOSSES = {
    "orbax, concrete": lambda state, path: standard(path, state, state),
    "orbax, no target": lambda state, path: standard(path, state, None),
    "mistyped": lambda state, path: jax.tree.map(mistyped, state),
    "pickle": lambda state, path: pickle.loads(pickle.dumps(state)),
    "device_put": lambda state, path: jax.device_put(
        state, SingleDeviceSharding(device())
    ),
    "out_shardings": lambda state, path: jax.jit(
        lambda state: jax.device_put(state, jax.memory.Space.Device),
        out_shardings=SingleDeviceSharding(device(), memory_kind="device"),
    )(state),
    "device_get": lambda state, path: jax.device_get(state),
    "replicate": lambda state, path: jax.tree.map(
        lambda x: x[0], jax_utils.replicate(state, devices=jax.devices()[:1])
    ),
    "on several devices": lambda state, path: jax.device_put(
        state, NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec())
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_state_is_put_back(loss, tmp_path):
    tx, params = transformation(codec={"nu": "dynamic_int8"}), params_of()
    state = updated(tx, params)
    lost = LOSSES[loss](state, tmp_path)
    types = lambda tree: [(on_host(x), x.committed) for x in jax.tree.leaves(tree)]
    assert not any(
        on_host(x) for x in jax.tree.leaves(lost) if isinstance(x, jax.Array)
    )
    found = po.place_state(tx, lost, params)
    assert_equal(found, state)
    assert types(found) == types(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    again = po.place_state(tx, found, params)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(found), strict=True)
    assert all(x is y for x, y in pairs)


def test_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({"w": params_of()["w"]}, sharding)
    tx = transformation(codec="dynamic_int8")
    state = updated(tx, params)
    found: Any = po.place_state(tx, jax.device_get(state), params)
    assert_equal(found, state)
    assert all(map(on_host, jax.tree.leaves(found[0].mu)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_nnx_optimizer_restored_into_itself(tmp_path):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = transformation(codec="dynamic_int8")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    gradients = nnx.state(model, nnx.Param)
    optimizer.update(model, gradients)
    before = nnx.state(optimizer)
    nnx.update(optimizer, standard(tmp_path, before, before))
    params = nnx.state(model, nnx.Param)
    optimizer.opt_state = nnx.data(po.place_state(tx, optimizer.opt_state, params))
    assert jax.tree.structure(nnx.state(optimizer)) == jax.tree.structure(before)
    assert_equal(nnx.state(optimizer), before)
    update = lambda model, optimizer, gradients: optimizer.update(model, gradients)
    nnx.jit(update, donate_argnums=(0, 1))(model, optimizer, gradients)
    assert not po.is_device_resident(optimizer.opt_state, "kernel")


def test_shapes_get_the_places_of_a_restore():
    """In the state's own containers, as a checkpoint is restored into."""
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    make = lambda: nnx.Optimizer(model, transformation(), wrt=nnx.Param)
    optimizer, shapes = make(), nnx.eval_shape(make)
    params = nnx.state(model, nnx.Param)
    found = po.place_state(optimizer.tx, shapes.opt_state, params)
    assert jax.tree.structure(found) == jax.tree.structure(optimizer.opt_state)
    places = zip(*map(jax.tree.leaves, (found, optimizer.opt_state)), strict=True)
    for x, array in places:
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (array.shape, array.dtype)
        assert x.sharding.memory_kind == array.sharding.memory_kind
        assert x.sharding.is_equivalent_to(array.sharding, array.ndim)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("loss", ["mistyped", "pickle"])
@pytest.mark.parametrize("option", ["warn", "raise"])
def test_update_names_the_way_back(option, loss, jit):
    tx, params = transformation(on_moved=option), params_of()
    lost = LOSSES[loss](tx.init(params), None)
    update = jax.jit(tx.update) if jit else tx.update
    message = r"state\[0\].mu\['w'\].*paged_optax.place_state\(tx, state, params\)"
    if option == "raise":
        with pytest.raises(ValueError, match=message):
            update(params, lost, params)
    else:
        with pytest.warns(UserWarning, match=message):
            update(params, lost, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(params, po.place_state(tx, lost, params), params)


def test_jit_step_names_the_way_back():
    tx, params = transformation(), params_of()

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state: Any = tx.init(params)
    message = r"argument 1\[0\].mu\['w'\].*paged_optax.place_state\(tx, state, params\)"
    with pytest.raises(ValueError, match=message):
        po.jit_step(step, params, LOSSES["mistyped"](state, None))
    with pytest.warns(UserWarning, match="nothing is donated"):
        compiled = po.jit_step(step, params, state)
    with pytest.raises(ValueError, match=message):
        compiled(params, LOSSES["device_put"](state, None))
    compiled(params, state)


@pytest.mark.quick("None")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_what_a_tpu_cannot_page_has_not_lost_its_place(monkeypatch, codec, jit):
    """It stays by decision: `plan` says why, `init` warns, and `update` takes it."""
    monkeypatch.setattr(memory, "platform", lambda: "tpu")
    shape = (1100000,) if codec else (7, 100003)
    tx, params = transformation(on_moved="raise", codec=codec), {"w": jnp.ones(shape)}
    compiled = jax.jit if jit else lambda f: f
    with pytest.warns(UserWarning, match=r"state\[0\].mu\['w'\].*a TPU"):
        state = compiled(tx.init)(params)
    plan = po.plan(tx, params)
    assert [bool(x.refused) for x in plan.moments] == [False, True, True]
    assert str(plan).count("cannot be paged here: a TPU") == 2
    assert not any(map(on_host, jax.tree.leaves(state)))
    compiled(tx.update)(params, state, params)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"codec": "dynamic_int8"}, {"codecs.identity._class_of"}),
        ({"codec": "bfloat16_stochastic"}, {"transform.precision.CountedState"}),
        ({"master_dtype": "float32"}, {"transform.precision.MasterWeightsState"}),
        ({"master_remainders": True}, {"transform.remainders.MasterRemaindersState"}),
        (None, {"layerwise.workspace.GradientWorkspace"}),
    ],
    ids=["codes", "counted", "masters", "remainders", "workspace"],
)
def test_what_pickles_name_keeps_its_name(settings, names):
    """A pickle finds classes by their modules' names, of the commit that wrote it."""
    params = {"w": jnp.ones((2, 64, 64), jnp.bfloat16)}
    if settings is None:
        saved = po.GradientWorkspace.allocate(params)
    else:
        saved = po.paged_adamw(1e-3, **settings).init(params)
    said = [""]
    found = set()
    for operation, argument, _ in pickletools.genops(pickle.dumps(saved, protocol=4)):
        if operation.name == "SHORT_BINUNICODE":
            said.append(argument)
        elif operation.name == "STACK_GLOBAL" and said[-2].startswith("paged_optax."):
            found.add(".".join(said[-2:]).removeprefix("paged_optax."))
    assert found == names
