"""How parameters are divided: in `nnx.jit`, after a restart, and on other meshes."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import reference

PAGED: Any = {"page_size": 4096, "min_paged_size": 0}
CODECS = [None, "dynamic_int8"]


def mesh_of(sizes, names=("x",), first=0):
    devices = np.array(jax.devices()[first : first + int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), names)


def collectives(compiled):
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return sorted(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


def host_bytes(tree):
    """Bytes in the host memory of one device."""
    return sum(
        x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind == "pinned_host"
    )


def made(tx, told=("x", None), **metadata):
    """A matrix that Flax divides, and its optimizer."""
    values = jnp.linspace(-1, 1, 256 * 128).reshape(256, 128)
    init = nnx.with_partitioning(lambda key, *_: values, told, **metadata)
    options = {"use_bias": False, "rngs": nnx.Rngs(0)}
    model = nnx.Linear(256, 128, kernel_init=init, **options)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def constrained(tx):
    """The same, by the recipe of Flax that divides what is made in a `jit` itself."""
    with nnx.use_eager_sharding(False):
        model, _ = made(tx)
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


RULES = {"told": ("rows", None), "sharding_rules": (("rows", "x"),)}
#: What makes a model, what is around, and whether its mesh is in the metadata.
RECIPES: dict[str, Any] = {
    "set_mesh": (made, jax.set_mesh, {}),
    "rules": (made, jax.set_mesh, RULES),
    "metadata": (made, lambda mesh: contextlib.nullcontext(), {"mesh": None}),
    "with mesh": (constrained, lambda mesh: mesh, {}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("codec", CODECS)
def test_made_inside_nnx_jit(codec, recipe):
    """The host bytes, the collectives and the numbers of what is made outside."""
    mesh = mesh_of(8)
    make, around, metadata = RECIPES[recipe]
    metadata = {**metadata, "mesh": mesh} if "mesh" in metadata else metadata
    build = lambda: po.paged_adamw(1e-2, codec=codec, **PAGED)
    update = lambda m, o, g: o.update(m, g)
    with jax.set_mesh(mesh):
        model, optimizer = made(build())
        gradients = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
        eager = nnx.jit(update).lower(model, optimizer, gradients).compile()
        size = host_bytes(optimizer.opt_state)
        update(model, optimizer, gradients)
    with around(mesh):
        model, inside = nnx.jit(lambda: make(build(), **metadata))()
        assert host_bytes(inside.opt_state) == size
        step = nnx.jit(update)
        compiled = step.lower(model, inside, gradients).compile()
        step(model, inside, gradients)
    assert collectives(compiled) == collectives(eager) == []
    assert host_bytes(inside.opt_state) == size
    assert {x.sharding.spec[0] for x in hosted(inside.opt_state)} == {"x"}
    plain = lambda o: jax.tree.leaves(nnx.as_pure(o.opt_state))
    reference.assert_equal(plain(inside), plain(optimizer))


def hosted(tree):
    found = [
        x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == "pinned_host"
    ]
    assert found
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_described_by_nnx_eval_shape(codec):
    """The metadata of shapes alone; what has fewer axes has none."""
    tx = po.paged_adamw(1e-2, codec=codec, **PAGED)
    with jax.set_mesh(mesh_of(8)):
        model, optimizer = made(tx)
        shapes, described = nnx.eval_shape(lambda: made(tx))
        targets = [
            nnx.state(described).opt_state,
            po.abstract_state(tx, nnx.state(shapes, nnx.Param)),
        ]
    for target in targets:
        found, wanted = map(jax.tree.leaves, (target, optimizer.opt_state))
        assert [x.shape for x in found] == [x.shape for x in wanted]
    spec = lambda x: tuple(x.sharding.spec)[:1]
    placed = [(spec(x), x.sharding.memory_kind) for x in jax.tree.leaves(targets[1])]
    moments = [x for x in jax.tree.leaves(optimizer.opt_state) if x.ndim]
    assert placed[1:] == [(("x",), "pinned_host")] * len(moments)


def test_divided_otherwise_in_the_same_jit():
    """Two models of one transformation, of which a jit could not tell one."""
    tx = po.paged_adamw(1e-2, **PAGED)
    with jax.set_mesh(mesh_of(8)):
        nnx.jit(lambda: made(tx))()
        with pytest.raises(ValueError, match=r"P\(None, 'x'\).*mesh {'x': 8}.*P\('x'"):
            nnx.jit(lambda: made(tx, (None, "x")))()


BUILDS: dict[str, Any] = {
    "float32": lambda: po.paged_adamw(1e-2, **PAGED),
    "8 bits": lambda: po.paged_adamw_8bit(1e-2, **PAGED),
    "masters": lambda: po.paged_adamw(1e-2, master_dtype="float32", **PAGED),
    "remainders": lambda: po.paged_adamw(1e-2, master_remainders=True, **PAGED),
    "injected": lambda: po.paged(optax.inject_hyperparams(optax.adamw)(1e-2), **PAGED),
}
LOW = ("masters", "remainders")


def stepped(tx):
    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


@pytest.mark.parametrize("kind", BUILDS)
def test_restarted(kind):
    """A transformation that ran no `init` adds no collective either."""
    mesh = mesh_of((4, 2), ("x", "y"))
    dtype = jnp.bfloat16 if kind in LOW else jnp.float32
    place = NamedSharding(mesh, P("x", "y"))
    params = {"w": jax.device_put(jnp.ones((256, 2048), dtype), place)}
    tx = BUILDS[kind]()
    state = tx.init(params)
    compiled = stepped(tx).lower(params, state, params).compile()
    assert collectives(compiled) == []
    saved = jax.device_get(state)
    for way in ("place_state", "abstract_state"):
        tx = BUILDS[kind]()
        if way == "place_state":
            again = po.place_state(tx, saved, params)
        else:
            target = po.abstract_state(tx, params)
            again = jax.device_put(saved, jax.tree.map(lambda x: x.sharding, target))
        compiled = stepped(tx).lower(params, again, params).compile()
        assert collectives(compiled) == [], way


#: Meshes, how the parameters are divided, and whether the codec's blocks allow that.
ROWS = P(("x", "y"))
AXES = ("x", "y")
MESHES: dict[str, Any] = {
    "place_state": [
        (mesh_of(8), P("x")),
        (mesh_of((4, 2), AXES), ROWS),
        (mesh_of(4, first=4), P("x")),
        (mesh_of(8), P("x")),
    ],
    "device_put": [
        (mesh_of((8, 1), AXES), ROWS),
        (mesh_of((4, 2), AXES), ROWS),
        (mesh_of((2, 2), AXES, first=4), ROWS),
        (Mesh(mesh_of((8, 1), AXES).devices[::-1], AXES), ROWS),
    ],
}


def moved(way, tx, state, params, mesh):
    if way == "place_state":
        return po.place_state(tx, state, params)
    put = lambda x: jax.device_put(
        x, NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    )
    return jax.tree.map(put, state)


@pytest.mark.parametrize("way", MESHES)
@pytest.mark.parametrize("kind", ["float32", "8 bits", "masters"])
def test_meshes_that_change(kind, way):
    """One transformation on other meshes: the bits of the run that stays on one."""
    dtype = jnp.bfloat16 if kind in LOW else jnp.float32
    values = jnp.linspace(-1, 1, 256 * 128).reshape(256, 128).astype(dtype)
    draw = lambda n: np.random.default_rng(n).normal(size=(256, 128)).astype(dtype)
    on = lambda x, mesh, spec: {"w": jax.device_put(x, NamedSharding(mesh, spec))}
    results = []
    for meshes in (MESHES[way][:1] * 4, MESHES[way]):
        tx = BUILDS[kind]()
        step = stepped(tx)
        params = on(values, *meshes[0])
        state = tx.init(params)
        for i, (mesh, spec) in enumerate(meshes):
            params = on(params["w"], mesh, spec)
            state = moved(way, tx, state, params, mesh)
            for n in range(5):
                gradients = on(draw(5 * i + n), mesh, spec)
                params, state = step(gradients, state, params)
            compiled = step.lower(gradients, state, params).compile()
            assert collectives(compiled) == []
            for x in hosted(state):
                assert x.sharding.mesh == mesh
                assert np.prod(x.sharding.shard_shape(x.shape)) * mesh.size == x.size
        results.append(jax.device_get((params, state)))
    reference.assert_equal(*results)


def test_blocks_that_a_mesh_would_cut():
    """A mesh on which they would run otherwise is refused, with the way out."""
    mesh, tx = mesh_of((4, 2), AXES), po.paged_adamw_8bit(1e-2, **PAGED)
    on = lambda mesh, *axes: {
        "w": jax.device_put(jnp.ones((256, 128)), NamedSharding(mesh, P(*axes)))
    }
    state = tx.init(on(mesh_of(8), "x"))
    with pytest.raises(ValueError, match="divided as they were"):
        po.place_state(tx, state, on(mesh, "x", "y"))


def test_a_second_init_on_other_meshes():
    """Each mesh has its own division; one that differs on the same mesh is refused."""
    tx = po.paged_adamw(1e-2, **PAGED)
    values, given = jnp.ones((64, 128)), []
    for mesh, spec in [
        (mesh_of(8), P("x")),
        (mesh_of(4), P()),
        (mesh_of(4, first=4), P()),
        (mesh_of((4, 2), AXES), P("x", "y")),
    ]:
        params = {"w": jax.device_put(values, NamedSharding(mesh, spec))}
        given.append((params, tx.init(params)))
    for params, state in given:
        compiled = stepped(tx).lower(params, state, params).compile()
        assert collectives(compiled) == []
        assert not po.memory_report(compiled).unsharded
        _, state = stepped(tx)(params, state, params)
        assert (
            state[0]
            .mu["w"]
            .sharding.is_equivalent_to(
                params["w"].sharding.with_memory_kind("pinned_host"), 2
            )
        )
    params = {"w": jax.device_put(values, NamedSharding(mesh_of(4, first=2), P("x")))}
    with pytest.raises(ValueError, match=r"mesh {'x': 4}, and was divided by P\(\)"):
        tx.init(params)


def test_a_state_that_was_moved_unseen():
    """To a mesh of other axes: told of, once, and not taken back."""
    tx, mesh = po.paged_adamw(1e-2, **PAGED), mesh_of((4, 2), ("a", "b"))
    values = {name: jnp.ones((64, 128)) for name in "vw"}
    on = lambda mesh, *axes: jax.device_put(values, NamedSharding(mesh, P(*axes)))
    state, params = tx.init(on(mesh_of(8), "x")), on(mesh, "a", "b")
    where = po.state_shardings(
        po.paged_adamw(1e-2, **PAGED), params, params["w"].sharding
    )
    state = jax.device_put(state, where)
    with pytest.warns(UserWarning, match=r"mesh {'x': 8}.*place_state") as told:
        _, found = stepped(tx)(params, state, params)
    assert len(told) == 1
    assert {x.sharding.mesh for x in hosted(found)} == {mesh}
    state = po.place_state(tx, state, params)
    compiled = stepped(tx).lower(params, state, params).compile()
    assert collectives(compiled) == []
