"""Transformers of Equinox: a list of modules, and one module of stacked arrays."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, VOCAB = 16, 32
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 9))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.RMSNorm]
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key, rate):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[0])
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, key):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=key)


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block] | Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    remat: bool = eqx.field(static=True)

    def __init__(self, key, count, rate, remat, stacked):
        keys, make = jax.random.split(key), lambda key: Block(key, rate)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[1])
        keys = jax.random.split(key, count)
        self.blocks = eqx.filter_vmap(make)(keys) if stacked else [*map(make, keys)]
        self.remat = remat

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens)
        run = self.listed if isinstance(self.blocks, list) else self.scanned
        return jax.vmap(self.head)(jax.vmap(self.norm)(run(x, key)))

    def listed(self, x, key):
        keys = jax.random.split(key, len(self.blocks))
        for block, k in zip(self.blocks, keys, strict=True):
            x = (eqx.filter_checkpoint(block) if self.remat else block)(x, k)
        return x

    def scanned(self, x, key):
        arrays, others = eqx.partition(self.blocks, eqx.is_array)
        count = len(jax.tree.leaves(arrays)[0])

        def turn(x, given):
            block, k = given
            return eqx.combine(block, others)(x, k), None

        turn = jax.checkpoint(turn) if self.remat else turn
        return jax.lax.scan(turn, x, (arrays, jax.random.split(key, count)))[0]


def made(stacked, rate=0.0, remat=False):
    model = Decoder(jax.random.key(0), 3, rate, remat, stacked)
    params, others = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        model = eqx.combine(params, others)
        keys = jax.random.split(batch["key"], len(batch["tokens"]))
        logits = jax.vmap(model)(batch["tokens"][:, :-1], keys)
        labels = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, params, {"tokens": TOKENS, "key": jax.random.key(1)}


MODELS = {
    f"{name}{suffix}": functools.partial(made, stacked, **how)
    for name, stacked in (("list", False), ("stacked", True))
    for suffix, how in (("", {}), ("_remat_dropout", {"remat": True, "rate": 0.2}))
}
