"""Transformers of Haiku: modules by name, and `layer_stack`; dropout, and remat."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, VOCAB = 16, 32
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 9))


def norm(x):
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


class Block(hk.Module):
    def __init__(self, rate, name=None):
        super().__init__(name)
        self.rate = rate

    def __call__(self, x):
        mask = jnp.tri(x.shape[1])[None, None]
        attention = hk.MultiHeadAttention(
            2, WIDTH // 2, w_init=hk.initializers.VarianceScaling(1.0)
        )
        y = norm(x)
        x = x + attention(y, y, y, mask)
        y = hk.nets.MLP([2 * WIDTH, WIDTH], activation=jax.nn.gelu)(norm(x))
        if self.rate:
            y = hk.dropout(hk.next_rng_key(), self.rate, y)
        return x + y


def decoder(tokens, *, count=3, rate=0.0, remat=False, stacked=False):
    x = hk.Embed(VOCAB, WIDTH)(tokens)
    if stacked:
        around = hk.experimental.layer_stack(count, name="stack")
        return hk.Linear(VOCAB)(norm(around(lambda x: Block(rate, "h")(x))(x)))
    for _ in range(count):
        block = Block(rate, "h")
        x = (hk.remat(block) if remat else block)(x)
    return hk.Linear(VOCAB)(norm(x))


def made(**how):
    network = hk.transform(functools.partial(decoder, **how))

    def loss(params, batch):
        tokens = batch["tokens"]
        logits = network.apply(params, batch["key"], tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = network.init(jax.random.key(0), TOKENS[:, :-1])
    return loss, params, {"tokens": TOKENS, "key": jax.random.PRNGKey(1)}


MODELS = {
    "by_name": made,
    "by_name_dropout": functools.partial(made, rate=0.2),
    "by_name_remat_dropout": functools.partial(made, remat=True, rate=0.2),
    "layer_stack": functools.partial(made, stacked=True),
    "layer_stack_dropout": functools.partial(made, stacked=True, rate=0.2),
}
