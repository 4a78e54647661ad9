"""Losses of small models, written as people write them: `zoo.MODELS[name]()`.

Each gives `(loss, params, batch)`, and what is frozen where the loss takes that.
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
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
def two_layers():
    return around(in_turn), parameters(2), TOKENS


@model
def named_h_0():
    params = parameters()
    layers = params.pop("layers")
    params["model"] = {f"h_{n}": each for n, each in enumerate(layers)}

    def run(params, x, batch):
        for n in range(len(layers)):
            x = mlp(params["model"][f"h_{n}"], x)
        return x

    return around(run), params, TOKENS


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
def checkpoints():
    def run(params, x, batch):
        for each in params["layers"]:
            x = jax.checkpoint(mlp)(each, x)
        return x

    return around(run), parameters(), TOKENS


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
def a_scan_on_axis_1():
    params = parameters()
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs, 1), *params["layers"])

    def run(params, x, batch):
        first = lambda x: jnp.moveaxis(2.0 * x, 1, 0)
        layers = jax.tree.map(first, params["layers"])
        return jax.lax.scan(lambda x, each: (mlp(each, x), None), x, layers)[0]

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


def _with_router(total: Callable[[Sequence[jax.Array]], jax.Array]):
    def run(params, x, batch):
        losses = []
        for each in params["layers"]:
            up = rms(x, each["scale"]) @ each["up"]
            x = x + jax.nn.silu(up) @ each["down"]
            losses.append(jnp.mean(up**2))
        return x, total(losses)

    return around(run), parameters(5), TOKENS


@model
def router_losses_added():
    return _with_router(sum)


@model
def router_losses_stacked():
    return _with_router(lambda losses: jnp.stack(losses).sum())


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
def inputs_by_layer():
    params = parameters() | {"table": normal(VOCAB, 4, WIDTH)}

    def run(params, x, batch):
        inputs = params["table"][batch[:, :-1]]
        for n, each in enumerate(params["layers"]):
            x = mlp(each, x + inputs[:, :, n])
        return x

    return around(run), params, TOKENS


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
def own_derivative():
    @jax.custom_vjp
    def act(x):
        return jnp.tanh(x)

    act.defvjp(lambda x: (act(x), x), lambda x, g: (1.5 * g * (1 - jnp.tanh(x) ** 2),))

    def run(params, x, batch):
        for each in params["layers"]:
            x = x + act(rms(x, each["scale"]) @ each["up"]) @ each["down"]
        return x

    return around(run), parameters(), TOKENS


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


class Block(nnx.Module):
    """Attention with a causal mask, and two linear layers.

    A bias of keys would have no gradient but rounding, which Adam makes steps of.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """A list of blocks between embeddings and an output of its own."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@model
def nnx_list():
    graph, params = nnx.split(Decoder(rngs=nnx.Rngs(0)))

    def loss(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return loss, params, TOKENS


class LinenBlock(nn.Module):
    """Two linear layers, called with a carry as `nn.scan` wants them."""

    @nn.compact
    def __call__(self, x, _=None):
        up = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.silu(up)), None


class Linen(nn.Module):
    """Blocks that are scanned over, or one after the other."""

    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        if self.scanned:
            scan = nn.scan(
                LinenBlock, {"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = scan()(x, None)
        else:
            for _ in range(3):
                x, _ = LinenBlock()(x)
        return nn.Dense(VOCAB)(x)


def _linen(scanned: bool):
    module = Linen(scanned)
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))

    def loss(params, batch):
        return cross_entropy(module.apply(params, batch[:, :-1]), batch)

    return loss, params, TOKENS


@model
def linen_blocks():
    return _linen(scanned=False)


@model
def linen_scan():
    return _linen(scanned=True)


@model
def equinox_list():
    keys = jax.random.split(jax.random.key(0), 5)
    blocks = [eqx.nn.MLP(WIDTH, WIDTH, 32, 1, key=key) for key in keys[:3]]
    embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[3])
    parts = {
        "embed": embed,
        "blocks": blocks,
        "head": eqx.nn.Linear(WIDTH, VOCAB, key=keys[4]),
    }
    params, static = eqx.partition(parts, eqx.is_inexact_array)

    def loss(params, batch):
        parts = eqx.combine(params, static)
        each = lambda f: jax.vmap(jax.vmap(f))
        x = each(parts["embed"])(batch[:, :-1])
        for block in parts["blocks"]:
            x = x + each(block)(x)
        return cross_entropy(each(parts["head"])(x), batch)

    return loss, params, TOKENS
