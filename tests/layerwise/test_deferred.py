"""Updates that a layerwise step leaves to the next one, and `finish` of the last."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import paged_optax as po
from helpers import aot, decoder, layered, step_model
from helpers.layered import SETTINGS, far
from helpers.programs import AHEAD
from paged_optax.layerwise import step as step_module

MOST = 0.05
RATE = optax.cosine_decay_schedule(0.01, 9)


def trained(tx, params, batches, model=layered.MODEL, **how):
    """Deferred steps and their end; each step's loss and norm, and what is left."""
    how = {"host_dtype": "float32", "rest": True, "max_norm": MOST} | how
    return layered.trained(model, tx, params, batches, **how)


@pytest.mark.parametrize(
    "accumulate",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["one batch", "micro-batches"],
)
@pytest.mark.parametrize(
    ("platforms", "how"),
    [
        ((), {}),
        pytest.param(("cpu",), {}, marks=AHEAD),
        pytest.param(("cpu",), {"offloaded": 0}, marks=(AHEAD, pytest.mark.slow)),
        pytest.param(("cpu",), {"recompute": False}, marks=AHEAD),
    ],
    ids=["in turn", "ahead", "ahead, offloaded", "ahead, saved"],
)
def test_numbers_are_optaxs(monkeypatch, platforms, how, accumulate):
    """In float64, every step's loss and norm, and all parameters and moments."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", platforms)
    shape = (2, 4, 8) if accumulate else (4, 8)
    batches = [layered.batch(seed, shape) for seed in range(3)]
    with jax.enable_x64(True):
        params = layered.parameters(3, dtype=jnp.float64)
        tx = po.paged_adamw(RATE, **SETTINGS)
        how = {"host_dtype": jnp.float64, "accumulate": accumulate} | how
        found = trained(tx, params, batches, **how)
        params = layered.parameters(3, dtype=jnp.float64)
        loss = layered.mean(layered.loss) if accumulate else layered.loss
        wanted = layered.by_optax(loss, tx, params, batches, MOST)
    assert float(wanted[2][0][1]) > MOST  # or nothing is clipped
    assert far(found, wanted) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "platforms", [(), pytest.param(("cpu",), marks=AHEAD)], ids=["in turn", "ahead"]
)
def test_coded_moments(monkeypatch, platforms):
    """With master weights. A last bit of a gradient may choose the next code."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", platforms)
    batches = [layered.batch(seed) for seed in range(3)]
    tx = po.paged_adamw_8bit(RATE, master_dtype="float32", **SETTINGS)
    found = trained(tx, layered.parameters(3), batches)
    wanted = layered.by_optax(layered.loss, tx, layered.parameters(3), batches, MOST)
    assert far(found[0], wanted[0]) <= 1e-4
    assert far(found[2], wanted[2]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        po.paged_sgd(0.1, momentum=0.9, **SETTINGS),
        optax.chain(po.paged_lion(0.01, **SETTINGS), optax.trace(0.5)),
    ],
    ids=["momentum", "moments on both sides"],
)
def test_the_first_step_updates_nothing(tx):
    """Bit for bit, of decayed weights too."""
    params = layered.parameters(2)
    step = jax.jit(layered.layerwise(tx, max_norm=MOST))
    state = tx.init(params)
    workspace = layered.MODEL.workspace(params, host_dtype="float32", rest=True)
    given = params, state, workspace
    found, after, workspace, _ = step(*given, layered.batch())
    assert far((found, after), (params, state)) == 0
    assert workspace.pending.waits
    # A checkpoint of what the step returned goes on with the same numbers.
    copied = jax.tree.map(lambda x: jax.device_put(x.copy(), x.sharding), workspace)
    again = step(found, after, copied, layered.batch(1))
    once = step(found, after, workspace, layered.batch(1))
    assert far(again, once) == 0
    assert far(once[0], params) > 0


