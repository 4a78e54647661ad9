"""Masks, labels and factors of stacks: given as trees, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers.stacked import SETTINGS, STACK, both, finish, same, start


def large(params):
    """Chosen by what Optax sees: the size of a whole stack."""
    return jax.tree.map(lambda x: x.size > 5000, params)


def settled():
    """Its moment is zero, and then one half."""
    return po.paged(
        optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda updates, state, params=None: (
                jax.tree.map(jnp.subtract, updates, state),
                jax.tree.map(lambda x: jnp.full_like(x, 0.5), state),
            ),
        ),
        **SETTINGS,
    )


PARAMS = {
    "layers": {
        "w": jnp.full((2, 64, 64), 0.01),
        "v": jnp.ones((2, 64, 96)),
        "b": jnp.zeros((2, 64)),
    },
    "head": jnp.eye(64),
}
FUNCTIONS = (
    start,
    lambda w, x, c, i: (x + jnp.tanh(x @ w["w"] + w["b"]), None),  # not of "v"
    lambda rest, x, kept, batch: jnp.mean((x @ rest["head"]) ** 2),
)


def decayed(mask, **how):
    return po.paged_adamw(0.1, weight_decay=0.5, mask=mask, **how, **SETTINGS)


@pytest.mark.quick("masked", "labels", "settled")
@pytest.mark.parametrize(
    "make",
    [
        decayed,
        lambda by: optax.masked(po.paged_sgd(0.1, momentum=0.9, **SETTINGS), by),
        lambda by: optax.partition(
            {
                True: po.paged_sgd(0.1, **SETTINGS),
                False: po.paged_lion(0.2, **SETTINGS),
            },
            by,
        ),
        lambda by: decayed(by, per_parameter_steps=True),
        lambda by: decayed(by, codec={"head": "dynamic_int8"}),
        lambda by: optax.masked(settled(), by),
    ],
    ids=["decay", "masked", "labels", "own_steps", "coded_head", "settled"],
)
def test_masks_of_bools(make):
    """A mask or labels of whole stacks, as trees."""
    tx = make(large(PARAMS))
    batch = jax.random.normal(jax.random.key(0), (4, 64))
    found, wanted = both(PARAMS, tx, FUNCTIONS, batch)
    same(found[0], wanted[0], 1e-5)
    same(found[1], wanted[1], 1e-5)
    kind = lambda tree: jax.tree.map(lambda x: x.sharding.memory_kind, tree)
    assert kind(found[1]) == kind(tx.init(PARAMS))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "bfloat16", "bfloat16_stochastic"])
def test_coded_moments_chosen_by_shape(codec):
    """One layer's codes are updated alone: a mask must be given as it is, in bools."""
    params = {"layers": {"w": jnp.ones((2, 64, 64)), "v": jnp.ones((2, 128, 64))}}
    functions = (start, lambda w, x, c, i: (x + x @ w["w"], None), finish)
    make = lambda mask: po.paged_adamw(
        0.1, weight_decay=0.5, mask=mask, codec=codec, **SETTINGS
    )
    with pytest.raises(ValueError, match=r"\['w'\].*shape.*tree of bools"):
        both(params, make(large), functions)
    found, wanted = both(params, make(large(params)), functions)
    np.testing.assert_allclose(found[0]["layers"]["v"], 0.95, 1e-6)
    same(found[0], wanted[0], 1e-2)


@pytest.mark.slow
def test_coded_stacks_of_one_shape():
    """They share pages in a whole update, and are cut out of their stacks alone."""
    keys = jax.random.split(jax.random.key(0), 2)
    make = lambda key: 0.05 * jax.random.normal(key, (2, 64, 64))
    params = {"layers": {"gate": make(keys[0]), "up": make(keys[1])}}
    gated = lambda w, x, c, i: (x + jnp.tanh(x @ w["gate"]) * (x @ w["up"]), None)
    tx = po.paged_adamw(0.1, codec="dynamic_int8", **SETTINGS)
    batch = jax.random.normal(jax.random.key(1), (4, 64))
    found, wanted = both(params, tx, (start, gated, finish), batch)
    same(found[0], wanted[0], 1e-2)


def by_position():
    """Momentum that it keeps in a list, as no transformation of Optax does."""

    def update(updates, state, params=None):
        leaves, structure = jax.tree.flatten(updates)
        state = [0.9 * m + g for m, g in zip(state, leaves, strict=True)]
        return jax.tree.unflatten(structure, state), state

    init = lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)]
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("page", [lambda tx: tx, lambda tx: po.paged(tx, **SETTINGS)])
def test_moments_in_no_tree_of_the_parameters(page):
    """Which are whose cannot be told by their paths: no step forgets them."""
    tx = optax.chain(page(by_position()), optax.scale(-0.1))
    with pytest.raises(ValueError, match=r"state\[0\]\[0\].*structure"):
        both({"layers": STACK}, tx)
