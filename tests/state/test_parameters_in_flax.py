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


FIRST, SECOND = (f"layers/{i}/kernel" for i in (0, 1))


def test_an_nnx_optimizer():
    """`optimizer.opt_state` holds nnx Variables: paths end in `/value`, or not."""
    size = 2 * 4 * 32 * 40
    tx = adam(per_parameter_steps=True, device_budget=size)
    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    structure = jax.tree.structure
    assert structure(po.abstract_state(tx, params)) == structure(tx.init(params))
    optimizer.opt_state = po.rebalance(tx, optimizer.opt_state, [])
    optimizer.update(model, params)
    state = optimizer.opt_state
    for path in (FIRST, f"{FIRST}/value"):
        found = po.page_in(state, path)
        assert_equal(found["mu"], state[0].mu["layers"][0]["kernel"].get_value())
        assert not po.is_device_resident(state, path)
    new = po.page_out(state, FIRST, po.page_in(state, FIRST))
    assert structure(new) == structure(state)
    assert_equal(new, state)
    assert po.host_bytes(state) == 2 * (size + 2 * 4 * 40)
    assert po.host_bytes(state, "layers/1") == po.host_bytes(state) / 2
    assert po.device_resident_count(state) == 0
    optimizer.opt_state = po.increment_step(new, FIRST)
    optimizer.update(model, params)
    state = optimizer.opt_state
    assert [int(po.get_step(state, path)) for path in (FIRST, SECOND)] == [3, 2]
    state = po.init_param(tx, state, params, FIRST)
    assert structure(state) == structure(optimizer.opt_state)
    assert float(jnp.abs(po.page_in(state, FIRST)["mu"]).max()) == 0
    assert float(jnp.abs(po.page_in(state, SECOND)["mu"]).max()) > 0
    optimizer.opt_state = po.rebalance(tx, state, [FIRST, SECOND])
    optimizer.update(model, params)
    state = optimizer.opt_state
    assert [po.is_device_resident(state, path) for path in (FIRST, SECOND)] == [0, 1]
    assert po.device_bytes(state, "layers") == size


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
