"""A Linen `TrainState` that `flax.serialization` writes to a file and reads back."""

import functools

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

import paged_optax as po
from clients import SIDE, X, Y

MODEL = nn.Sequential([nn.Dense(2 * SIDE), nn.gelu, nn.Dense(SIDE)])


def create(adamw, seed):
    params = MODEL.init(jax.random.key(seed), X)["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=adamw(1e-3))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, x, y):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(adamw, folder):
    state, losses = create(adamw, seed=0), []
    for number in range(6):
        if number == 3:
            (folder / "state").write_bytes(flax.serialization.to_bytes(state))
            state = create(adamw, seed=1)
            saved = (folder / "state").read_bytes()
            state = flax.serialization.from_bytes(state, saved)
            opt_state = po.place_state(state.tx, state.opt_state, state.params)
            state = state.replace(opt_state=opt_state)  # paged_optax
        state, loss = train_step(state, X, Y)
        losses.append(loss)
    return losses, state.params, state.opt_state
