"""Models that scan over stacked parameters, by each library's own means."""

from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from helpers.zoo.plain import (
    TOKENS,
    VOCAB,
    WIDTH,
    Block,
    around,
    cross_entropy,
    mlp,
    parameters,
)

MODELS: dict[str, Callable[[], tuple]] = {}


def model(function: Callable[[], tuple]) -> Callable[[], tuple]:
    MODELS[function.__name__] = function
    return function


class NnxScanned(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan`, each computed again."""

    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return self.embed.attend(self.norm(run(self.embed(tokens), self.blocks)))


@model
def nnx_scan():
    graph, params = nnx.split(NnxScanned(rngs=nnx.Rngs(0)))

    def loss(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return loss, params, TOKENS


@model
def equinox_stacked():
    """`filter_vmap` makes the layers, and a scan takes the arrays of each in turn."""
    embed, head, layers = jax.random.split(jax.random.key(0), 3)
    make = lambda key: eqx.nn.MLP(WIDTH, WIDTH, 32, 1, key=key)
    parts = {
        "embed": eqx.nn.Embedding(VOCAB, WIDTH, key=embed),
        "layers": eqx.filter_vmap(make)(jax.random.split(layers, 4)),
        "head": eqx.nn.Linear(WIDTH, VOCAB, key=head),
    }
    params, static = eqx.partition(parts, eqx.is_inexact_array)

    def loss(params, batch):
        parts = eqx.combine(params, static)
        each = lambda f: jax.vmap(jax.vmap(f))
        arrays, others = eqx.partition(parts["layers"], eqx.is_array)

        def turn(x, own):
            return x + each(eqx.combine(own, others))(x), None

        x, _ = jax.lax.scan(turn, each(parts["embed"])(batch[:, :-1]), arrays)
        return cross_entropy(each(parts["head"])(x), batch)

    return loss, params, TOKENS


class LinenLayer(nn.Module):
    """Attention and a gated product, as MaxText calls them: the mask is broadcast."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.RMSNorm(name="pre_attention_norm")(x)
        x = x + nn.MultiHeadAttention(2, use_bias=False, name="attention")(y, mask=mask)
        y = nn.RMSNorm(name="pre_mlp_norm")(x)
        gate, up = (nn.Dense(32, use_bias=False, name=f"wi_{n}")(y) for n in (0, 1))
        y = nn.Dense(WIDTH, use_bias=False, name="wo")(nn.silu(gate) * up)
        y = nn.Dropout(self.dropout, broadcast_dims=(-2,))(y, deterministic)
        return x + y, None


class MaxTextLike(nn.Module):
    """A scanned decoder whose stacks have their layers on axis 1, computed again."""

    policy: Callable[..., bool] | None = None
    dropout: float = 0.0
    unroll: int = 1

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        embed = nn.Embed(VOCAB, WIDTH, name="token_embedder")
        remat = nn.remat(
            LinenLayer, policy=self.policy, prevent_cse=False, static_argnums=(3,)
        )
        layers = nn.scan(
            remat,
            variable_axes={"params": 1},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=4,
            unroll=self.unroll,
        )(self.dropout, name="layers")
        x, _ = layers(embed(tokens), nn.make_causal_mask(tokens), deterministic)
        return embed.attend(nn.RMSNorm(name="decoder_norm")(x))


def _maxtext(dropout: float = 0.0, **given):
    module = MaxTextLike(dropout=dropout, **given)
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))
    batch = {"tokens": TOKENS, "key": jax.random.key(1)}

    def loss(params, batch):
        logits = module.apply(
            params,
            batch["tokens"][:, :-1],
            deterministic=not dropout,
            rngs={"dropout": batch["key"]},
        )
        return cross_entropy(logits, batch["tokens"])

    return loss, params, batch


@model
def maxtext_axis_1():
    return _maxtext()


@model
def maxtext_policy():
    policies = jax.checkpoint_policies
    return _maxtext(policy=policies.dots_with_no_batch_dims_saveable)


@model
def maxtext_dropout():
    return _maxtext(dropout=0.1)


@model
def maxtext_unrolled():
    return _maxtext(unroll=2)


@model
def scan_of_two_layers():
    """Each turn of the scan has two layers, a local one and a global one."""
    params = parameters(6)
    pairs = [
        {"local": a, "global": b}
        for a, b in zip(params["layers"][::2], params["layers"][1::2], strict=True)
    ]
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *pairs)

    def run(params, x, batch):
        @jax.checkpoint
        def turn(x, each):
            x = mlp(each["local"], x)
            x = x + jnp.tanh(jnp.roll(x, 1, 1) @ each["global"]["up"])[..., :WIDTH]
            return mlp(each["global"], x), None

        return jax.lax.scan(turn, x, params["layers"])[0]

    return around(run), params, TOKENS


@model
def scan_of_layers_and_their_numbers():
    """The layer's number, a window of its own, and keys are scanned over too."""
    params = parameters(4)
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])

    def run(params, x, batch):
        keys = jax.random.split(batch["key"], 4)
        windows = jnp.array([2, 2, 8, 2])

        def turn(x, given):
            each, key, window, n = given
            kept = jax.random.bernoulli(key, 0.9, x.shape) & (n >= 0)
            near = jnp.arange(x.shape[1])[:, None] < window
            return mlp(each, x * near) * kept, None

        given = params["layers"], keys, windows, jnp.arange(4)
        return jax.lax.scan(turn, x, given)[0]

    return around(run), params, {"tokens": TOKENS, "key": jax.random.key(3)}
