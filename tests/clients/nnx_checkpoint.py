"""An NNX model that Orbax restores, into an abstract target and a concrete one."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

import paged_optax as po
from clients import SIDE, X, Y


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(SIDE, 2 * SIDE, rngs=rngs)
        self.down = nnx.Linear(2 * SIDE, SIDE, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x, y):
    loss_of = lambda model: jnp.mean((model(x) - y) ** 2)
    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def place(model, optimizer):  # paged_optax
    params = nnx.state(model, nnx.Param)
    state = po.place_state(optimizer.tx, optimizer.opt_state, params)
    optimizer.opt_state = nnx.data(state)


def train(adamw, folder):
    def create(seed):
        model = Model(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, adamw(1e-3), wrt=nnx.Param)

    checkpointer = ocp.StandardCheckpointer()
    model, optimizer = create(0)
    losses = [train_step(model, optimizer, X, Y) for _ in range(2)]
    checkpointer.save(folder / "first", nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()

    # An abstract target: what is restored goes where the target says.
    model, optimizer = nnx.eval_shape(lambda: create(1))
    place(model, optimizer)  # paged_optax
    graph, target = nnx.split((model, optimizer))
    state = checkpointer.restore(folder / "first", target)
    model, optimizer = nnx.merge(graph, state)
    losses += [train_step(model, optimizer, X, Y) for _ in range(2)]
    checkpointer.save(folder / "second", nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()

    # A concrete target: the model and the optimizer that are there already.
    model, optimizer = create(2)
    target = nnx.state((model, optimizer))
    nnx.update((model, optimizer), checkpointer.restore(folder / "second", target))
    place(model, optimizer)  # paged_optax
    losses += [train_step(model, optimizer, X, Y) for _ in range(2)]
    return losses, nnx.state(model), nnx.state(optimizer)
