"""What is read off a transformation's jaxpr: calls, constants, parameters, effects."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import SMALL_PAGES, arrays, assert_equal

import paged_optax as po

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SHAPES = {"a": (64, 64), "b": (70, 128)}


def small(seed=0):
    return arrays(shapes=SHAPES, seed=seed)


def added_up(function):
    """Applies a function to each gradient, and adds up the gradients as they come."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(function, updates), jax.tree.map(jnp.add, state, updates)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def assert_as_unpaged(inner, pages=None):
    """Paged, eager and jitted, a transformation gives the numbers it gives alone.

    Args:
      inner: The transformation.
      pages: Whether its moments have several pages; None where it does not matter.
    """
    tx, params = po.paged(inner, **SMALL_PAGES), small()
    moments = [x for x in po.plan(tx, params).moments if x.on_host]
    assert moments
    if pages is not None:
        assert all((x.pages > 1) == pages for x in moments)
    for wrap in (jax.jit, lambda update: update):
        state, wanted = tx.init(params), inner.init(params)
        for seed in (1, 2):
            updates, state = wrap(tx.update)(small(seed), state, params)
            right, wanted = jax.jit(inner.update)(small(seed), wanted, params)
            assert_equal((updates, state), (right, wanted))


# -- calls and what they close over ------------------------------------------------


def closed_over(make):
    """Multiplies by an array of the leaf's own shape, a constant of an inner call."""

    def function(x):
        factor = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
        return make(lambda x: x * factor)(x)

    return function


CALLS = {
    "checkpoint": (jax.checkpoint(jnp.square), True),
    "checkpoint of a call": (jax.checkpoint(jax.jit(jnp.square)), True),
    "checkpoint with a policy": (
        jax.checkpoint(jnp.square, policy=jax.checkpoint_policies.everything_saveable),
        True,
    ),
    "custom_jvp": (jax.nn.relu, True),
    "constant of a jit": (closed_over(jax.jit), True),
    "constant of a checkpoint": (closed_over(jax.checkpoint), True),
    "constant of a jit in a jit": (closed_over(lambda f: jax.jit(jax.jit(f))), True),
    "constant of a jit in a checkpoint": (
        closed_over(lambda f: jax.checkpoint(jax.jit(f))),
        True,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_seen_through(name):
    function, pages = CALLS[name]
    assert_as_unpaged(added_up(function), pages)


def test_a_key_closed_over_in_a_call():
    key = jax.random.key(3)
    noisy = jax.jit(lambda x: x + jax.random.normal(key, x.shape))
    assert_as_unpaged(added_up(noisy), pages=False)
