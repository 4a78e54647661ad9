"""Stacked parameters that a loss indexes in a loop of Python, taken apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import zoo
from helpers.split_trained import close

COUNT = 3


def stacked(axis=0, order=None):
    params = zoo.parameters(COUNT)
    join = lambda *xs: jnp.stack(xs, axis)
    return params | {"layers": jax.tree.map(join, *params["layers"])}


def loop(take, layer=zoo.mlp):
    """A loss of layers that are `take(stack, n)` of each stack."""

    def run(params, x, batch):
        for n in range(COUNT):
            x = layer(jax.tree.map(lambda w, n=n: take(w, n), params["layers"]), x)
        return x

    return zoo.around(run)


def all_at_once(split):
    """A loss of layers that are all taken before the first one is computed."""

    def run(params, x, batch):
        leaves, structure = jax.tree.flatten(params["layers"])
        for each in zip(*map(split, leaves), strict=True):
            x = zoo.mlp(jax.tree.unflatten(structure, each), x)
        return x

    return zoo.around(run)


def checkpointed(whole):
    """A loss whose layers are computed again, of one layer's or of all weights."""

    def run(params, x, batch):
        take = lambda stacks, n: jax.tree.map(lambda w: w[n], stacks)
        for n in range(COUNT):
            if whole:
                layer = jax.checkpoint(lambda w, x, n=n: zoo.mlp(take(w, n), x))
                x = layer(params["layers"], x)
            else:
                x = jax.checkpoint(zoo.mlp)(take(params["layers"], n), x)
        return x

    return zoo.around(run)


def split_rows(layer, x):
    """As `zoo.mlp`, with another slice of what one layer has."""
    half = layer["up"].shape[-1] // 2
    up = zoo.rms(x, layer["scale"]) @ layer["up"][:, :half]
    return x + jax.nn.gelu(up) @ layer["down"][half:]


LOSSES = {
    "index": loop(lambda w, n: w[n]),
    "from the end": loop(lambda w, n: w[n - COUNT]),
    "a part of a layer": loop(lambda w, n: w[n], split_rows),
    "prepared": loop(lambda w, n: jnp.moveaxis(2.0 * w, 0, -1)[..., n]),
    "iterated": all_at_once(list),
    "unstacked": all_at_once(jnp.unstack),
    "split": all_at_once(lambda w: [x[0] for x in jnp.split(w, COUNT)]),
    "checkpoints": checkpointed(whole=False),
    "checkpoints of all": checkpointed(whole=True),
}


def same(loss, params):
    model = po.split_layers(loss, params, zoo.TOKENS)
    mine = jax.jit(jax.value_and_grad(lambda p: model.loss(p, zoo.TOKENS)))
    value, gradients = mine(model.stack(params))
    wanted, theirs = jax.jit(jax.value_and_grad(loss))(params, zoo.TOKENS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    close(model.unstack(gradients), theirs)
    shorter = zoo.TOKENS[:1, :5]
    value = jax.jit(model.loss)(model.stack(params), shorter)
    np.testing.assert_allclose(value, loss(params, shorter), rtol=1e-6)
    return model


@pytest.mark.quick("index", "checkpoints of all", "prepared", "unstacked")
@pytest.mark.parametrize("name", LOSSES)
def test_layers_by_their_numbers(name):
    model = same(LOSSES[name], stacked())
    assert "layers, by their numbers" in str(model)
    assert "kinds" not in str(model)
    assert model.stack(stacked())["layers"]["up"].shape == (COUNT, 24, 48)


def test_on_another_axis():
    same(loop(lambda w, n: w[..., n]), stacked(axis=-1))


def test_part_of_an_index():
    """`w[n, :half]` is one slice of two axes."""
    half = zoo.WIDTH

    def run(params, x, batch):
        w = params["layers"]
        for n in range(COUNT):
            up = zoo.rms(x, w["scale"][n]) @ w["up"][n, :, :half]
            x = x + jax.nn.gelu(up) @ w["down"][n, half:]
        return x

    same(zoo.around(run), stacked())


def test_stacks_with_numbered_names():
    """`w_0` and `w_1` are two matrices of each layer, and no layers."""
    w = zoo.normal(COUNT, zoo.WIDTH, zoo.WIDTH)
    params = zoo.parameters(0) | {"layers": {"w_0": w, "w_1": 2 * w}}

    def layer(w, x):
        return x + jnp.tanh(jnp.tanh(x @ w["w_0"]) @ w["w_1"])

    same(loop(lambda w, n: w[n], layer), params)


def test_what_is_indexed_within_a_layer():
    """Queries, keys and values of a layer of a list are no three layers."""
    params = zoo.parameters(0)
    params["layers"] = [{"qkv": zoo.normal(3, zoo.WIDTH, zoo.WIDTH)}] * COUNT

    def run(params, x, batch):
        for each in params["layers"]:
            q, k, v = (x @ each["qkv"][n] for n in range(3))
            x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v
        return x

    model = same(zoo.around(run), params)
    assert "layers/*" in str(model) and "by their numbers" not in str(model)


def whole_too(params, batch):
    squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(params["layers"]))
    return LOSSES["index"](params, batch) + squares


def returned(params, batch):
    return LOSSES["index"](params, batch), params["layers"]["up"]


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (whole_too, r"layers are used whole at \S*test_split_slices.py:\d+"),
        (returned, "returns the stacked parameters of layers"),
        (loop(lambda w, n: w[COUNT - 1 - n]), r"in the order \[2, 1, 0\].* outside"),
        (loop(lambda w, n: w[min(n, 1)]), "layer 1 is used|does not use layer 2"),
        (loop(lambda w, n: w[n - n]), "no layers are found"),
    ],
)
def test_refused(loss, says):
    with pytest.raises(po.SplitError, match=says):
        po.split_layers(loss, stacked(), zoo.TOKENS)
