"""A small decoder in layers, for the layerwise step and for a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from paged_optax.backend.memory import on_host

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


MODEL = po.LayerwiseModel(prologue, layer, epilogue)


def layerwise(tx, **settings):
    return po.layerwise_step(MODEL, tx, **settings)


def mean(loss):
    """A loss of micro-batches."""
    return lambda params, batch: jnp.mean(jax.lax.map(lambda b: loss(params, b), batch))


def plain_step(tx, accumulate=False):
    """`jax.grad` of the whole model, and Optax."""
    whole = mean(loss) if accumulate else loss

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(whole)(params, batch)
        updates, state = tx.update(gradients, state, params)
        norm = optax.tree.norm(gradients)
        return optax.apply_updates(params, updates), state, value, norm, gradients

    return step


def by_optax(loss, tx, params, batches, max_norm=None, look=lambda _, said: said):
    """Parameters, the state of `tx`, and each step's loss and norm, by Optax."""
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    clipped, said = optax.chain(clip, tx), []
    state = clipped.init(params)

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = clipped.update(gradients, state, params)
        output = value, optax.tree.norm(gradients)
        return optax.apply_updates(params, updates), state, output

    for batch in batches:
        params, state, output = step(params, state, batch)
        said.append(look(state[1], output))
    return params, state[1], said


def trained(
    model,
    tx,
    params,
    batches,
    *fixed,
    offloaded=None,
    donated=True,
    look=lambda _, said: said,
    **how,
):
    """The same by layerwise steps, of which a deferred one is finished.

    Weights of layers of at least `offloaded` bytes are in host memory.
    """
    names = {"dtype", "host_dtype", "device_dtype", "rest"} & how.keys()
    workspace = model.workspace(params, **{name: how.pop(name) for name in names})
    step = po.layerwise_step(model, tx, **how)
    if offloaded is not None:
        params = params | {"layers": po.offload(params["layers"], offloaded)}
        assert any(map(on_host, jax.tree.leaves(params["layers"])))
    args, said = (params, tx.init(params), workspace), []
    compiled = None if donated else jax.jit(step)
    for batch in batches:
        given = *args, batch, *fixed
        compiled = compiled or po.jit_step(step, *given, donate_argnums=(0, 1, 2))
        *args, output = compiled(*given)
        said.append(look(args[1], (output.loss, output.gradient_norm)))
    if args[2].pending is not None:
        finish = jax.jit(step.finish)
        args = finish(*args)
        again = finish(*args)
        assert not again[2].pending.waits
        jax.tree.map(np.testing.assert_array_equal, again[:2], tuple(args[:2]))
    return *args[:2], said


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
