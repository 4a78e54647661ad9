"""Each device pages its own shard, as the accelerators' compilers have it."""

import collections
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import aot, decoder, schedule, step_model
from helpers.programs import MIB
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX


@pytest.mark.compiler
def test_init_needs_no_device_memory():
    """Each of four H200s makes its part of the moments on the host, page by page."""

    def build(mesh):
        place = NamedSharding(mesh, P("x"), memory_kind="device")
        leaf = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=place)
        params = {f"w{i}": leaf for i in range(4)}
        shardings = jax.tree.map(lambda x: x.sharding, params)
        tx = po.paged_adamw(1e-3, page_size="2MiB", shardings=shardings)
        return jax.jit(lambda params: tx.init(params)), (params,)

    report = aot.h200(build, 4)
    assert report.host_outputs == 2 * 4 * 4096 * 4096 * 4 // 4
    assert report.device_temp + report.device_outputs <= 4 * MIB
    assert report.host_temp == 0
    assert not collectives(report.hlo)


def for_accelerators(x):
    """A CPU's `ShapeDtypeStruct`, with the memory kinds of an accelerator."""
    kind = x.sharding.memory_kind
    sharding = x.sharding.with_memory_kind(kind if kind == "pinned_host" else "device")
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def sharded_update(
    make, spec, shape, names, leaves, axis_type=AxisType.Auto, manual=False
):
    """An update of square leaves for a compiler, and where its arguments are.

    `make` is given the shardings, which no `init` of real arrays has seen. A `manual`
    update divides by itself, in a `jax.shard_map`.
    """

    def build(mesh):
        types = (axis_type,) * len(names)
        mesh = Mesh(mesh.devices.reshape(shape), names, axis_types=types)
        place = NamedSharding(mesh, spec, memory_kind="device")
        leaf = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=place)
        params = {f"w{i:02}": leaf for i in range(leaves)}
        tx = make(jax.tree.map(lambda x: x.sharding, params))
        state = jax.tree.map(for_accelerators, po.abstract_state(tx, params))
        out = jax.tree.map(lambda x: x.sharding, (params, state))
        update = lambda gradients, state, params: tx.update(gradients, state, params)
        if manual:
            own = jax.tree.map(lambda x: x.sharding.spec, state)
            ins, outs = (spec, own, spec), (spec, own)
            update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=outs)
        jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=out)
        return jitted, (params, state, params)

    return build


def collectives(hlo):
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return collections.Counter(re.findall(rf" ({names})(?:-start)?\(", hlo))


@pytest.mark.quick("shape1", "shape4")
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("compile_for", "shape", "spec", "settings", "leaves"),
    [
        (aot.h200, (4,), P("x"), {}, 16),
        (aot.h200, (4,), P("x"), {"axis_type": AxisType.Explicit}, 3),
        (aot.h200, (4,), P(None, "x"), {"codec": "dynamic_int8"}, 3),
        (aot.h200, (4, 2), P("x", "y"), {}, 3),
        (aot.v5e, (4,), P("x"), {}, 16),
        (aot.v5e, (4,), P(), {}, 3),
        (aot.v5e, (2, 2), P("x", "y"), {"codec": "dynamic_int8"}, 3),
    ],
)
def test_scratch_and_collectives(compile_for, shape, spec, settings, leaves):
    """As planned: 12 MiB a device, nothing on the host, no collective of paging."""
    settings = dict(settings)
    axis_type = settings.pop("axis_type", AxisType.Auto)
    names = ("x", "y")[: len(shape)]

    def make(shardings=None):
        return po.paged_adamw(1e-3, page_size="2MiB", shardings=shardings, **settings)

    build = sharded_update(make, spec, shape, names, leaves, axis_type)
    report = compile_for(build, int(np.prod(shape)))
    assert report.device_temp <= 12 * MIB
    assert report.host_temp == 0
    assert report.host_aliased == report.host_arguments
    mesh = jax.sharding.AbstractMesh(shape, names)
    leaf = jax.ShapeDtypeStruct(
        (4096, 4096), jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    plan = po.plan(make(), {f"w{i:02}": leaf for i in range(leaves)})
    assert plan.devices == np.prod(shape)
    assert plan.host_bytes == report.host_arguments
    # XLA:TPU keeps 52 KiB for every transfer in the program, and may keep a page.
    kept = 54 * 2**10 * report.transfers + 2 * MIB if compile_for is aot.v5e else 0
    assert report.device_temp <= plan.scratch_bytes + 1.25 * MIB + kept
    optax_own = lambda shardings: optax.adamw(1e-3)
    unpaged = sharded_update(optax_own, spec, shape, names, 1, axis_type)
    plain = compile_for(unpaged, int(np.prod(shape)))
    assert collectives(report.hlo) == collectives(plain.hlo)
    assert not report.unsharded


AROUND = optax.inject_hyperparams(po.paged_adamw)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "make",
    [
        lambda _: po.paged_adamw(1e-3, page_size="2MiB"),
        lambda shardings: AROUND(1e-3, page_size="2MiB", shardings=shardings),
        lambda _: po.paged(
            optax.inject_hyperparams(optax.adamw)(1e-3), page_size="2MiB"
        ),
    ],
    ids=["restored", "told", "inside"],
)
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e], ids=["h200", "v5e"])
def test_what_abstract_state_has_seen(compile_for, make):
    """Nothing is gathered; of hyperparameters, by the ways out of the next warning."""
    report = compile_for(sharded_update(make, P("x"), (4,), ("x",), 3), 4)
    assert not report.unsharded
    assert not collectives(report.hlo)
    assert report.host_temp == 0
    assert report.device_temp <= 12 * MIB


