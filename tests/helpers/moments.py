"""Moments of small parameters, some of which fit a budget, in every wrapper."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import paged_optax as po
from helpers import small as trees
from helpers.reference import SMALL_PAGES, assert_equal, kinds

#: 16 and 35 KiB, and one that is smaller than a page.
SHAPES = {"a": (64, 64), "b": (70, 128), "c": (9,)}
#: Both moments of "a" and of "c" fit; those of "b" do not.
BUDGET = "33KiB"
#: Bytes of both moments of each.
A, B, C = (2 * 4 * 64 * 64, 2 * 4 * 70 * 128, 2 * 4 * 9)
adam = functools.partial(po.paged_adam, 1e-2, **SMALL_PAGES)
small = functools.partial(trees.small, shapes=SHAPES)


def flat(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def paths(params):
    return [path for path, _ in flat(params)]


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def resident(state, names="abc"):
    """Which parameters' moments are on the device."""
    return "".join(name for name in names if po.is_device_resident(state, name))


def place_on(where):
    """On a device, or divided over a mesh of two."""
    if where == "device":
        return SingleDeviceSharding(jax.devices()[3])
    return NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))


def filled(state, seed=7):
    """A state of random values, each array where it was."""
    random = np.random.default_rng(seed)

    def fill(x):
        if not x.ndim or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        value = np.abs(random.normal(size=x.shape)).astype(x.dtype)
        return jax.device_put(value, x.sharding)

    return jax.tree.map(fill, state)


def belonging(state, key_path):
    """A parameter's moments, found by how their paths in the state end.

    What `optax.MultiSteps` accumulates is no moment.
    """
    n = len(key_path)
    return {
        path[-n - 1].name: x
        for path, x in flat(state)
        if path[len(path) - n :] == key_path
        and isinstance(path[-n - 1], jax.tree_util.GetAttrKey)
        and path[-n - 1].name != "acc_grads"
        and jnp.issubdtype(x.dtype, jnp.inexact)
    }


def assert_joined(new, state, fresh):
    """A state of a fresh one's kind that keeps an older state's own arrays."""
    chex.assert_trees_all_equal_structs(new, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, fresh)
    assert kinds(new) == kinds(fresh)
    old = dict(flat(state))
    for (path, x), (_, made) in zip(flat(new), flat(fresh), strict=True):
        if path in old:
            assert x is old[path]
        else:
            assert_equal(x, made)


def assert_updates_alike(update, params, first, second):
    """Two states, of which the first is known to work, are one to an update."""
    wanted, found = (update(params, state, params) for state in (first, second))
    # A moment that stays is fused otherwise than one that is paged.
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-7)


# -- states ---------------------------------------------------------------------

WRAPPERS = {
    "plain": lambda tx: tx,
    "chained": lambda tx: optax.chain(
        optax.clip(1.0), optax.chain(tx, optax.scale_by_schedule(lambda _: 0.5))
    ),
    "named chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("tx", tx)),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": True, "c": False}),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda scale: optax.chain(tx, optax.scale(scale))
    )(scale=0.5),
    "partition": lambda tx: optax.partition(
        {"adam": tx, "lion": po.paged_lion(1e-2, **SMALL_PAGES)},
        {"a": "adam", "b": "lion", "c": "adam"},
    ),
    "partly frozen": lambda tx: optax.partition(
        {"adam": tx, "none": optax.set_to_zero()},
        {"a": "adam", "b": "adam", "c": "none"},
    ),
    "finite": lambda tx: po.apply_if_finite(tx, 3),
    "multi steps": lambda tx: po.MultiSteps(tx, 2),
    "beside an unpaged trace": lambda tx: optax.chain(optax.trace(0.9), tx),
    "beside another": lambda tx: optax.chain(
        tx, po.paged_sgd(1e-2, momentum=0.9, device_budget=BUDGET, **SMALL_PAGES)
    ),
    "own steps": lambda tx: tx,
}
# -- optimizers -----------------------------------------------------------------

MOMENTS = {
    "paged_adamw": {"mu", "nu"},
    "paged_lion": {"mu"},
    "paged_ademamix": {"m1", "m2", "nu"},
    "paged_adafactor": {"v_row", "v_col", "v", "ema"},
    "paged_muon": {"mu"},
    "paged_sgd": {"trace"},
    "paged_rmsprop": {"nu", "trace"},
}


def nested():
    a, b, c = small().values()
    return {"blocks": [{"q": {"kernel": a, "bias": c}}, {"q": {"kernel": b}}]}


KERNEL = "blocks/0/q/kernel"
