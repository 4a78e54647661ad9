"""What is not of the layers, in host memory too: embeddings, the output matrix."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import reference

WORDS, WIDTH, INNER, LAYERS = 517, 128, 256, 3
TABLE = {"host_dtype": "float32"}


def loss(params, frozen, batch):
    x = params["embed"][batch] + frozen["positions"][: batch.shape[-1]]
    for layer, fixed in zip(params["layers"], frozen["layers"], strict=True):
        up = fixed["up"] + layer["up"]
        x = x + jnp.tanh(layer["scale"] * x @ up) @ layer["down"]
    x = x[:, :-1] * (1 + params["scale"]) + params["offset"].sum(0)
    logits = x @ params["head"] + x @ params["embed"].T + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return po.WeightedLoss(losses.sum(), losses.size)


def made(dtype):
    random = np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(random.normal(size=shape) * 0.05, dtype)
    layers = [
        {"up": some(WIDTH, INNER), "down": some(INNER, WIDTH), "scale": some(WIDTH)}
        for _ in range(LAYERS)
    ]
    params = {"embed": some(WORDS, WIDTH), "head": some(WIDTH, WORDS), "layers": layers}
    params |= {"scale": some(), "bias": some(WORDS), "offset": some(3, WIDTH)}
    fixed = [{"up": some(WIDTH, INNER)} for _ in range(LAYERS)]
    frozen = {"positions": some(40, WIDTH), "layers": fixed}
    return params, frozen, jnp.asarray(random.integers(0, WORDS, (2, 20)))


def trained(on_host, tx, room, dtype, *, jitted=False, accumulate=False, **settings):
    """Parameters and state after a few steps, the last loss, and where all was."""
    params, frozen, batch = made(dtype)
    model = po.split_layers(loss, params, batch, frozen=frozen)
    where = {"on_host": on_host, "min_size": 2}
    params, frozen = model.stack(params, **where), model.stack_frozen(frozen, **where)
    state, workspace = model.init(tx, params), model.workspace(params, **room)
    step = po.layerwise_step(model, tx, accumulate=accumulate, **settings)
    batch = jnp.stack([batch, batch[::-1]]) if accumulate else batch
    kinds = reference.kinds((params, frozen))
    run, finish = step, step.finish
    if jitted:
        args = params, state, workspace, batch, frozen
        run = po.jit_step(step, *args, donate_argnums=(0, 1, 2))
        finish = jax.jit(finish)
    for _ in range(2):
        params, state, workspace, output = run(params, state, workspace, batch, frozen)
    if "rest" in room:
        params, state, workspace = finish(params, state, workspace)
    assert reference.kinds((params, frozen)) == kinds
    there = jax.tree.map(np.asarray, (params, state))
    return there, float(output.loss), kinds


WAYS = {
    "in turn": ({}, {}),
    "two passes": ({}, {"max_norm": 0.01}),
    "gradients on the host": (TABLE, {"max_norm": 0.01}),
    "deferred": ({**TABLE, "rest": True}, {"max_norm": 0.01}),
    "accumulated": ({}, {"accumulate": True, "max_norm": 0.01}),
    "accumulated on the host": (TABLE, {"accumulate": True}),
    "activations on the host": ({}, {"activations_on_host": True}),
}


@pytest.mark.slow
@pytest.mark.quick("in turn-8", "deferred-32")
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_the_device(way, bits):
    """Bit for bit, where XLA:CPU compiles each part of the step by itself."""
    room, step = WAYS[way]
    tx, dtype = po.paged_adamw(1e-2, weight_decay=0.1), "float32"
    if bits == 8:
        tx, dtype = po.paged_adamw_8bit(1e-2, master_remainders=True), "bfloat16"
    alone, there, _ = trained(False, tx, room, dtype, **step)
    found, here, kinds = trained("all", tx, room, dtype, **step)
    assert kinds.count("pinned_host") == 9  # all but the layers' scales
    assert here == there
    reference.assert_equal(alone, found)


@pytest.mark.slow
@pytest.mark.quick("in turn")
@pytest.mark.parametrize("way", WAYS)
def test_compiled(way):
    room, step = WAYS[way]
    tx = po.paged_adamw(1e-2, eps=1e-4)
    (alone, _), there, _ = trained(False, tx, room, "float32", **step, jitted=True)
    (found, _), here, _ = trained("all", tx, room, "float32", **step, jitted=True)
    assert here == pytest.approx(there, rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), alone, found)


def test_the_loss_alone():
    params, frozen, batch = made("float32")
    model = po.split_layers(loss, params, batch, frozen=frozen)
    stacked = model.stack(params, on_host="all", min_size=1000)
    fixed = model.stack_frozen(frozen, on_host="all", min_size=1000)
    value, gradients = jax.jit(jax.value_and_grad(model.loss))(stacked, fixed, batch)
    wanted = loss(params, frozen, batch)
    np.testing.assert_allclose(value, wanted.total / wanted.weight, rtol=1e-6)
    assert reference.kinds(gradients) == reference.kinds(stacked)


class Read:
    """What NumPy makes an array of; it counts how many are in memory."""

    there, most = 0, 0

    def __init__(self, x):
        self.x, self.shape, self.dtype = np.asarray(x), x.shape, x.dtype

    def __array__(self, dtype=None, copy=None):
        made = np.array(self.x, dtype)
        Read.there += 1
        Read.most = max(Read.most, Read.there)
        weakref.finalize(made, self.gone)
        return made

    @staticmethod
    def gone():
        Read.there -= 1


@pytest.mark.parametrize("on_host", [False, True, "all"])
def test_leaves_that_are_read_as_they_are_stacked(on_host):
    """The same stacks, and no more than two leaves in memory beside them."""
    params, frozen, batch = made(jnp.float32)
    model = po.split_layers(loss, params, batch, frozen=frozen)
    where = {"on_host": on_host, "min_size": 2}
    wanted = model.stack(params, **where)
    layers, rest = params["layers"], {n: x for n, x in params.items() if n != "layers"}
    Read.most = 0
    found = model.stack(rest | {"layers": jax.tree.map(Read, layers)}, **where)
    assert Read.most <= 2
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    if on_host:
        assert reference.kinds(found["layers"]) == reference.kinds(wanted["layers"])
    both = model.stack(jax.tree.map(Read, params), **where)
    jax.tree.map(np.testing.assert_array_equal, both, wanted)


@pytest.mark.parametrize("on_host", [False, True])
def test_numpy_parameters(on_host):
    """Stacks, state and steps as of JAX's arrays, wherever the stacks are."""
    params, frozen, batch = made(jnp.float32)
    model, tx = po.split_layers(loss, params, batch, frozen=frozen), po.paged_adamw(0.1)
    step = jax.jit(po.layerwise_step(model, tx))

    def trained(params):
        stacked = model.stack(params, on_host=on_host, min_size=0)
        args = stacked, model.init(tx, stacked), model.workspace(stacked)
        return step(*args, batch, model.stack_frozen(frozen))

    arrays = jax.tree.map(np.asarray, params)
    jax.tree.map(np.testing.assert_array_equal, trained(arrays), trained(params))
