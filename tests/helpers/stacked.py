"""A layerwise step of a small stack, beside `jax.grad` and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po

SETTINGS = {"page_size": 4096, "min_paged_size": 0}
STACK = {"w": jnp.full((2, 64, 64), 0.01)}
BATCH = jnp.ones((4, 64))


def start(rest, batch):
    return batch, None


def layer(weights, x, context, i):
    return x + x @ weights["w"], None


def finish(rest, x, kept, batch):
    return jnp.mean(jnp.abs(x) ** 2)


def mean_loss(functions, accumulate=False):
    """The loss as one function of all parameters, for `jax.grad`."""
    prologue, layer, epilogue = functions

    def loss(params, batch):
        rest = {name: params[name] for name in params if name != "layers"}
        x, context = prologue(rest, batch)
        kept = []
        for i in range(len(jax.tree.leaves(params["layers"])[0])):
            weights = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            x, made = layer(weights, x, context, jnp.int32(i))
            kept.append(made)
        result = epilogue(
            rest, x, jax.tree.map(lambda *xs: jnp.stack(xs), *kept), batch
        )
        return result[0] if isinstance(result, tuple) else result

    if not accumulate:
        return loss
    each = lambda batch: [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(3)]
    return lambda params, batch: sum(loss(params, b) for b in each(batch)) / 3


def both(
    params,
    tx,
    functions=(start, layer, finish),
    batch=BATCH,
    host_dtype=None,
    device_dtype=None,
    offloaded=False,
    **how,
):
    """One layerwise step, and one of `jax.grad` and the same transformation."""
    step = jax.jit(po.layerwise_step(po.LayerwiseModel(*functions), tx, **how))
    workspace = po.GradientWorkspace.allocate(
        params["layers"], host_dtype=host_dtype, device_dtype=device_dtype
    )
    layers = po.offload(params["layers"], 0) if offloaded else params["layers"]
    given = params | {"layers": layers} if offloaded else params
    found = step(given, tx.init(params), workspace, batch)
    loss = mean_loss(functions, how.get("accumulate", False))

    @jax.jit
    def plain(params, state, batch):
        gradients = jax.grad(loss)(params, batch)
        norm = optax.tree.norm(gradients)
        if how.get("max_norm"):
            clip = optax.clip_by_global_norm(how["max_norm"])
            gradients, _ = clip.update(gradients, optax.EmptyState())
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, norm

    return found, plain(params, tx.init(params), batch)


def same(found, wanted, rtol=2e-6):
    """Same tree, same numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(found)[0],
        jax.tree.leaves(wanted),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(a),
            np.asarray(b),
            rtol,
            rtol * float(np.max(np.abs(np.asarray(b)), initial=0.0)),
            err_msg=jax.tree_util.keystr(path),
        )
