"""Flax's `optimizer_sharding`: moments divided otherwise than their parameters."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers.meshes import mesh_of

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
PAGES: Any = {"page_size": 4096, "min_paged_size": 0}
INPUTS = jax.random.normal(jax.random.key(0), (16, 64))
ROWS, COLUMNS = P("x", None), P(None, "x")


class Layer(nnx.Module):
    """A matrix, divided as the metadata says, and a bias of few values."""

    def __init__(self, metadata):
        weights = jnp.linspace(-1, 1, 64 * 128).reshape(64, 128)
        self.kernel = nnx.Param(weights, **metadata)
        self.bias = nnx.Param(jnp.zeros(128), optimizer_sharding=("x",))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


def arrays_of(state):
    """The moments and what codecs store of them, without counts."""
    return [x for x in jax.tree.leaves(nnx.as_pure(state)) if x.ndim]


def places(state):
    """The shape of each device's part, and its memory."""
    local = lambda x: x.sharding.shard_shape(x.shape)
    return [(local(x), x.sharding.memory_kind) for x in arrays_of(state)]


def train(tx, metadata, *, jit=True, jit_init=False, steps=3):
    """The kernel, its optimizer, and where moments were and are."""

    def make():
        model = Layer(metadata)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer):
        loss = lambda model: jnp.mean((model(INPUTS) - 1) ** 2)
        optimizer.update(model, nnx.grad(loss)(model))

    model, optimizer = (nnx.jit(make) if jit_init else make)()
    before = places(optimizer.opt_state)
    step = nnx.jit(step) if jit else step
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer, before, places(optimizer.opt_state)


METADATA = {
    "whole": {"optimizer_sharding": tuple(ROWS)},
    "said to be whole": {
        "out_sharding": (None, None),
        "optimizer_sharding": tuple(ROWS),
    },
    "otherwise": {"out_sharding": tuple(ROWS), "optimizer_sharding": tuple(COLUMNS)},
}
HOW = {"jit": {}, "eager": {"jit": False}, "jit init": {"jit_init": True}}