@pytest.mark.slow
@AHEAD
def test_an_output_matrix_is_updated_with_the_layers(monkeypatch):
    """Its gradient waits in the workspace, and a part of it goes with each layer."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", ("cpu",))
    key = jax.random.key(0)
    make = lambda: jax.tree.map(
        lambda x: jax.random.normal(key, x.shape, jnp.float64) * 0.02,
        decoder.SMALL.shapes(),
    )
    with jax.enable_x64(True):
        tokens = jax.random.randint(key, (2, 16), 0, 512)
        batches = [{"tokens": tokens, "targets": jnp.roll(tokens, i)} for i in (1, 2)]
        tx = po.paged_adamw(1e-3, min_paged_size="16KiB", page_size="64KiB")
        small = decoder.SMALL
        model = po.LayerwiseModel(small.prologue, small.layer, small.epilogue)
        found = trained(tx, make(), batches, model, host_dtype=jnp.float64)
        wanted = layered.by_optax(small.loss, tx, make(), batches, MOST)
    assert far(found[:2], wanted[:2]) <= 1e-6  # its loss is of float32


MODEL = decoder.Decoder(
    hidden=1024, query=1024, key=512, inner=2816, layers=8, vocabulary=0
)
HOW = {"max_norm": 1.0, "host_dtype": "bfloat16", "size": (8, 512)}


@pytest.mark.compiler
@pytest.mark.slow
@AHEAD
@pytest.mark.parametrize(
    ("budget", "weights_on_host", "link"),
    [("0", False, 200e9), ("200MB", False, 200e9), ("0", True, 400e9)],
    ids=["moments", "some moments", "weights"],
)
def test_transfers_are_hidden_by_the_forward_pass(budget, weights_on_host, link):
    """Less than half of the transfers' time shows; an update at the end shows all.

    The first layer's update, one eighth, has nothing beside it. Nor has what a GPU
    moves outside of loops, of the first layer and of the last: it has its own loops.
    """
    tx = po.paged_adamw(1e-4, codec="bfloat16", device_budget=budget)
    how = HOW | {"weights_on_host": weights_on_host, "deferred": True}
    report = aot.h200(decoder.layerwise(MODEL, tx, **how))
    assert report.host_temp == 0
    machine = step_model.Machine(link, flops=600e12, memory=3.5e12)
    step = step_model.cost(report.hlo, machine, MODEL.layers)
    assert step.exposed < 0.5 * max(step.up, step.down) / link


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile_for", "weights_on_host"),
    [(aot.h200, False), (aot.v5e, True)],
    ids=["h200, moments", "v5e, weights"],
)
def test_bytes(compile_for, weights_on_host):
    """Nothing is copied on the host, and on the device one layer's update is alive."""
    tx = po.paged_adamw(1e-4, master_remainders=True, codec="bfloat16")
    model = dataclasses.replace(MODEL, dtype=jnp.bfloat16)
    how = HOW | {"weights_on_host": weights_on_host}
    deferred, plain = (
        compile_for(decoder.layerwise(model, tx, deferred=yes, **how))
        for yes in (True, False)
    )
    assert deferred.host_temp == 0
    layer = sum(x.size for x in jax.tree.leaves(model.shapes())) / model.layers
    assert deferred.device_total - plain.device_total <= 8 * layer


@pytest.mark.parametrize("mapping", [flax.core.FrozenDict, nnx.State])
def test_mappings(mapping):
    """Of all parameters, and of those that the prologue gets."""
    params, tx = layered.parameters(2), po.paged_sgd(0.1)
    rest = mapping({name: x for name, x in params.items() if name != "layers"})
    workspace = layered.MODEL.workspace(params, host_dtype="float32", rest=rest)
    step = layered.layerwise(tx, max_norm=MOST)
    given = mapping(params), tx.init(mapping(params)), workspace
    # One trace: shapes alone would not say that gradients wait on the host.
    both = lambda *given: step.finish(*step(*given, layered.batch())[:3])
    found = jax.eval_shape(both, *given)
    assert jax.tree.structure(found[0]) == jax.tree.structure(given[0])
