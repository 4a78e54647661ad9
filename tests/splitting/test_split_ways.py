"""Models that nobody rewrote, trained layer by layer in all the ways of a step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import zoo
from helpers.split_trained import RATE, STEPS, close, trained, value_of

#: An embedding that is the head too; experts whose router has a loss of its own; a list
#: of modules; a scan; dropout in layers that are computed again. Of the first two some
#: matrices are large enough for moments in eight bits.
NAMES = ["gpt_2", "linen_sow", "nnx_list", "linen_scan", "maxtext_dropout"]


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
      step: Of `layerwise_step`.
      room: Of `workspace`.
      on_host: Whether the weights are on the host.
      dtype: Of the parameters.
      bits: Of the moments.
      devices: How many devices the parameters are divided over.
      jitted: Whether `jit_step` compiles the step, and its arguments are given up.
    """

    step: dict[str, Any] = {}
    room: dict[str, Any] = {}
    on_host: bool = False
    dtype: str | None = None
    bits: int = 32
    devices: int = 1
    jitted: bool = False


HOST = {"host_dtype": "float32"}
CLIP, ACCUMULATE = {"max_norm": 0.05}, {"accumulate": True}
AWAY, LATE = {"activations_on_host": True}, {**HOST, "rest": True}
WAYS = {
    "clipped": Way(CLIP),
    "gradients on the host": Way(CLIP, HOST),
    "deferred": Way(room=LATE),
    "deferred and clipped": Way(CLIP, LATE),
    "weights on the host": Way(on_host=True),
    "activations on the host": Way(AWAY),
    "accumulated": Way(ACCUMULATE),
    "accumulated and clipped": Way(ACCUMULATE | CLIP),
    "given up": Way(jitted=True),
    "all on the host": Way(AWAY | ACCUMULATE | CLIP, LATE, on_host=True, jitted=True),
    "bfloat16": Way(dtype="bfloat16"),
    "eight bits": Way(bits=8),
    "remainders": Way(dtype="bfloat16", bits=8),
    "remainders, given up": Way(CLIP, {}, True, "bfloat16", 8, jitted=True),
    "a mesh": Way(devices=8),
    "a mesh, clipped": Way(CLIP, HOST, devices=8, jitted=True),
}


#: Each way with two models, so that each model has several ways.
CASES = [
    pytest.param(name, way, id=f"{name}-{way}")
    for k, way in enumerate(WAYS)
    for name in (NAMES[:2] if WAYS[way].bits == 8 else (NAMES[k % 5], NAMES[k % 5 - 2]))
]


def another(batch):
    """A batch that differs: no micro-batch can stand for the others."""
    if not isinstance(batch, dict):
        return (5 * batch + 1) % zoo.VOCAB
    return batch | {
        "tokens": another(batch["tokens"]),
        "key": jax.random.split(batch["key"])[0],
    }


def mean_of(loss):
    """The mean loss of micro-batches."""

    def mean(params, *batches):
        return sum(value_of(loss(params, each)) for each in batches) / len(batches)

    return lambda params, batches: mean(params, *batches)


def divided(params):
    """Over eight devices, along the last axis that has eight parts."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(x):
        axes = [n for n, size in enumerate(x.shape) if size % 8 == 0][-1:]
        spec = ["x" if n in axes else None for n in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, params)


def transformation(way):
    given = {"page_size": 4096, "min_paged_size": 0}
    if way.bits == 32:
        return po.paged_adamw(RATE, **given)
    given["master_remainders"] = way.dtype == "bfloat16"
    return po.paged_adamw_8bit(RATE, **given)


def run(model, way, params, batches, batch):
    """The losses, and the parameters."""
    tx = transformation(way)
    stacked = model.stack(params, on_host=way.on_host, min_size=0)
    one = po.layerwise_step(model, tx, **way.step)
    carry = stacked, model.init(tx, stacked), model.workspace(stacked, **way.room)
    given = batch
    if way.step.get("accumulate"):
        given = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    step, finish = jax.jit(one), jax.jit(one.finish)
    if way.jitted:
        step = po.jit_step(one, *carry, given, donate_argnums=(0, 1, 2))
    if way.bits == 8:
        assert "uint32" in {x.dtype.name for x in jax.tree.leaves(carry[1])}
    losses = []
    for _ in range(STEPS):
        *carry, output = step(*carry, given)
        losses.append(output.loss)
    if "rest" in way.room:
        carry = finish(*carry)
    return losses, carry[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_ways(name, way):
    """As by Optax; as the same transformation with all gradients at once, if rounded.

    Where it is, single values may be rounded apart: then their mean is compared.
    """
    loss, params, batch = zoo.MODELS[name]()
    way = WAYS[way]
    if way.dtype is not None:
        params = jax.tree.map(lambda x: x.astype(way.dtype), params)
    if way.devices > 1:
        params = divided(params)
    model = po.split_layers(loss, params, batch)
    batches = [batch, another(batch)]
    start = jax.tree.map(np.asarray, model.stack(params))
    losses, stacked = run(model, way, jax.tree.map(jnp.copy, params), batches, batch)
    exact = way.bits == 32 and way.dtype is None
    many = way.step.get("accumulate")
    whole, given = (mean_of(loss), batches) if many else (loss, batch)
    plain = optax.adamw(RATE)
    if not exact:
        whole, params, plain = model.loss, model.stack(params), transformation(way)
    if norm := way.step.get("max_norm"):
        plain = optax.chain(optax.clip_by_global_norm(norm), plain)
    wanted, theirs = trained(whole, params, (), [given] * STEPS, plain)
    losses, theirs = (np.asarray(each, np.float32) for each in (losses, theirs))
    np.testing.assert_allclose(losses, theirs, rtol=1e-5 if exact else 2e-2)
    if exact:
        close(model.unstack(stacked), wanted)
        return
    moved = apart = 0.0
    for x, y, z in zip(*map(jax.tree.leaves, (stacked, wanted, start)), strict=True):
        x, y, z = (np.asarray(each, np.float32) for each in (x, y, z))
        moved += np.abs(y - z).sum()
        apart += np.abs(x - y).sum()
    assert apart < 0.02 * moved
