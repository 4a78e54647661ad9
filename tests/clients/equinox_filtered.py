"""An Equinox model of which a filter trains a part, as for fine-tuning."""

import equinox as eqx
import jax
import jax.numpy as jnp

from clients import SIDE, X, Y


def train(adamw, folder):
    model = eqx.nn.MLP(SIDE, SIDE, 2 * SIDE, 2, key=jax.random.key(0))
    weights = lambda model: [layer.weight for layer in model.layers[1:]]
    trained = jax.tree.map(lambda _: False, model)
    trained = eqx.tree_at(weights, trained, [True, True])
    tx = adamw(1e-3)
    opt_state = tx.init(eqx.filter(model, trained))

    def loss_of(trained_part, frozen_part, x, y):
        model = eqx.combine(trained_part, frozen_part)
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, opt_state):
        parts = eqx.partition(model, trained)
        loss, gradients = eqx.filter_value_and_grad(loss_of)(*parts, *batch)
        updates, opt_state = tx.update(gradients, opt_state, parts[0])
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(5):
        model, opt_state, loss = train_step((X, Y), model, opt_state)
        losses.append(loss)
    return losses, eqx.filter(model, eqx.is_array), opt_state
