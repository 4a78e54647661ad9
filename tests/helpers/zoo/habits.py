"""What people do around and in layers: remat, dropout, casts, losses of routers."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from helpers.zoo.plain import (
    TOKENS,
    VOCAB,
    WIDTH,
    around,
    cross_entropy,
    in_turn,
    layer,
    mlp,
    normal,
    parameters,
    rms,
)

MODELS: dict[str, Callable[[], tuple]] = {}


def model(function: Callable[[], tuple]) -> Callable[[], tuple]:
    MODELS[function.__name__] = function
    return function


@model
def three_layers_by_hand():
    """A dict by hand, whose layers are numbered by their keys."""
    params = parameters(3)
    params["layers"] = {str(n): each for n, each in enumerate(params["layers"])}

    def run(params, x, batch):
        for n in range(3):
            x = mlp(params["layers"][str(n)], x)
        return x

    return around(run), params, TOKENS


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
def remat_in_and_around():
    """Each layer computed again, and within it the product that is widest."""
    wide = jax.checkpoint(lambda x, up: jax.nn.gelu(x @ up))

    @jax.checkpoint
    def block(each, x):
        return x + wide(rms(x, each["scale"]), each["up"]) @ each["down"]

    def run(params, x, batch):
        for each in params["layers"]:
            x = block(each, x)
        return x

    return around(run), parameters(), TOKENS


@model
def remat_by_name():
    """A policy that saves what has a name."""
    name = checkpoint_name
    policy = jax.checkpoint_policies.save_only_these_names("up")

    def block(each, x):
        up = name(rms(x, each["scale"]) @ each["up"], "up")
        return x + jax.nn.gelu(up) @ each["down"]

    def run(params, x, batch):
        for each in params["layers"]:
            x = jax.checkpoint(block, policy=policy)(each, x)
        return x

    return around(run), parameters(), TOKENS


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
def jitted_layers():
    """Each layer is a function of its own that is jitted."""
    block = jax.jit(mlp)

    def run(params, x, batch):
        for each in params["layers"]:
            x = block(each, x)
        return x

    return around(run), parameters(), TOKENS


@model
def all_in_bfloat16():
    """All parameters are rounded to bfloat16 at the start of the loss.

    The embedding is not tied: its two gradients would be rounded in another order.
    """
    params = parameters() | {"head": normal(WIDTH, VOCAB)}

    def loss(params, batch):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        x = in_turn(params, params["embed"][batch[:, :-1]], batch)
        logits = rms(x, params["norm"]) @ params["head"]
        return cross_entropy(logits.astype(jnp.float32), batch)

    return loss, params, TOKENS


class DropoutBlock(nnx.Module):
    """Two linear layers and dropout, whose stream of keys is given."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, rngs):
        y = self.dropout(nnx.relu(self.up(self.norm(x))), rngs=rngs)
        return x + self.dropout(self.down(y), rngs=rngs)


class DropoutDecoder(nnx.Module):
    """Blocks that draw from one stream, one after the other."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([DropoutBlock(rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, rngs):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rngs)
        return self.head(x)


@model
def nnx_dropout():
    """The key is in the batch, and `nnx.Rngs` counts what is drawn from it."""
    graph, params, others = nnx.split(DropoutDecoder(rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch):
        decoder = nnx.merge(graph, params, others)
        rngs = nnx.Rngs(dropout=batch["key"])
        logits = decoder(batch["tokens"][:, :-1], rngs)
        return cross_entropy(logits, batch["tokens"])

    return loss, params, {"tokens": TOKENS, "key": jax.random.key(7)}


class SownBlock(nn.Module):
    """Experts that all compute, weighed by a router that sows its losses."""

    experts: int = 4

    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm()(x)
        gates = nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(y))
        self.sow("intermediates", "balance", self.experts * jnp.mean(gates**2))
        shape = (self.experts, WIDTH, WIDTH)
        up = self.param("up", nn.initializers.normal(0.1), shape)
        down = self.param("down", nn.initializers.normal(0.1), shape)
        each = jnp.einsum("ebtf,efd->ebtd", jax.nn.silu(y @ up[:, None]), down)
        return x + jnp.einsum("ebtd,bte->btd", each, gates)


class Sown(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        for n in range(4):
            x = nn.remat(SownBlock)(name=f"layers_{n}")(x)
        return nn.Dense(VOCAB)(nn.RMSNorm()(x))


@model
def linen_sow():
    """Losses that each layer sows are found at the end, and returned as metrics."""
    module = Sown()
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))["params"]

    def loss(params, batch):
        logits, sown = module.apply(
            {"params": params}, batch[:, :-1], mutable=["intermediates"]
        )
        balance = jnp.stack(jax.tree.leaves(sown))
        total = cross_entropy(logits, batch) + 0.01 * balance.sum()
        return total, {"balance": balance, "tokens": batch[:, 1:].size}

    return loss, params, TOKENS


class NnxExperts(nnx.Module):
    """As above, in NNX."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(normal(4, WIDTH, WIDTH))
        self.down = nnx.Param(normal(4, WIDTH, WIDTH))

    def __call__(self, x):
        y = self.norm(x)
        gates = jax.nn.softmax(self.router(y))
        self.sow(nnx.Intermediate, "balance", 4 * jnp.mean(gates**2))
        each = jax.nn.silu(jnp.einsum("btf,efd->ebtd", y, self.up[...]))
        each = jnp.einsum("ebtf,efd->ebtd", each, self.down[...])
        return x + jnp.einsum("ebtd,bte->btd", each, gates)


