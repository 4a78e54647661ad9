"""Which parameter a leaf of a state belongs to, where names repeat."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.reference import SMALL_PAGES, assert_equal, kinds
from helpers.small import DEVICE, HOST


class Layer(NamedTuple):
    w: Any


class Model(NamedTuple):
    """A field of a state and one of a model may have one name, as in an encoder's."""

    mu: Any
    w: Any
    count: Any


def scale_by_trace_in_a_dict(decay=0.9):
    """A transformation whose state is a plain dictionary."""

    def init(params):
        return {"count": jnp.int32(0), "m": optax.tree.zeros_like(params)}

    def update(updates, state, params=None):
        del params
        m = jax.tree.map(lambda m, u: decay * m + u, state["m"], updates)
        return m, {"count": state["count"] + 1, "m": m}

    return optax.GradientTransformation(init, update)


x, y, z = (i * jnp.ones((64, 128)) for i in (1.0, 2.0, 3.0))
PARAMS = {
    "named tuple": Model(Layer(x), y, z),
    "of one name": Model(Model(x, y, z), y, z),
    "dict": {"m": {"w": x, "m": {"w": y}}, "w": z},
    "deep": {"m": {"m": {"m": x}}, "w": y, "count": z},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "inner", [optax.adam(1e-2), scale_by_trace_in_a_dict()], ids=["adam", "dict"]
)
def test_every_moment_is_paged_as_its_parameters(name, inner):
    """Numbers are those of the transformation, and a codec stores each moment."""
    params = PARAMS[name]
    tx = po.paged(inner, **SMALL_PAGES)
    state, plain = tx.init(params), inner.init(params)
    coded = po.paged(inner, codec="bfloat16", **SMALL_PAGES).init(params)
    for large, stored in zip(*map(jax.tree.leaves, (state, coded)), strict=True):
        assert large.sharding.memory_kind == (HOST if large.ndim else DEVICE)
        assert stored.dtype == (jnp.bfloat16 if large.ndim else jnp.int32)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, params)
        wanted, plain = jax.jit(inner.update)(params, plain, params)
        chex.assert_trees_all_close(updates, wanted, rtol=2e-7)  # one ulp
        assert_equal(jax.device_get(state), jax.device_get(plain))
    assert kinds(state) == kinds(tx.init(params))
