"""States restored without a target: dicts of names, put back by `place_state`."""

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import paged_optax as po
from helpers.checkpoints import manager, standard
from helpers.reference import kinds

PAGING = {"page_size": 4096, "min_paged_size": 0}
KEY = iter(jax.random.split(jax.random.key(0), 400))


def _matrix():
    return jax.random.normal(next(KEY), (16, 256))


class Named(NamedTuple):
    value: Any
    w: Any


class Struct(flax.struct.PyTreeNode):
    value: Any
    w: Any


class Module(eqx.Module):
    value: Any
    w: Any


class Alone(eqx.Module):
    value: Any


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(_matrix())
        self.value = nnx.Param(_matrix())


class Model(nnx.Module):
    """Of more than ten equal layers, whose names as strings have another order."""

    def __init__(self):
        self.layers = nnx.List([Block() for _ in range(11)])


#: Some parameters are called `value`, as what a variable holds is.
PARAMS = {
    "State": lambda: nnx.state(Model(), nnx.Param),
    "pure": lambda: nnx.to_pure_dict(nnx.state(Model(), nnx.Param)),
    "dict": lambda: {"layers": [{"value": _matrix()} for _ in range(11)]},
    "FrozenDict": lambda: flax.core.freeze({"value": _matrix(), "w": _matrix()}),
    "named tuple": lambda: Named(_matrix(), {"value": _matrix()}),
    "struct": lambda: Struct(_matrix(), _matrix()),
    "module": lambda: [Module(_matrix(), _matrix()), Alone(_matrix())],
}

TXS = {
    "8 bits": lambda: po.paged_adamw_8bit(1e-2, **PAGING),
    "own steps": lambda: po.paged_adamw(1e-2, per_parameter_steps=True, **PAGING),
    "MultiSteps": lambda: po.MultiSteps(po.paged_lion(1e-2, **PAGING), 2),
    "injected": lambda: po.paged(
        optax.inject_hyperparams(optax.adamw)(1e-2), codec="dynamic_int4", **PAGING
    ),
}


def pytree(path, state, target):
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(path / "state", state)
    return checkpointer.restore(path / "state")


def _filled(state):
    """The same places with other values, none like another."""
    fresh = np.random.default_rng(0)

    def fill(x):
        values = fresh.integers(1, 100, x.shape).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    return jax.tree.map(fill, state)


def _assert_back(back, state):
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert kinds(back) == kinds(state)
    for new, old in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


@pytest.mark.parametrize(
    ("way", "params", "tx"),
    [
        *((standard, params, "own steps") for params in PARAMS),
        *((standard, "State", tx) for tx in TXS),
        (pytree, "State", "8 bits"),
        (manager, "State", "8 bits"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_every_leaf_goes_back_into_its_place(tmp_path, way, params, tx):
    params, tx = PARAMS[params](), TXS[tx]()
    state = _filled(tx.init(params))
    with warnings.catch_warnings():
        # Orbax warns of the missing target.
        warnings.simplefilter("ignore")
        restored = way(tmp_path, state, None)
    _assert_back(po.place_state(tx, restored, params), state)


def test_of_an_optimizer_of_flax(tmp_path):
    """Counts are in variables too; a whole optimizer holds the state as a part."""
    model, tx = Model(), TXS["8 bits"]()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    optimizer.opt_state = _filled(optimizer.opt_state)
    filled = jax.tree.leaves(optimizer.opt_state)
    state = jax.tree.unflatten(jax.tree.structure(tx.init(params)), filled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = standard(tmp_path, nnx.state(optimizer), None)
    _assert_back(po.place_state(tx, restored["opt_state"], params), state)
    pure = nnx.to_pure_dict(params)
    bare = jax.tree.unflatten(jax.tree.structure(tx.init(pure)), filled)
    _assert_back(po.place_state(tx, restored["opt_state"], pure), bare)
    with pytest.raises(ValueError, match="the part that is the state"):
        po.place_state(tx, restored, params)


def test_what_is_missing_is_named():
    params, tx = {"value": {"value": _matrix()}}, TXS["own steps"]()
    mu, nu = ({"value": {"value": _matrix()}} for _ in range(2))
    state = {"count": {"value": {}}, "mu": mu, "nu": nu}
    with pytest.raises(ValueError, match="'0/count/value/value' is missing"):
        po.place_state(tx, [state, None, None], params)


@pytest.mark.parametrize(
    "params", [Alone, lambda x: {"value": x}, lambda x: {"w": {"value": x}}]
)
def test_a_parameter_that_is_called_value(params):
    """Its own step is its, and its master is found."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(_matrix()))
    tx = po.paged_adamw(
        1e-2, per_parameter_steps=True, master_dtype="float32", **PAGING
    )
    state = tx.init(params)
    ((path, _),) = jax.tree_util.tree_flatten_with_path(params)[0]
    state = po.increment_step(state, path)
    assert int(po.get_step(state, path)) == 1
    masters = po.master_weights(params, state)
    assert jax.tree.structure(masters) == jax.tree.structure(params)
    assert jax.tree.leaves(masters)[0].dtype == jnp.float32