class NnxSown(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxExperts(rngs=rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for each in self.layers:
            x = each(x)
        return self.embed.attend(x)


@model
def nnx_sow():
    graph, params = nnx.split(NnxSown(rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        decoder = nnx.merge(graph, params)
        logits, sown = nnx.capture(decoder, nnx.Intermediate)(batch[:, :-1])
        balance = sum(jax.tree.leaves(sown))
        return cross_entropy(logits, batch) + 0.01 * balance

    return loss, params, TOKENS


@model
def every_other_layer_has_experts():
    """Two kinds of parameters in turn: subtrees that are alike in blocks of two."""
    layers = [
        each
        if n % 2 == 0
        else {"scale": each["scale"], "router": normal(WIDTH, 3)}
        | {"experts": normal(3, WIDTH, WIDTH)}
        for n, each in enumerate(layer(n) for n in range(6))
    ]
    params = parameters(0) | {"layers": layers}

    def run(params, x, batch):
        total = jnp.zeros(())
        for each in params["layers"]:
            if "up" in each:
                x = mlp(each, x)
                continue
            y = rms(x, each["scale"])
            gates, chosen = jax.lax.top_k(jax.nn.softmax(y @ each["router"]), 2)
            outs = jnp.einsum("btd,edf->btef", y, each["experts"])
            taken = jnp.take_along_axis(outs, chosen[..., None], 2)
            x = x + (taken * gates[..., None]).sum(2)
            total = total + jnp.mean(gates**2)
        return x, total

    return around(run), params, TOKENS


@model
def returned_hidden_states():
    """Metrics of each layer, in a list, beside a literal that differs by layer."""

    def loss(params, batch):
        x, norms = params["embed"][batch[:, :-1]], []
        for n, each in enumerate(params["layers"]):
            x = x + (mlp(each, x) - x) / np.sqrt(n + 1)
            norms.append(jnp.sqrt(jnp.mean(x**2)))
        logits = rms(x, params["norm"]) @ params["embed"].T
        return cross_entropy(logits, batch), {"norms": norms, "last": logits[:, -1]}

    return loss, parameters(5), TOKENS


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


@model
def rows_of_a_table_for_two_layers():
    """Each of two layers takes its row after its products, as Gemma 3n does."""
    params = parameters(2) | {"table": normal(VOCAB, 2, 8)}
    for each in params["layers"]:
        each |= {"gate": normal(WIDTH, 8), "out": normal(8, WIDTH)}

    def run(params, x, batch):
        x, rows = x * np.sqrt(WIDTH), params["table"][batch[:, :-1]]
        for n, each in enumerate(params["layers"]):
            x = mlp(each, x)
            x = x + (jax.nn.gelu(x @ each["gate"]) * rows[:, :, n]) @ each["out"]
        return x

    return around(run), params, TOKENS


@model
def layers_seen_by_slices():
    """A stack that is indexed by the layer in a loop of Python."""
    params = parameters(4)
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])

    def run(params, x, batch):
        for n in range(4):
            x = mlp(jax.tree.map(lambda x, n=n: x[n], params["layers"]), x)
        return x

    return around(run), params, TOKENS
