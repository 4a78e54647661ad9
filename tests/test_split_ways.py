"""Models that nobody rewrote, trained layer by layer in all the ways of a step."""

import jax
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import zoo
from helpers.split_trained import RATE, STEPS, close, trained, value_of

WAYS = {
    "clipped": {"max_norm": 0.05},
    "gradients on the host": {"host_dtype": "float32", "max_norm": 0.05},
    "deferred": {"host_dtype": "float32", "rest": True},
    "weights on the host": {"on_host": True},
    "accumulated": {"accumulate": True},
}


def mean_of(loss):
    """The mean loss of micro-batches."""

    def mean(params, batch):
        return sum(value_of(loss(params, each)) for each in batch) / len(batch)

    return mean


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["a_scan", "router_losses_added", "nnx_list"])
def test_ways(name, way):
    """Micro-batches differ, so that none can stand for the others."""
    loss, params, batch = zoo.MODELS[name]()
    how = dict(WAYS[way])
    many = how.get("accumulate", False)
    model = po.split_layers(loss, params, batch)
    placed = {"on_host": how.pop("on_host", False), "min_size": 0}
    stacked = model.stack(params, **placed)
    room = {key: how.pop(key) for key in ("host_dtype", "rest") if key in how}
    tx = po.paged_adamw(RATE, page_size=4096, min_paged_size=0)
    one = po.layerwise_step(model, tx, **how)
    step, finish = jax.jit(one), jax.jit(one.finish)
    carry = stacked, tx.init(stacked), model.workspace(stacked, **room)
    given = np.stack([batch, (5 * batch + 1) % zoo.VOCAB]) if many else batch
    losses = []
    for _ in range(STEPS):
        *carry, output = step(*carry, given)
        losses.append(output.loss)
    if "rest" in room:
        carry = finish(*carry)
    norm = how.get("max_norm")
    plain = optax.adamw(RATE)
    if norm:
        plain = optax.chain(optax.clip_by_global_norm(norm), plain)
    whole = mean_of(loss) if many else loss
    wanted, theirs = trained(whole, params, (), [given] * STEPS, plain)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    close(model.unstack(carry[0]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_scan", "gpt_2"])
def test_in_eight_bits(name):
    """As the same transformation of the stacked tree, with all gradients at once.

    Both models have stacks of 4096 values and more; smaller ones stay in float32.
    """
    loss, params, batch = zoo.MODELS[name]()
    model = po.split_layers(loss, params, batch)
    stacked = model.stack(params)
    tx = po.paged_adamw_8bit(RATE, page_size=4096, min_paged_size=0)
    step = jax.jit(po.layerwise_step(model, tx))
    carry = stacked, tx.init(stacked), model.workspace(stacked)
    assert "uint32" in {x.dtype.name for x in jax.tree.leaves(carry[1])}
    losses = []
    for _ in range(STEPS):
        *carry, output = step(*carry, batch)
        losses.append(output.loss)
    wanted, theirs = trained(model.loss, stacked, (), [batch] * STEPS, tx)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    close(carry[0], wanted)
