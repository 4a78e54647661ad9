"""A model as three functions: its workspace, and its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import layered
from helpers.stacked import same

MODEL = po.LayerwiseModel(layered.prologue, layered.layer, layered.epilogue)


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
