"""A loss that is taken apart, and the same one trained as everybody trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po

RATE, STEPS = 1e-3, 5


def value_of(made):
    return made[0] if isinstance(made, tuple) else made


def close(ours, theirs, tolerance=1e-5):
    """To a part of the largest parameter."""
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(theirs))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def trained(loss, params, frozen, batches, tx):
    """By `jax.grad`: parameters and losses."""
    state, losses = tx.init(params), []

    @jax.jit
    def step(params, state, frozen, batch):
        run = lambda params: value_of(loss(params, *frozen, batch))
        value, gradients = jax.value_and_grad(run)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for batch in batches:
        params, state, value = step(params, state, frozen, batch)
        losses.append(value)
    return params, losses


def by_layers(model, tx, params, batch, frozen=(), compiled=jax.jit, **where):
    """By a layerwise step: the stacked parameters and losses."""
    stacked, losses = model.stack(params), []
    fixed = [model.stack_frozen(x, **where) for x in frozen]
    args = stacked, model.init(tx, stacked), model.workspace(stacked)
    step = compiled(po.layerwise_step(model, tx))
    for _ in range(STEPS):
        *args, output = step(*args, batch, *fixed)
        losses.append(output.loss)
    return args[0], losses, fixed


def split(loss, params, batch, *frozen):
    given = {"frozen": frozen[0]} if frozen else {}
    return po.split_layers(loss, params, batch, **given)
