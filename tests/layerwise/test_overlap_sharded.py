"""Layers that are divided over devices: each moves its shards while it computes."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import aot, decoder, layered, schedule
from helpers.layered import far
from helpers.programs import AHEAD
from helpers.runtime_counts import RuntimeCounts
from helpers.stacked import SETTINGS, mean_loss

pytestmark = AHEAD
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
LAYERS, STEPS = 3, 2


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    normal = lambda *shape: 0.1 * jax.random.normal(next(keys), shape, "float64")
    return {
        "embed": normal(64, 64),
        "head": normal(64, 128),
        "layers": {
            # Divided by columns, by rows, and not at all.
            "up": normal(LAYERS, 64, 128),
            "down": normal(LAYERS, 128, 64),
            "square": normal(LAYERS, 64, 64),
            "odd": normal(LAYERS, 65, 63),
            "scale": 1 + normal(LAYERS, 64),
        },
    }


def layer(w, x, fixed=None):
    y = jnp.tanh((x * w["scale"]) @ w["up"])
    x = x + y @ w["down"] @ w["square"] + jnp.sum(jnp.tanh(w["odd"]))
    return x if fixed is None else x + jnp.tanh(x @ fixed["kernel"])


FUNCTIONS = (
    lambda rest, batch: (batch @ rest["embed"], None),
    lambda w, x, context, i: (layer(w, x), None),
    lambda rest, x, kept, batch: jnp.mean((x @ rest["head"]) ** 2),
)
FROZEN = (
    lambda rest, fixed, batch: (batch @ rest["embed"], None),
    lambda w, fixed, x, context, i: (layer(w, x, fixed), None),
    lambda rest, fixed, x, kept, batch: jnp.mean((x @ rest["head"]) ** 2),
)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A CPU computes what a GPU would; nothing jitted is kept from before."""

    def chosen(*arguments, default=None, **branches):
        return branches.get("cuda", default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    "how",
    [
        {"offloaded": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"frozen": True}, marks=pytest.mark.slow),
        pytest.param({"deferred": True, "offloaded": True}, marks=pytest.mark.slow),
    ],
    ids=["weights", "moments", "frozen", "deferred"],
)
@AXES
def test_numbers_are_optaxs(as_on_a_gpu, axis_type, how):
    """In float64, of one device and of plain Optax; every array stays where it is."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    deferred = how.get("deferred", False)
    with jax.enable_x64(True):
        params, fixed = parameters(), None
        batch = jax.random.normal(jax.random.key(1), (8, 64), "float64")
        loss, functions = mean_loss(FUNCTIONS), FUNCTIONS
        if "frozen" in how:
            kernel = parameters()["layers"]["square"] / 2
            fixed, functions = {"layers": {"kernel": kernel}}, FROZEN
            through = lambda w, x, c, i: (layer(w, x, {"kernel": kernel[i]}), None)
            loss = mean_loss((FUNCTIONS[0], through, FUNCTIONS[2]))
        most = 0.05 if deferred else None
        given = optax.adamw(1e-2), params, [batch] * STEPS, most
        *wanted, _ = layered.by_optax(loss, *given)
        with jax.set_mesh(mesh):
            place = lambda tree: jax.device_put(tree, po.fully_sharded(tree, mesh))
            params, fixed = place(params), fixed and place(fixed)
            if "offloaded" in how:
                params |= {"layers": po.offload(params["layers"], 0)}
            if fixed:
                fixed = {"layers": po.offload(fixed["layers"], 0)}
            tx = po.paged_adamw(1e-2, **SETTINGS)
            model = po.LayerwiseModel(*functions)
            step = po.layerwise_step(model, tx, max_norm=most)
            held = {"host_dtype": "float64", "rest": True} if deferred else {}
            workspace = model.workspace(params, **held)
            batch = jax.device_put(batch, NamedSharding(mesh, P("x")))
            args = params, tx.init(params), workspace
            before = jax.tree.map(lambda x: x.sharding, args)
            stays = lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim)
            others = (batch,) if fixed is None else (batch, fixed)
            compiled = po.jit_step(step, *args, *others, donate_argnums=(0, 1, 2))
            for _ in range(STEPS):
                *args, _ = compiled(*args, *others)
            if deferred:
                args = po.jit_step(step.finish, *args, donate_argnums=(0, 1, 2))(*args)
    assert far(args[:2], tuple(wanted)) <= 1e-10
    assert all(jax.tree.leaves(jax.tree.map(stays, tuple(args), before)))


# Of an eighth of each matrix, codes have whole blocks and words.
MODEL = decoder.Decoder(
    hidden=2048,
    query=2048,
    key=512,
    inner=8192,
    layers=6,  # XLA unrolls loops of one turn
    vocabulary=0,
    dtype=jnp.bfloat16,
)


def divided(model, mesh, on_host):
    """A step of eight bits, as a user writes it, and abstract arguments."""

    def place(x, sharding, host=False):
        sharding = sharding.with_memory_kind("pinned_host" if host else "device")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = lambda tree, of, host=lambda x: False: jax.tree.map(
        lambda x, like: place(x, like, host(x)), tree, of
    )
    shapes = model.shapes()
    params = placed(shapes, po.fully_sharded(shapes, mesh))
    tx = po.paged_adamw_8bit(1e-4)
    state = po.abstract_state(tx, params)
    state = jax.tree.map(
        lambda x: place(x, x.sharding, x.sharding.memory_kind == "pinned_host"), state
    )
    workspace = po.GradientWorkspace.allocate(params["layers"])
    if on_host:
        own = jax.tree.map(lambda x: x.sharding, params)
        params = placed(params, own, lambda x: len(x.shape) == 3)
    batch = model.batch(
        NamedSharding(mesh, P("x"), memory_kind="device"), (mesh.size * 8, 512)
    )
    step = po.layerwise_step(
        po.LayerwiseModel(model.prologue, model.layer, model.epilogue), tx
    )
    return step, (params, state, workspace, batch)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True], ids=["moments", "weights"])
@AXES
def test_eight_h200s(axis_type, on_host):
    """Nothing of a layer is gathered on the host, or moved by kernels; no one waits."""

    def build(mesh):
        mesh = Mesh(mesh.devices, ("x",), axis_types=(axis_type,))
        step, args = divided(MODEL, mesh, on_host)
        out = jax.tree.map(lambda x: x.sharding, args[:3])
        last = NamedSharding(mesh, P(), memory_kind="device")
        jitted = jax.jit(
            step, donate_argnums=(0, 1, 2), keep_unused=True, out_shardings=(*out, last)
        )
        return jitted, args

    report = aot.h200(build, 8, options=aot.options_on("h200"))
    assert report.host_temp == 0
    assert report.host_aliased == report.host_arguments
    assert not report.unsharded
    counts, moved = RuntimeCounts.of(report.hlo), schedule.overlaps(report.hlo)
    print(counts, moved)
    assert counts.host_syncs <= 4
    assert counts.zero_copy_bytes == counts.host_copies == 0
    assert sum(x.hidden for x in moved) >= 0.95 * sum(x.bytes for x in moved)
    # Each device's own part of a layer, or a half of that, from where it begins.
    for kind, shape, first, step in aot.descriptors(report.hlo):
        if kind == "write":
            continue  # states no shape
        sizes = [size * math.prod(map(int, shape.split(","))) for size in (2, 4)]
        assert any(
            first % size == 0 and abs(step) in (size, 2 * size) for size in sizes
        ), (shape, first, step)
