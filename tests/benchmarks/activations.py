"""Layerwise steps whose activations wait on the host beside those on the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from graphs import refuse_not_finite

import paged_optax as po
from paged_optax.cli.self_test import Difference, difference

STEPS = 3


def compare(layers: int, width: int, tokens: int) -> Difference:
    """Trains with `activations_on_host` and without, from the same parameters.

    Args:
      layers: Layers of an MLP.
      width: Of a layer.
      tokens: Of a batch.

    Returns:
      How far losses, parameters and gradients' sums, in the momentum, are apart.
    """
    # In full precision, and of sums: a rounding elsewhere stays a rounding.
    with jax.default_matmul_precision("highest"):
        there, here = (_train(layers, width, tokens, host) for host in (True, False))
    refuse_not_finite(here)
    return difference(there, here)


def _train(layers: int, width: int, tokens: int, on_host: bool) -> Any:
    generator = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)
    params = {"layers": {"w": draw(layers, width, width) / width**0.5}}
    batch = draw(tokens, width)
    tx = po.paged_sgd(0.1, momentum=0.9, min_paged_size=0)
    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda weights, x, context, i: (x + jnp.tanh(x @ weights["w"]), None),
        lambda rest, x, kept, batch: jnp.mean((x - jnp.roll(batch, 1, 0)) ** 2),
    )
    step = po.layerwise_step(model, tx, activations_on_host=on_host)
    step = po.jit_step(step, donate_argnums=(0, 1, 2))
    workspace = po.GradientWorkspace.allocate(params["layers"])
    state, losses = tx.init(params), []
    for _ in range(STEPS):
        params, state, workspace, output = step(params, state, workspace, batch)
        losses.append(output.loss)
    return jax.tree.map(np.asarray, (params, state, losses))