@pytest.mark.quick("jit-whole-Axis", "jit-otherwise-AxisType.Auto")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("how", HOW)
def test_numbers_and_places(how, metadata, axis_type):
    """Optax's numbers; moments are divided as Optax's, and on the host."""
    told = METADATA[metadata]
    with jax.set_mesh(mesh_of(axis_type)):
        tx = po.paged_adamw(1e-2, **PAGES)
        model, optimizer, before, after = train(tx, told, **HOW[how])
        target = po.abstract_state(tx, nnx.state(model, nnx.Param))
        assert places(target) == before == after
        assert {kind for _, kind in after} == {"pinned_host"}
        local = lambda places: [shape for shape, _ in places]
        if metadata == "otherwise" and axis_type is EXPLICIT:
            # Optax refuses to add what is divided along different axes.
            assert local(after) == [(16,), (64, 16)] * 2
            return
        plain, theirs, wanted, _ = train(optax.adamw(1e-2), told, **HOW[how])
    assert local(before) == local(wanted)
    for found, other in ((model, plain), (optimizer.opt_state, theirs.opt_state)):
        for x, y in zip(
            jax.tree.leaves(nnx.as_pure(nnx.state(found))),
            jax.tree.leaves(nnx.as_pure(nnx.state(other))),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


CASES: Any = {
    "dynamic_int8": {"codec": "dynamic_int8"},
    "dynamic_int4": {"codec": "dynamic_int4"},
    "float8_e4m3": {"codec": "float8_e4m3"},
    "bfloat16": {"codec": "bfloat16"},
    "masters": {"master_dtype": "float32"},
    "resident": {"device_budget": None},
    "small": {"min_paged_size": "1MiB"},
    "lamb": {},
}


EXACT = ("masters", "resident", "small", "lamb")


@pytest.mark.quick("dynamic_int8-AxisType.Auto", "lamb-AxisType.Auto")
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_settings(case, axis_type):
    """What takes a moment's place is divided likewise, and the numbers are the same."""
    inner = optax.lamb if case == "lamb" else optax.adamw
    build = lambda: po.paged(inner(1e-2), **{**PAGES, **CASES[case]})
    told = METADATA["otherwise"]
    with jax.set_mesh(mesh_of(axis_type)):
        model, optimizer, before, after = train(build(), told)
        target = po.abstract_state(build(), nnx.state(model, nnx.Param))
        assert places(target) == before == after
    for x, (local, kind) in zip(arrays_of(optimizer.opt_state), after, strict=True):
        assert np.prod(local) * 8 == x.size
        assert kind == ("device" if case in ("resident", "small") else "pinned_host")
    with jax.set_mesh(mesh_of(axis_type)):
        # Parameters and moments divided alike have blocks of the same values.
        alike = {"out_sharding": tuple(COLUMNS)}
        other, *_ = train(build(), alike)
    # A gradient's last bit may change how a moment is rounded.
    np.testing.assert_allclose(
        model.kernel[...],
        other.kernel[...],
        rtol=0,
        atol=1e-5 if case in EXACT else 2e-4,
    )


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
def test_places_of_a_restore(codec, axis_type):
    """`place_state` and `state_shardings` of another process divide as `init` did."""
    told = METADATA["whole"]
    build = lambda: po.paged_adamw(1e-2, codec=codec, **PAGES)
    with jax.set_mesh(mesh := mesh_of(axis_type)):
        model, optimizer, _, wanted = train(build(), told, steps=1)
        params = nnx.state(Layer(told), nnx.Param)
        read = jax.tree.map(np.asarray, nnx.as_pure(optimizer.opt_state))
        tx = build()
        placed = po.place_state(tx, read, params)
        assert places(placed) == wanted
        # The parameters without their variables, as `update` is given them.
        assert places(po.place_state(tx, read, nnx.as_pure(params))) == wanted
        shardings = jax.sharding.NamedSharding(mesh, P())
        found = po.state_shardings(build(), params, shardings)
        arrays = [x for x in jax.tree.leaves(nnx.as_pure(read)) if x.ndim]
        each = [
            x
            for x in jax.tree.leaves(found)
            if len(x.spec) or x.memory_kind == "pinned_host"
        ]
        assert [
            (x.shard_shape(y.shape), x.memory_kind)
            for x, y in zip(each, arrays, strict=True)
        ] == wanted
        pure = nnx.as_pure(params)
        updates, new = jax.jit(tx.update)(pure, nnx.as_pure(placed), pure)
        assert places(new) == wanted


def test_programs_without_gathers():
    """A restored state's moments are updated by the devices that hold them."""
    told = METADATA["whole"]
    with jax.set_mesh(mesh_of(AUTO)):
        tx = po.paged_adamw(1e-2, **PAGES)
        params = nnx.state(Layer(told), nnx.Param)
        state = nnx.as_pure(
            po.place_state(tx, po.paged_adamw(1e-2).init(params), params)
        )
        params = nnx.as_pure(params)
        compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert not po.memory_report(compiled).unsharded


def test_what_cannot_be_divided_so():
    uneven = {"optimizer_sharding": (None, "x")}
    tx = po.paged_adamw(1e-2, **PAGES)
    with jax.set_mesh(mesh_of(AUTO)):
        params = {"w": nnx.Param(jnp.ones((64, 100)), **uneven)}
        with pytest.raises(ValueError, match=r"optimizer_sharding has .*evenly"):
            tx.init(params)
        tx.init({"w": nnx.Param(jnp.ones((64, 128)), **uneven)})
        otherwise = {"w": nnx.Param(jnp.ones((64, 128)), optimizer_sharding=("x",))}
        with pytest.raises(ValueError, match=r"parameter .* earlier init"):
            tx.init(otherwise)
    with pytest.raises(ValueError, match=r"optimizer_sharding=.*set_mesh"):
        tx.init({"w": nnx.Param(jnp.ones((64, 100)), **uneven)})


def test_factors_are_not_divided_without_a_word():
    """Adafactor's have other axes than the parameter, which the metadata is of."""
    told = {"optimizer_sharding": ("x", None)}
    with jax.set_mesh(mesh_of(AUTO)):
        params = {"w": nnx.Param(jnp.ones((64, 128)), **told)}
        tx = po.paged_adafactor(1e-2, min_dim_size_to_factor=8, **PAGES)
        with pytest.warns(UserWarning, match="optimizer_sharding"):
            tx.init(params)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            po.abstract_state(tx, params)
