"""A parameter's moments by its path: read, put back, in groups, unknown, in Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import paged_optax as po
from helpers.moments import (
    BUDGET,
    KERNEL,
    WRAPPERS,
    A,
    B,
    C,
    adam,
    filled,
    nested,
    paths,
    place_on,
    small,
)
from helpers.reference import assert_equal, kinds
from helpers.small import HOST


@pytest.fixture
def state():
    return filled(adam().init(nested()))


def test_moments_that_are_read_are_nobody_elses():
    """`page_in` copies: what is done to its result leaves the state alone."""
    state = filled(adam(device_budget=None).init(small()))
    wanted = jax.tree.map(np.array, state)
    change = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)
    change(po.page_in(state, "b"))
    assert_equal(state, wanted)


def test_under_jit(state):
    @jax.jit
    def double(state):
        moments = po.page_in(state, KERNEL)
        return po.page_out(state, KERNEL, jax.tree.map(lambda x: 2 * x, moments))

    new = double(state)
    assert kinds(new) == kinds(state)
    wanted = jax.tree.map(lambda x: 2 * x, po.page_in(state, KERNEL))
    assert_equal(po.page_in(new, KERNEL), wanted)
    own = adam(per_parameter_steps=True).init(nested())
    more = jax.jit(lambda state: po.increment_step(state, KERNEL))(own)
    assert int(po.get_step(more, KERNEL)) == 1
    assert kinds(more) == kinds(own)


@pytest.mark.parametrize("numpy", [False, True], ids=["jax", "numpy"])
@pytest.mark.parametrize("where", ["device", "mesh"])
def test_moments_go_back_beside_their_parameter(where, numpy):
    """To the device or the shards that they came from, whatever they are given as."""
    sharding = place_on(where)
    params = jax.device_put({"w": jnp.ones((64, 64))}, sharding)
    state = adam().init(params)
    moments = po.page_in(state, "w")
    assert moments["mu"].sharding.is_equivalent_to(sharding, 2)
    if numpy:
        moments = jax.tree.map(np.asarray, moments)
    new = po.page_out(state, "w", moments)
    for x in (new[0].mu["w"], new[0].nu["w"]):
        assert x.sharding.is_equivalent_to(sharding.with_memory_kind(HOST), 2)
    adam().update(params, new, params)


def test_unknown_key_path(state):
    with pytest.raises(ValueError, match="'blocks/1/q/bias'.*Close names"):
        po.page_in(state, (*paths(nested())[2][:-1], jax.tree_util.DictKey("bias")))


def test_a_masked_parameter_is_unknown():
    tx = WRAPPERS["masked"](adam())
    with pytest.raises(ValueError, match="'c'.*no such parameter"):
        po.page_in(tx.init(small()), "c")


def test_a_group_of_one_is_its_member(state):
    assert_equal(po.page_in(state, "blocks/1"), po.page_in(state, "blocks/1/q/kernel"))


def test_a_prefix_of_a_name_is_no_group():
    params = {"w": {"x": small()["a"]}, "w2": {"x": small()["b"]}}
    state = adam().init(params)
    assert po.host_bytes(state, "w") == 2 * params["w"]["x"].nbytes
    assert po.host_bytes(state, "w2") == 2 * params["w2"]["x"].nbytes


def test_groups_have_bytes_and_residency():
    state = adam(device_budget=BUDGET).init(nested())
    assert po.device_bytes(state, "blocks/0") == A + C
    assert po.host_bytes(state, "blocks") == po.host_bytes(state) == B
    assert po.device_bytes(state, "blocks") == A + C
    assert po.device_bytes(state) == A + C + 4
    assert po.is_device_resident(state, "blocks/0")
    assert not po.is_device_resident(state, "blocks")
    assert not po.is_device_resident(state, "")


# -- hyperparameters are no moments ---------------------------------------------


def injected(**paging):
    """Adam whose b1 is a hyperparameter, for a parameter that is called b1 too."""
    tx = optax.inject_hyperparams(lambda b1: adam(b1=b1, **paging))(b1=0.9)
    params = {"w1": small()["a"], "b1": small()["b"]}
    state = filled(tx.init(params))
    return tx, params, state._replace(hyperparams={"b1": jnp.float32(0.5)})


def test_hyperparameters_of_a_parameters_name_are_left_alone():
    tx, params, state = injected()
    assert set(po.page_in(state, "b1")) == {"mu", "nu"}
    assert po.host_bytes(state, "b1") == 2 * params["b1"].nbytes
    assert po.device_bytes(state, "b1") == 0
    assert po.device_resident_count(state) == 0
    moments = po.page_in(state, "b1")
    assert_equal(po.page_out(state, "b1", moments), state)
    assert int(po.get_step(state, "b1")) == 0
    assert float(po.rebalance(tx, state, ["b1"]).hyperparams["b1"]) == 0.5


def test_init_param_leaves_hyperparameters_alone():
    tx, params, state = injected()
    new = po.init_param(tx, state, params, "b1")
    assert float(new.hyperparams["b1"]) == 0.5
    assert float(jnp.abs(po.page_in(new, "b1")["mu"]).max()) == 0


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
