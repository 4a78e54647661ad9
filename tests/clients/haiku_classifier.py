"""A Haiku network, its training state in a named tuple."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from clients import SIDE, X, Y


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState


def train(adamw, folder):
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([2 * SIDE, SIDE])(x))
    )
    tx = adamw(1e-3)
    labels = jnp.argmax(Y, axis=1)

    def loss_of(params, x, labels):
        logits = network.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(state, x, labels):
        loss, gradients = jax.value_and_grad(loss_of)(state.params, x, labels)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        return TrainingState(
            optax.apply_updates(state.params, updates), opt_state
        ), loss

    params = network.init(jax.random.key(0), X)
    state, losses = TrainingState(params, tx.init(params)), []
    for _ in range(5):
        state, loss = train_step(state, X, labels)
        losses.append(loss)
    return losses, state.params, state.opt_state
