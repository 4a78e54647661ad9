"""BlackJAX's mean-field variational inference, with the caller's own loop."""

import blackjax
import jax
import jax.numpy as jnp

from clients import SIDE, X, Y


def log_density(position):
    prior = -0.5 * jnp.mean(position["weights"] ** 2)
    return prior - jnp.mean((X @ position["weights"] - Y) ** 2)


def train(adamw, folder):
    inference = blackjax.meanfield_vi(log_density, adamw(1e-3), num_samples=3)
    state = inference.init({"weights": jnp.zeros((SIDE, SIDE))})
    step, divergences = jax.jit(inference.step), []
    for key in jax.random.split(jax.random.key(0), 5):
        state, info = step(key, state)
        divergences.append(info.elbo)
    return divergences, (state.mu, state.rho), state.opt_state
