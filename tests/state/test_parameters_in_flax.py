"""One parameter's state in `nnx.Optimizer`, and in Linen's `TrainState`."""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import paged_optax as po
from helpers.moments import adam
from helpers.reference import assert_equal, kinds


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 40, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[0](x) + self.layers[1](x)


def nnx_optimizer(**paging):
    model, tx = Block(nnx.Rngs(0)), adam(**paging)
    return model, tx, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_nnx_optimizer_moments():
    """`optimizer.opt_state` holds nnx Variables: paths end in `/value`, or not."""
    model, _, optimizer = nnx_optimizer()
    optimizer.update(model, nnx.state(model, nnx.Param))
    state = optimizer.opt_state
    for path in ("layers/0/kernel", "layers/0/kernel/value"):
        found = po.page_in(state, path)
        assert_equal(found["mu"], state[0].mu["layers"][0]["kernel"].get_value())
        assert not po.is_device_resident(state, path)
    new = po.page_out(state, "layers/0/kernel", po.page_in(state, "layers/0/kernel"))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert_equal(new, state)
    assert po.host_bytes(state) == 2 * 2 * 4 * (32 * 40 + 40)
    assert po.host_bytes(state, "layers/1") == po.host_bytes(state) / 2
    assert po.device_resident_count(state) == 0
    optimizer.opt_state = new
    optimizer.update(model, nnx.state(model, nnx.Param))


def test_nnx_optimizer_steps():
    model, _, optimizer = nnx_optimizer()
    for _ in range(3):
        optimizer.update(model, nnx.state(model, nnx.Param))
    assert int(po.get_step(optimizer.opt_state, "layers/0/kernel")) == 3


def test_nnx_optimizer_own_steps():
    model, _, optimizer = nnx_optimizer(per_parameter_steps=True)
    optimizer.update(model, nnx.state(model, nnx.Param))
    state = po.increment_step(optimizer.opt_state, "layers/0/kernel")
    assert int(po.get_step(state, "layers/0/kernel")) == 2
    assert int(po.get_step(state, "layers/1/kernel")) == 1


def test_nnx_optimizer_init_param():
    model, tx, optimizer = nnx_optimizer()
    optimizer.update(model, nnx.state(model, nnx.Param))
    params = nnx.state(model, nnx.Param)
    state = po.init_param(tx, optimizer.opt_state, params, "layers/0/kernel")
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    assert float(jnp.abs(po.page_in(state, "layers/0/kernel")["mu"]).max()) == 0
    assert float(jnp.abs(po.page_in(state, "layers/1/kernel")["mu"]).max()) > 0
    optimizer.opt_state = state
    optimizer.update(model, nnx.state(model, nnx.Param))


def test_nnx_optimizer_rebalance():
    kernel = 2 * 4 * 32 * 40
    model, tx, optimizer = nnx_optimizer(device_budget=kernel)
    recent = ["layers/0/kernel", "layers/1/kernel"]
    optimizer.opt_state = po.rebalance(tx, optimizer.opt_state, recent)
    state = optimizer.opt_state
    assert [po.is_device_resident(state, path) for path in recent] == [False, True]
    assert po.device_bytes(state, "layers") == kernel
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert po.is_device_resident(optimizer.opt_state, "layers/1/kernel")


def test_nnx_abstract_state():
    model, tx, optimizer = nnx_optimizer()
    params = nnx.state(model, nnx.Param)
    target = po.abstract_state(tx, params)
    assert jax.tree.structure(target) == jax.tree.structure(tx.init(params))
    assert kinds(target) == kinds(optimizer.opt_state)


def test_linen_train_state():
    model = linen.Dense(70)
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam())
    train = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for _ in range(2):
        train = train.apply_gradients(grads=params)
    path = "params/kernel"
    moments = po.page_in(train.opt_state, path)
    assert_equal(moments["mu"], optax.tree.get(train, "mu")["params"]["kernel"])
    assert int(po.get_step(train.opt_state, path)) == 2
    new = train.replace(opt_state=po.page_out(train.opt_state, path, moments))
    assert_equal(new.opt_state, train.opt_state)
    assert kinds(new.opt_state) == kinds(train.opt_state)
    again = po.init_param(tx, train.opt_state, params, "params/bias")
    assert float(jnp.abs(po.page_in(again, "params/bias")["nu"]).max()) == 0
    assert po.page_in(again, path)["nu"].max() > 0
    assert_equal(
        train.replace(opt_state=po.rebalance(tx, new.opt_state, [])).opt_state,
        train.opt_state,
    )