@pytest.mark.compiler
def test_injected_around():
    """What is made anew at each call learns from `jit_step` alone what is divided."""

    def by_jit_step(mesh):
        jitted, args = build(mesh)
        step = lambda *args: jitted.__wrapped__(*args)
        compiled = lambda: po.jit_step(step, *args, donate_argnums=(0, 1)).compiled
        compiling = types.SimpleNamespace(compile=compiled)
        return types.SimpleNamespace(lower=lambda *args: compiling), args

    build = sharded_update(lambda _: AROUND(1e-3), P("x"), (4,), ("x",), 3)
    report = aot.v5e(by_jit_step, 4)
    assert not report.unsharded
    assert not collectives(report.hlo)
    assert report.host_temp == 0
    assert report.device_temp <= 12 * MIB
    with pytest.warns(UserWarning, match="Compile the step by jit_step"):
        forgotten = aot.v5e(build, 4)
    assert forgotten.unsharded
    assert forgotten.host_temp >= 4 * 4096 * 4096


@pytest.mark.quick("v5e-None")
@pytest.mark.compiler
@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e], ids=["h200", "v5e"])
def test_within_shard_map(compile_for, codec):
    """The bytes of an update that divides by itself."""
    make = lambda _: po.paged_adamw(1e-3, page_size="2MiB", codec=codec)
    build = sharded_update(make, P("x"), (4,), ("x",), 3, manual=True)
    report = compile_for(build, 4)
    assert not collectives(report.hlo)
    assert report.device_temp <= 12 * MIB
    assert report.host_temp == 0
    assert report.host_aliased == report.host_arguments


@pytest.mark.compiler
@pytest.mark.skipif(
    GPU_NEEDS_RAW_INDEX, reason="before jax 0.11.2 XLA:GPU takes pages in turn"
)
@pytest.mark.parametrize(
    ("make", "bound", "over_floor"),
    [
        # Default pages are as large as latency requires, which the floor omits.
        (functools.partial(po.paged_adamw, 1e-3), 32 * MIB, 1.13),
        (functools.partial(po.paged_adamw, 1e-3, page_size="1MiB"), 8 * MIB, 1.10),
        (functools.partial(po.paged_adamw_8bit, 1e-3), 32 * MIB, 1.10),
        (functools.partial(po.paged_lion, 1e-3), 32 * MIB, 1.13),
        (functools.partial(po.paged_lion, 1e-3, page_size="1MiB"), 8 * MIB, 1.10),
    ],
    ids=["float32", "small pages", "int8", "lion", "lion, small pages"],
)
def test_each_device_is_at_its_links_rate(make, bound, over_floor):
    """16 leaves over 4 H200s."""
    build = sharded_update(
        lambda shardings: make(shardings=shardings), P("x"), (4,), ("x",), 16
    )
    report = aot.h200(build, 4)
    assert report.device_temp <= bound
    assert report.host_temp == 0
    assert step_model.over_floor(report.hlo, report.host_arguments) <= over_floor


def divided_layerwise(model):
    """The layerwise step over a mesh for a compiler: FSDP, a sequence a device."""

    def build(mesh):
        place = lambda *axes: NamedSharding(mesh, P(*axes), memory_kind="device")

        def divide(x):
            sharding = place(None, "x") if len(x.shape) == 3 else place()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        params = jax.tree.map(divide, model.shapes())
        shardings = jax.tree.map(lambda x: x.sharding, params)
        tx = po.paged_adamw(1e-4, page_size="1MiB", shardings=shardings)
        step = po.layerwise_step(
            po.LayerwiseModel(model.prologue, model.layer, model.epilogue), tx
        )
        state = jax.tree.map(for_accelerators, po.abstract_state(tx, params))
        workspace = po.GradientWorkspace.allocate(params["layers"])
        args = params, state, workspace, model.batch(place("x"), (mesh.size, 128))
        made = jax.eval_shape(step, *args)
        out = jax.tree.map(lambda x: x.sharding, args[:3])
        whole = jax.tree.map(lambda x: place(), made[3])
        jitted = jax.jit(
            step,
            donate_argnums=(0, 1, 2),
            keep_unused=True,
            out_shardings=(*out, whole),
        )
        return jitted, args

    return build


@pytest.mark.slow
@pytest.mark.compiler
def test_layerwise_on_h200s():
    """One layer's gradients at a time, reduced and scattered inside the loop.

    They are reduced while moments travel, which takes longer. Twice the layers take
    twice the arguments, and no more scratch. (Of four layers XLA unrolls a loop.)
    """
    model = functools.partial(decoder.Decoder, 1024, 1024, 1024, 2048)
    reports = [
        aot.h200(divided_layerwise(model(layers=layers)), 4) for layers in (6, 12)
    ]
    short, long = reports
    for report in reports:
        assert report.host_temp == 0
        assert report.host_aliased == report.host_arguments
        assert report.device_outputs - report.device_aliased <= 4096
        reductions = schedule.reductions(report.hlo)
        assert reductions and all(transfers > 0 for transfers in reductions)
    layer = 4 * (4 * 1024 * 1024 + 3 * 1024 * 2048)
    boundary = 6 * 128 * 1024 * 4  # of each further layer: its input, in float32
    assert long.device_temp - short.device_temp <= boundary + layer / 100
    assert collectives(long.hlo) == collectives(short.hlo)
    assert long.host_arguments >= 2 * 4 * 12 * layer / 4 / 4
