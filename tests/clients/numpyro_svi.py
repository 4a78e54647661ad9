"""NumPyro's variational inference of a regression's weights, which it loops itself."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro

from clients import SIDE, X, Y


def model(x, y):
    prior = dist.Normal(jnp.zeros((SIDE, SIDE)), 0.1).to_event(2)
    weights = numpyro.sample("weights", prior)
    numpyro.sample("y", dist.Normal(x @ weights, 0.5).to_event(2), obs=y)


def train(adamw, folder):
    optimizer = optax_to_numpyro(adamw(1e-3))
    svi = SVI(model, AutoNormal(model), optimizer, Trace_ELBO())
    result = svi.run(jax.random.key(0), 5, X, Y, progress_bar=False)
    _, (_, opt_state) = result.state.optim_state
    return result.losses, result.params, opt_state
