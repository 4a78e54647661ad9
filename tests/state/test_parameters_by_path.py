"""A parameter's moments by its path: read, put back, in groups, unknown."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

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
    if where == "device":
        sharding = SingleDeviceSharding(jax.devices()[3])
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
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
