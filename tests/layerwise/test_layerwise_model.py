"""A model as three functions: its workspace, its loss, and its stacks of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, far, layerwise
from helpers.reference import kinds
from helpers.stacked import same
from paged_optax.backend.memory import on_host

MODEL = layered.MODEL


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kept_as", ["device", "host", "numpy", "blocks"])
def test_loss(kept_as, jitted):
    """The same numbers as those of the whole model, and the same gradients."""
    plain, batch = layered.parameters(3), layered.batch()
    wanted = jax.jit(jax.value_and_grad(layered.loss))(plain, batch)
    params, key = dict(plain), "layers"
    if kept_as == "host":
        params["layers"] = po.offload(plain["layers"], 0)
    elif kept_as == "numpy":
        params = jax.tree.map(np.asarray, params)
    elif kept_as == "blocks":
        key, params["blocks"] = "blocks", params.pop("layers")
    run = functools.partial(MODEL.loss, layers=key)
    run = jax.value_and_grad(run, has_aux=True)
    (loss, metrics), gradients = (jax.jit(run) if jitted else run)(params, batch)
    if kept_as == "blocks":
        gradients["layers"] = gradients.pop("blocks")
    elif kept_as == "host":
        assert gradients["layers"]["up"].sharding.memory_kind == "pinned_host"
    same((loss, gradients), wanted)
    assert float(metrics["cross_entropy"]) < float(loss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_loss_of_a_sum_and_its_weight(dtype):
    """It is that of a step. The weight is data, and may be a number of tokens."""

    def epilogue(rest, x, kept, batch):
        loss, _ = layered.epilogue(rest, x, kept, batch)
        weight = 1 + jnp.sum(rest["norm"])
        return po.WeightedLoss(loss * jax.lax.stop_gradient(weight), weight)

    def of_tokens(rest, x, kept, batch):
        loss, _ = layered.epilogue(rest, x, kept, batch)
        weight = jnp.ones((), dtype).sum()
        return po.WeightedLoss(loss, weight), {"weight": weight}

    params, batch = layered.parameters(2), layered.batch()
    by_grad = lambda f, **how: jax.jit(jax.value_and_grad(f, **how))(params, batch)
    wanted = by_grad(layered.loss)
    model = po.LayerwiseModel(layered.prologue, layered.layer, epilogue)
    same(by_grad(model.loss), wanted)
    model = po.LayerwiseModel(layered.prologue, layered.layer, of_tokens)
    (loss, metrics), gradients = by_grad(model.loss, has_aux=True)
    same((loss, gradients), wanted)
    tx = po.paged_sgd(0.1)
    step = jax.jit(po.layerwise_step(model, tx))
    *_, output = step(params, tx.init(params), model.workspace(params), batch)
    np.testing.assert_allclose(output.loss, loss, rtol=1e-6)
    assert output.loss.dtype == loss.dtype
    assert output.metrics == metrics


def test_workspace():
    """What `allocate` makes of the layers; `rest` may stand for all others."""
    params = layered.parameters(2)
    rest = {name: x for name, x in params.items() if name != "layers"}
    allocate = functools.partial(po.GradientWorkspace.allocate, params["layers"])
    host = {"host_dtype": "float32"}
    for found, wanted in (
        (MODEL.workspace(params), allocate()),
        (MODEL.workspace(params, rest=False), allocate()),
        (MODEL.workspace(params, dtype="bfloat16"), allocate(dtype="bfloat16")),
        (MODEL.workspace(params, accumulate="up"), allocate(accumulate="up")),
        (MODEL.workspace(params, rest=True, **host), allocate(rest=rest, **host)),
        (MODEL.workspace(params, rest=rest, **host), allocate(rest=rest, **host)),
    ):
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
        kinds = lambda tree: [(x.dtype, x.sharding) for x in jax.tree.leaves(tree)]
        assert kinds(found) == kinds(wanted)
    renamed = {"blocks": params["layers"]} | rest
    found = MODEL.workspace(renamed, layers="blocks", rest=True, **host)
    assert set(found.pending.rest) == set(rest)
    shapes = jax.eval_shape(lambda: params)
    MODEL.workspace(shapes).check(params["layers"])


def test_a_model_stays_as_it_is():
    """Equal functions make equal models, which may be static arguments."""
    again = po.LayerwiseModel(layered.prologue, layered.layer, layered.epilogue)
    assert again == MODEL and hash(again) == hash(MODEL)
    with pytest.raises(AttributeError):
        again.layer = None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_offload_takes_numpy(dtype):
    """As a loader has them: to the host at once, in the dtypes that JAX gives them."""
    values = np.random.default_rng(0).normal(size=(4, 64, 128)).astype(dtype)
    layers = {"up": values, "scale": np.ones((4, 64), dtype)}
    found = po.offload(layers, min_size="16KiB")
    wanted = po.offload(jax.tree.map(jnp.asarray, layers), min_size="16KiB")
    for name in layers:
        assert isinstance(found[name], jax.Array)
        assert jax.typeof(found[name]) == jax.typeof(wanted[name])
        assert np.array_equal(np.asarray(found[name]), np.asarray(wanted[name]))
    assert on_host(found["up"]) and not on_host(found["scale"])
    # Of float64, JAX makes float32: half the bytes.
    small = po.offload(layers, min_size=64 * 128 * wanted["up"].dtype.itemsize + 1)
    assert not on_host(small["up"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "how",
    [{}, {"host_dtype": "float32"}, {"host_dtype": "float32", "rest": True}],
    ids=["plain", "host", "defers"],
)
def test_a_step_takes_numpy(dtype, how):
    """Parameters, the workspace's and the state's alike, eager and compiled."""
    array = lambda x: np.asarray(x).astype(dtype)
    results = []
    for params in (layered.parameters(2), jax.tree.map(array, layered.parameters(2))):
        tx = po.paged_adamw(1e-3, **SETTINGS)
        args = params, tx.init(params), layered.MODEL.workspace(params, **how)
        step = layerwise(tx, max_norm=0.05)
        results.append((jax.jit(step)(*args, layered.batch()), args, step))
    found, args, step = results[1]
    assert far(found[:2], results[0][0][:2]) == 0
    if dtype == np.float64:  # which JAX has as float32
        assert far(step(*args, layered.batch())[:2], found[:2]) < 1e-5


@pytest.mark.parametrize(
    "layers",
    [
        {"0": {"w": jnp.ones((3, 64, 64)), "b": jnp.ones((3, 64))}},
        [{"w": jnp.ones((3, 64, 64))}, {"w": jnp.ones((3, 64, 64))}],
        (jnp.ones((3, 64, 64)), jnp.ones((3, 64, 64))),
        (jnp.ones((3, 64, 64)), jnp.ones((3, 64))),
        {"w0": jnp.ones((3, 64)), "w1": jnp.ones((3, 64))},
        jnp.ones((3, 64, 64)),
    ],
)
def test_parts_of_a_layer_may_have_numbers(layers):
    """Where they are stacked."""
    workspace = po.GradientWorkspace.allocate(layers)
    assert jax.tree.map(jnp.shape, workspace.gradients) == jax.tree.map(
        lambda x: x.shape[1:], layers
    )
    po.offload(layers, 0)


@pytest.mark.parametrize("codec", [None, "bfloat16", "dynamic_int8"])
def test_moments_of_offloaded_layers_that_are_not_paged(codec):
    """They are on the device, though their parameters are not."""
    layers = po.offload({"kernel": jnp.ones((4, 256, 512))})
    params = {"layers": layers}
    for how in ({"device_budget": None}, {"min_paged_size": "1GiB"}):
        tx = po.paged_adamw(1e-3, codec=codec, **how)
        state = tx.init(params)
        assert not any(map(on_host, jax.tree.leaves(state)))
        assert kinds(state) == kinds(po.abstract_state(tx, params))
