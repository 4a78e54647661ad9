"""A small decoder in layers, for the layerwise step and for a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po

HIDDEN, WORDS = 64, 96
SETTINGS = {"page_size": "16KiB", "min_paged_size": "16KiB"}


def parameters(layers, tied=False, dtype=jnp.float32, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, dtype) * 0.1
    params = {
        "embed": normal(WORDS, HIDDEN),
        "layers": {
            "norm": {"scale": jnp.ones((layers, HIDDEN), dtype)},
            "up": normal(layers, HIDDEN, 2 * HIDDEN),
            "down": normal(layers, 2 * HIDDEN, HIDDEN),
        },
        "norm": jnp.ones(HIDDEN, dtype),
    }
    return params if tied else params | {"head": normal(HIDDEN, WORDS)}


def batch(seed=0, shape=(4, 8)):
    key = jax.random.key(seed + 100)
    tokens = jax.random.randint(key, shape, 0, WORDS)
    keys = jax.random.split(key, shape[:-2]) if len(shape) > 2 else key
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=-1), "key": keys}


def _normalised(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def prologue(rest, batch):
    context = {"table": jnp.linspace(0.5, 1.5, 16), "key": batch["key"]}
    return rest["embed"][batch["tokens"]], context


def layer(weights, x, context, i):
    y = _normalised(x, weights["norm"]["scale"])
    y = jnp.cumsum(y, axis=-2) * context["table"][i].astype(y.dtype)
    key = jax.random.fold_in(context["key"], i)
    y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0)  # dropout
    x = x + jax.nn.gelu(y @ weights["up"]) @ weights["down"]
    return x, {"balance": jnp.mean(x * x), "largest": jnp.argmax(x)}


def epilogue(rest, x, kept, batch):
    x = _normalised(x, rest["norm"])
    head = rest["head"] if "head" in rest else rest["embed"].T
    loss = optax.softmax_cross_entropy_with_integer_labels(
        (x @ head).astype(jnp.float32), batch["targets"]
    ).mean()
    return loss + 0.01 * kept["balance"].mean(), {"cross_entropy": loss}


def loss(params, batch):
    """The same as one function of all parameters."""
    rest = {name: x for name, x in params.items() if name != "layers"}
    x, context = prologue(rest, batch)
    length = len(jax.tree.leaves(params["layers"])[0])
    x, kept = jax.lax.scan(
        lambda x, given: layer(given[1], x, context, given[0]),
        x,
        (jnp.arange(length), params["layers"]),
    )
    return epilogue(rest, x, kept, batch)[0]


def layerwise(tx, **settings):
    return po.layerwise_step(
        po.LayerwiseModel(prologue, layer, epilogue), tx, **settings
    )


def plain_step(tx, accumulate=False):
    """`jax.grad` of the whole model, and Optax."""

    def mean(params, batch):
        if not accumulate:
            return loss(params, batch)
        return jnp.mean(jax.lax.map(lambda b: loss(params, b), batch))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(mean)(params, batch)
        updates, state = tx.update(gradients, state, params)
        norm = optax.tree.norm(gradients)
        return optax.apply_updates(params, updates), state, loss, norm, gradients

    return step


def far(found, wanted):
    """The largest distance of two leaves, relative to the leaf's norm."""
    wide = lambda x: np.asarray(x, np.float64)
    return max(
        np.linalg.norm(wide(a) - wide(b)) / max(np.linalg.norm(wide(b)), 1e-30)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


def run(step, params, state, workspace, batches):
    compiled = None
    for batch in batches:
        args = params, state, workspace, batch
        compiled = compiled or po.jit_step(step, *args, donate_argnums=(0, 1, 2))
        params, state, workspace, output = compiled(*args)
    return params, state, workspace, output
