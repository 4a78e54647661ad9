"""What a transformation chooses of stacks that the loss itself has."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po

BATCH = jnp.arange(20) % 7


def by_shape(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


TRANSFORMATIONS = {
    "mask": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=by_shape),
    "lamb": lambda: optax.lamb(1e-1),
    "paged_lamb": lambda: po.paged_lamb(1e-1, min_paged_size="1B"),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_what_the_loss_has_stacked_is_optaxs(name):
    """Masks by shape, and norms of small stacks, are those of the loss's own tree."""

    def scanned(params, batch):
        turn = lambda x, each: (x + jnp.tanh(each["scale"] * x @ each["up"]), None)
        x, _ = jax.lax.scan(turn, params["embed"][batch], params["layers"])
        return jnp.mean(x**2)

    layers = {"up": jnp.full((3, 8, 8), 0.1), "scale": jnp.ones((3, 8))}
    params = {"embed": jnp.eye(30, 8), "layers": layers}
    tx = TRANSFORMATIONS[name]()
    updates, _ = tx.update(jax.grad(scanned)(params, BATCH), tx.init(params), params)
    wanted = optax.apply_updates(params, updates)
    model = po.split_layers(scanned, params, BATCH)
    stacked = model.stack(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = jax.jit(po.layerwise_step(model, tx))
    made, *_ = step(stacked, model.init(tx, stacked), model.workspace(stacked), BATCH)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        model.unstack(made),
        wanted,
    )
