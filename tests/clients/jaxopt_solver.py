"""JAXopt's `OptaxSolver`, which loops until its error is small enough."""

import warnings

import jax.numpy as jnp

with warnings.catch_warnings():
    # JAXopt says that it is no longer maintained. Many use it still.
    warnings.simplefilter("ignore", DeprecationWarning)
    import jaxopt

from clients import SIDE, X, Y


def loss_of(params, x, y):
    return jnp.mean((x @ params["kernel"] - y) ** 2)


def train(adamw, folder):
    params = {"kernel": jnp.zeros((SIDE, SIDE))}
    losses = []
    for steps in (1, 5):
        solver = jaxopt.OptaxSolver(loss_of, adamw(1e-3), maxiter=steps)
        found, state = solver.run(params, x=X, y=Y)
        losses.append(state.value)
    return losses, found, state.internal_state
