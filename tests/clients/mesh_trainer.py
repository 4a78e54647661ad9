"""A trainer that divides a Linen model by logical axes, as MaxText and Flax's LM1B do.

Its shardings come from the modules' annotations, which know no memory kinds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from clients import SIDE, X, Y

RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        draw = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(draw, ("embed", "mlp"))
        down = nn.with_logical_partitioning(draw, ("mlp", "embed"))
        x = nn.gelu(nn.Dense(2 * SIDE, kernel_init=up)(x))
        x = nn.with_logical_constraint(x, ("batch", "mlp"))
        return nn.Dense(SIDE, kernel_init=down)(x)


def init_state(model, tx, key):
    params = model.init(key, X)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def mesh_shardings(abstract, mesh):
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)


def train_step(state, x, y):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(adamw, folder):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    model, key = Model(), jax.random.key(0)
    params = jax.eval_shape(model.init, key, X)["params"]
    shardings = mesh_shardings(params, mesh)
    tx = adamw(1e-3, shardings=shardings)  # paged_optax

    create = functools.partial(init_state, model, tx)
    state_shardings = mesh_shardings(jax.eval_shape(create, key), mesh)
    opt_state = po.state_shardings(tx, params, shardings)  # paged_optax
    state_shardings = state_shardings.replace(opt_state=opt_state)  # paged_optax

    data_sharding = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(
        train_step,
        in_shardings=(state_shardings, data_sharding, data_sharding),
        out_shardings=(state_shardings, None),
        donate_argnums=0,
    )
    losses = []
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        state = jax.jit(create, out_shardings=state_shardings)(key)
        for _ in range(5):
            state, loss = step(state, X, Y)
            losses.append(loss)
    return losses, nn.unbox(state.params), state.opt_state
