"""Losses of small models, written as people write them: `zoo.MODELS[name]()`.

Each gives `(loss, params, batch)`, and what is frozen where the loss takes that.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

WIDTH, VOCAB = 24, 48
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
MODELS: dict[str, Callable[[], tuple]] = {}


def model(function: Callable[[], tuple]) -> Callable[[], tuple]:
    MODELS[function.__name__] = function
    return function


def normal(*shape: int) -> jax.Array:
    seed = int(np.prod(shape)) + len(shape)
    return jax.random.normal(jax.random.key(seed), shape) * 0.1


def cross_entropy(logits, tokens):
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def mlp(layer, x):
    up = rms(x, layer["scale"]) @ layer["up"]
    return x + jax.nn.gelu(up) @ layer["down"]


def layer(n: int = 0) -> PyTree:
    return {
        "scale": jnp.ones(WIDTH) + 0.1 * n,
        "up": normal(WIDTH, 2 * WIDTH) * (1 + 0.2 * n),
        "down": normal(2 * WIDTH, WIDTH),
    }


def parameters(count: int = 4) -> PyTree:
    rest = {"embed": normal(VOCAB, WIDTH), "norm": jnp.ones(WIDTH)}
    return rest | {"layers": [layer(n) for n in range(count)]}


def around(layers: Callable[[PyTree, jax.Array, PyTree], jax.Array]) -> Callable:
    """A loss with tied embeddings around `layers(params, x, batch)`."""

    def loss(params, batch):
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        x = layers(params, params["embed"][tokens[:, :-1]], batch)
        extra = 0.0
        if isinstance(x, tuple):
            x, extra = x
        logits = rms(x, params["norm"]) @ params["embed"].T
        return cross_entropy(logits, tokens) + 0.01 * extra

    return loss


def in_turn(params, x, batch):
    for each in params["layers"]:
        x = mlp(each, x)
    return x


@model
def a_list():
    return around(in_turn), parameters(), TOKENS


@model
def flat_names():
    """As checkpoints of PyTorch name them."""
    tree = parameters()
    layers = tree.pop("layers")
    params = {f"model.{name}": x for name, x in tree.items()}
    for n, each in enumerate(layers):
        params |= {f"model.layers.{n}.mlp.{name}": x for name, x in each.items()}

    def loss(params, batch):
        prefix = "model.layers.{}.mlp."
        each = [
            {name: params[prefix.format(n) + name] for name in layers[0]}
            for n in range(len(layers))
        ]
        others = {name: params[f"model.{name}"] for name in tree}
        return around(in_turn)(others | {"layers": each}, batch)

    return loss, params, TOKENS


@model
def a_scan():
    params = parameters()
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])

    def run(params, x, batch):
        turn = jax.checkpoint(lambda x, each: (mlp(each, x), jnp.mean(x**2)))
        x, squares = jax.lax.scan(turn, x, params["layers"])
        return x, squares.sum()

    return around(run), params, TOKENS


@model
def two_kinds_and_a_literal():
    def run(params, x, batch):
        for n, each in enumerate(params["layers"]):
            act = jnp.tanh if n % 2 else jax.nn.gelu
            up = act(rms(x, each["scale"]) @ each["up"])
            x = x + up @ each["down"] * (1 / np.sqrt(n + 1))
        return x

    return around(run), parameters(6), TOKENS


@model
def dropout():
    def run(params, x, batch):
        key = batch["key"]
        for n, each in enumerate(params["layers"]):
            key, own = jax.random.split(key)
            other = jax.random.fold_in(batch["key"], n)
            kept = jax.random.bernoulli(own, 0.9, x.shape)
            x = mlp(each, x) * kept * jax.random.bernoulli(other, 0.9, x.shape)
        return x

    return around(run), parameters(), {"tokens": TOKENS, "key": jax.random.key(3)}


@model
def norms_of_all_weights():
    loss = around(in_turn)

    def penalized(params, batch):
        squares = [jnp.sum(x**2) for x in jax.tree.leaves(params)]
        return loss(params, batch) + 1e-3 * sum(squares), {"squares": sum(squares)}

    return penalized, parameters(), TOKENS


@model
def dense_first():
    params = parameters()
    params["layers"][0] = {"scale": jnp.ones(WIDTH), "dense": normal(WIDTH, WIDTH)}

    def run(params, x, batch):
        for each in params["layers"]:
            if "dense" in each:
                x = x + jnp.tanh(rms(x, each["scale"]) @ each["dense"])
            else:
                x = mlp(each, x)
        return x

    return around(run), params, TOKENS


@model
def encoder_and_decoder():
    encoder = [{"scale": jnp.ones(WIDTH), "w": normal(WIDTH, WIDTH)} for _ in range(3)]

    def run(params, x, batch):
        seen = params["embed"][batch[:, 1:]]
        for each in params["encoder"]:
            seen = seen + jnp.tanh(rms(seen, each["scale"]) @ each["w"])
        for each in params["layers"]:
            scores = jax.nn.softmax(x @ jnp.swapaxes(seen, 1, 2))
            x = mlp(each, x + scores @ seen)
        return x

    return around(run), parameters() | {"encoder": encoder}, TOKENS


@model
def lora():
    frozen = parameters()
    adapters = {"a": normal(WIDTH, 4), "b": normal(4, 2 * WIDTH)}

    def loss(params, frozen, batch):
        x = frozen["embed"][batch[:, :-1]]
        for base, own in zip(frozen["layers"], params["layers"], strict=True):
            x = mlp(base | {"up": base["up"] + own["a"] @ own["b"]}, x)
        return cross_entropy(rms(x, frozen["norm"]) @ frozen["embed"].T, batch)

    return loss, {"layers": [adapters] * 4}, TOKENS, frozen


@model
def lists_by_kind_of_parameter():
    """A dict of lists: `params["up"][n]` is layer n's."""
    params = parameters(4)
    layers = params.pop("layers")
    params["layers"] = {name: [x[name] for x in layers] for name in layers[0]}

    def run(params, x, batch):
        for n in range(4):
            x = mlp({name: xs[n] for name, xs in params["layers"].items()}, x)
        return x

    return around(run), params, TOKENS


@model
def remat_of_groups():
    """Two layers in one checkpoint, as long models are trained."""

    @jax.checkpoint
    def pair(a, b, x):
        return mlp(b, mlp(a, x))

    def run(params, x, batch):
        layers = params["layers"]
        for a, b in zip(layers[::2], layers[1::2], strict=True):
            x = pair(a, b, x)
        return x

    return around(run), parameters(6), TOKENS


@model
def frozen_base_closed_over():
    """Adapters on a base that the loss closes over, and is not given."""
    base = [layer(n) for n in range(3)]
    embed = normal(VOCAB, WIDTH)
    adapters = {"a": normal(WIDTH, 4), "b": normal(4, 2 * WIDTH)}

    def loss(params, batch):
        x = embed[batch[:, :-1]]
        for each, own in zip(base, params["layers"], strict=True):
            x = mlp(each | {"up": each["up"] + own["a"] @ own["b"]}, x)
        return cross_entropy(x @ embed.T, batch)

    return loss, {"layers": [adapters] * 3}, TOKENS
