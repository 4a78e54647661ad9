"""Training with moments that a codec stores."""

import jax
import jax.numpy as jnp
import optax

from helpers import reference
from paged_optax.codecs import DynamicInt8, unarranged

NAMES = [
    "dynamic_int8",
    "dynamic_int4",
    "float8_e4m3",
    "bfloat16",
    "bfloat16_stochastic",
]
SHAPES = {"even": (640, 512), "odd": (129, 65), "vector": (8192,), "small": (7,)}
ALL_PAGED = {"page_size": "16KiB", "min_paged_size": "1B"}


def in_bytes(stored):
    """Codes and scales as the codec made them, before they were arranged."""
    signed = jnp.issubdtype(stored.codes.dtype, jnp.signedinteger)
    return unarranged(DynamicInt8(signed), stored)


def trained(tx, steps=3, dtype=jnp.float32, eager=False):
    """Parameters and state after a few steps."""
    params = reference.arrays(dtype, 0, SHAPES)
    gradients = reference.arrays(dtype, 1, SHAPES)
    state = tx.init(params)
    update = tx.update if eager else jax.jit(tx.update)
    for step in range(steps):
        scaled = jax.tree.map(lambda x, n=step: x * (n + 1), gradients)
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
    return params, state
