"""Small parameters of which some are active, and what must become of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from helpers import small as trees
from helpers.reference import SMALL_PAGES, assert_equal, kinds

#: Ulps by which state and updates may differ, for the reasons that `test_numbers`
#: gives: with the flags of `exact` there is no difference, for any alias. A step count
#: that is wrong by one moves them by thousands.
ULPS = {
    "paged_sgd": (1, 8),
    "paged_rmsprop": (4, 8),
    "paged_lars": (4, 8),
    "paged_adafactor": (4, 8),
    "paged_muon": (0, 128),
}
#: Several pages, one page, and less than a page.
SHAPES = {"w": (70, 128), "v": (300,), "s": ()}
adam = functools.partial(po.paged_adam, 1e-2, **SMALL_PAGES)
flag = jnp.asarray
small = functools.partial(trees.small, shapes=SHAPES)


def nested(seed=0):
    w, v, s = small(seed).values()
    return {"x": {"v": v, "w": w}, "y": [s, 2 * w]}


@functools.cache
def started(**paging):
    """A transformation after two full steps, and its state: all moments not zero."""
    tx = adam(**paging)
    state, update = tx.init(nested()), jax.jit(tx.update)
    for seed in (1, 2):
        _, state = update(nested(seed), state, nested())
    return tx, state


def full(state, seed=3):
    """What Optax's own update makes of a state with every parameter active."""
    inner = optax.adam(1e-2)
    on_device = jax.device_put(state, jax.memory.Space.Device)
    return jax.jit(inner.update)(nested(seed), on_device, nested())


def assert_partial(found, state, gates, seed=3, wanted=None):
    """Active parameters are Optax's; inactive ones have not moved by a bit."""
    (updates, new), (right, right_state) = found, wanted or full(state, seed)
    assert jax.tree.structure(updates) == jax.tree.structure(right)
    assert kinds(new) == kinds(state)
    for gate, update, one in zip(
        gates, jax.tree.leaves(updates), jax.tree.leaves(right), strict=True
    ):
        assert (update.shape, update.dtype) == (one.shape, one.dtype)
        if gate:
            np.testing.assert_allclose(update, one, rtol=1e-6)
        else:
            assert not np.asarray(update).any()
    for name in ("mu", "nu"):
        before, after, one = (
            jax.tree.leaves(getattr(x[0], name)) for x in (state, new, right_state)
        )
        for gate, *each in zip(gates, before, after, one, strict=True):
            assert_equal(each[1], each[2 if gate else 0])
    assert int(new[0].count) == int(state[0].count) + any(gates)


# -- ways to say it -------------------------------------------------------------

#: The parameters are, in order: x/v, x/w, y/0, y/1.
WAYS = {
    "all": (True, (1, 1, 1, 1)),
    "none": (False, (0, 0, 0, 0)),
    "tree": ({"x": {"v": True, "w": False}, "y": [False, True]}, (1, 0, 0, 1)),
    "prefix": ({"x": False, "y": True}, (0, 0, 1, 1)),
    "mixed": ({"x": {"v": False, "w": True}, "y": False}, (0, 1, 0, 0)),
    "numpy bools": ({"x": np.bool_(True), "y": np.bool_(False)}, (1, 1, 0, 0)),
    "numpy arrays": ({"x": np.array(False), "y": np.array(True)}, (0, 0, 1, 1)),
    "from numpy": (
        {"x": dict(zip("vw", np.array([True, False]), strict=True)), "y": True},
        (1, 0, 1, 1),
    ),
}


def on_the_device(active):
    return jax.tree.map(jnp.asarray, active)


@functools.cache
def shared_updates(*paging):
    tx, _ = started(**dict(paging))
    return tx, jax.jit(lambda g, s, p, active: tx.update(g, s, p, active=active))


NAMES = ("w", "v", "s")


def chosen(gates):
    """One bool for each of the small parameters."""
    return dict(zip(NAMES, map(bool, gates), strict=True))
