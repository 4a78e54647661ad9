"""Models of the structure of Flax's examples gemma and lm1b, in our own words.

Flax does not ship its examples in its package. Names of parameters, the order of
layers, masks and dropout are as there; sizes are small.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from helpers.zoo.families import causal, turned
from helpers.zoo.plain import TOKENS, VOCAB, WIDTH, cross_entropy

MODELS: dict[str, Callable[[], tuple]] = {}


def model(function: Callable[[], tuple]) -> Callable[[], tuple]:
    MODELS[function.__name__] = function
    return function


class Lm1bBlock(nn.Module):
    """Attention and a product, with dropout of both."""

    dropout: float

    @nn.compact
    def __call__(self, inputs, mask):
        x = nn.MultiHeadDotProductAttention(
            2, use_bias=False, dropout_rate=self.dropout, broadcast_dropout=False
        )(nn.LayerNorm()(inputs), mask=mask, deterministic=not self.dropout)
        x = nn.Dropout(self.dropout, deterministic=not self.dropout)(x) + inputs
        partitioned = nn.with_logical_partitioning
        init = nn.initializers.xavier_uniform()
        y = nn.Dense(48, kernel_init=partitioned(init, ("embed", "mlp")))(
            nn.LayerNorm()(x)
        )
        y = nn.Dropout(self.dropout, deterministic=not self.dropout)(nn.relu(y))
        y = nn.Dense(WIDTH, kernel_init=partitioned(init, ("mlp", "embed")))(y)
        return x + nn.Dropout(self.dropout, deterministic=not self.dropout)(y)


class Lm1b(nn.Module):
    """Packed sequences: positions and segments are in the batch."""

    dropout: float

    @nn.compact
    def __call__(self, inputs, positions, segments):
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0),
            nn.make_causal_mask(inputs),
            nn.make_attention_mask(segments, segments, jnp.equal),
        )
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
        y = embed(shifted * (segments == before))
        table = self.param("pos_embedding", nn.initializers.normal(0.1), (16, WIDTH))
        y = y + jnp.take(table, positions, 0)
        y = nn.Dropout(self.dropout, deterministic=not self.dropout)(y)
        for n in range(3):
            y = Lm1bBlock(self.dropout, name=f"encoderdecoderblock_{n}")(y, mask)
        y = nn.LayerNorm(name="encoderdecoder_norm")(y)
        return embed.attend(y) / jnp.sqrt(WIDTH)


def _lm1b(dropout: float):
    module = Lm1b(dropout)
    inputs = jnp.asarray(TOKENS)
    row = jnp.arange(TOKENS.shape[1])
    batch = {
        "inputs": inputs,
        "positions": jnp.broadcast_to(row % 5, inputs.shape),
        "segments": jnp.broadcast_to(1 + row // 5, inputs.shape),
        "key": jax.random.key(5),
    }
    given = batch["inputs"], batch["positions"], batch["segments"]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, *given)

    def loss(params, batch):
        given = batch["inputs"], batch["positions"], batch["segments"]
        rngs = {"dropout": batch["key"]} if dropout else {}
        logits = module.apply({"params": params}, *given, rngs=rngs)
        weights = (batch["inputs"] > 0).astype(jnp.float32)
        confidence, low = 0.9, 0.1 / (VOCAB - 1)
        soft = jax.nn.one_hot(batch["inputs"], VOCAB) * (confidence - low) + low
        losses = -jnp.sum(soft * nn.log_softmax(logits), -1) * weights
        return losses.sum() / weights.sum(), logits

    return loss, nn.meta.unbox(variables["params"]), batch


@model
def flax_lm1b():
    return _lm1b(0.0)


@model
def flax_lm1b_dropout():
    return _lm1b(0.1)


@model
def flax_lm1b_boxed():
    """With the boxes that Flax puts around parameters that have logical axes."""
    module = Lm1b(0.0)
    loss, _, batch = _lm1b(0.0)
    given = batch["inputs"], batch["positions"], batch["segments"]
    boxed = module.init({"params": jax.random.key(0)}, *given)["params"]
    return loss, boxed, batch


class GemmaNorm(nnx.Module):
    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.zeros(size))

    def __call__(self, x):
        mean = jnp.mean(jnp.square(x), -1, keepdims=True)
        return x * jax.lax.rsqrt(mean + 1e-6) * (1 + self.scale[...])


class GemmaAttention(nnx.Module):
    """Queries, keys and values of one product; local ones see a window."""

    def __init__(self, local: bool, *, rngs: nnx.Rngs):
        self.local = local
        half = WIDTH // 2
        self.qkv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (3, 2, WIDTH, half), rngs=rngs)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (2, half, WIDTH), rngs=rngs)
        self._query_norm, self._key_norm = GemmaNorm(half), GemmaNorm(half)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, mask, rngs):
        q, k, v = self.qkv_einsum(x)
        base = 1e4 if self.local else 1e6
        flat = lambda x: x.reshape(*x.shape[:2], WIDTH)
        turn = lambda x: turned(flat(x), base).reshape(x.shape)
        q, k = turn(self._query_norm(q)) * 0.25, turn(self._key_norm(k))
        if self.local:
            ones = jnp.ones_like(mask)
            mask = mask * jnp.triu(ones, -2) * jnp.tril(ones, 2)
        scores = jnp.einsum("BTNH,BSNH->BTNS", q, k)
        scores = jnp.tanh(scores / 50.0) * 50.0
        scores = jnp.where(jnp.expand_dims(mask, -2), scores, -2.3819763e38)
        probs = self.dropout(jax.nn.softmax(scores, -1), rngs=rngs)
        return self.attn_vec_einsum(jnp.einsum("BTNS,BSNH->BTNH", probs, v))


class GemmaBlock(nnx.Module):
    def __init__(self, local: bool, *, rngs: nnx.Rngs):
        linear = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)
        self.pre_attention_norm = GemmaNorm(WIDTH)
        self.attn = GemmaAttention(local, rngs=rngs)
        self.post_attention_norm = GemmaNorm(WIDTH)
        self.pre_ffw_norm = GemmaNorm(WIDTH)
        self.gate_proj, self.up_proj = linear(WIDTH, 32), linear(WIDTH, 32)
        self.down_proj = linear(32, WIDTH)
        self.post_ffw_norm = GemmaNorm(WIDTH)

    def __call__(self, x, mask, rngs):
        y = self.attn(self.pre_attention_norm(x), mask, rngs)
        x = x + self.post_attention_norm(y)
        y = self.pre_ffw_norm(x)
        y = self.down_proj(nnx.gelu(self.gate_proj(y)) * self.up_proj(y))
        return x + self.post_ffw_norm(y)


class Gemma(nnx.Module):
    """Local and global layers in turn, tied embeddings, and capped logits."""

    def __init__(self, layers: int, *, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [GemmaBlock(n % 3 != 2, rngs=rngs) for n in range(layers)]
        )
        self.final_norm = GemmaNorm(WIDTH)
        self.final_dropout = nnx.Dropout(0.1)

    def __call__(self, tokens, mask, rngs):
        x = self.embedder(tokens) * jnp.sqrt(WIDTH)
        for layer in self.layers:
            x = layer(x, mask, rngs)
        x = self.final_dropout(self.final_norm(x), rngs=rngs)
        return jnp.tanh(self.embedder.attend(x) / 30.0) * 30.0


def _gemma(layers: int):
    made = Gemma(layers, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(made, nnx.Param, ...)

    def loss(params, batch):
        tokens = batch["tokens"][:, :-1]
        mask = (tokens >= 0)[:, None] * (causal(tokens.shape[1]) == 0)
        module = nnx.merge(graph, params, others)
        logits = module(tokens, mask, nnx.Rngs(batch["key"]))
        return cross_entropy(logits, batch["tokens"]), logits

    return loss, params, {"tokens": TOKENS, "key": jax.random.key(11)}


@model
def flax_gemma():
    return _gemma(6)


@model
def flax_gemma_one_global():
    """Three layers: the last kind is there once."""
    return _gemma(3)
