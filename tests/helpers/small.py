"""Small parameters, and a transformation that pages all their moments."""

import jax.numpy as jnp
import optax

import paged_optax as po
from helpers.reference import SMALL_PAGES, arrays

HOST, DEVICE = "pinned_host", "device"
SHAPES = {"a": (64, 64), "b": (70, 128)}  # 16 and 35 KiB
TX = po.paged_adam(1e-2, **SMALL_PAGES)
#: count, mu of a and b, nu of a and b
ALL_PAGED = [DEVICE, HOST, HOST, HOST, HOST]
#: Of a step's arguments, or of its results.
ORDERS = [("params", "state"), ("state", "params")]


def small(seed=0, dtype=jnp.float32, shapes=SHAPES):
    """Parameters, or gradients of them."""
    return arrays(dtype, seed, shapes)


def make_step(arguments, results, tx=TX):
    """A training step with its arguments and results in a given order."""

    def step(first, second, gradients):
        named = dict(zip(arguments, (first, second), strict=True))
        updates, state = tx.update(gradients, named["state"], named["params"])
        params = optax.apply_updates(named["params"], updates)
        made = {"params": params, "state": state}
        return tuple(made[name] for name in results)

    return step


def counting(inner):
    """A transformation, and the list that grows by one at each trace of `update`."""
    traces = []

    def update(updates, state, params=None):
        traces.append(None)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update), traces
