"""A layerwise training step beside an ordinary one: seconds, and their ratio.

Both save every layer's input and compute the layer again in the backward pass. They
take turns, in an order that turns around each time, and a ratio compares turns of one
round with the ordinary step that clips alike.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import paged_optax as po

SECTION = "layerwise"
LEARNING_RATE, MOST = 1e-3, 1.0
ORDINARY, CLIPPED = "jax.grad, optax.adamw", "jax.grad, clip, optax.adamw"


def _layer(weights: Any, x: jax.Array, context: Any, i: Any) -> tuple[jax.Array, None]:
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def _loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean((x - jnp.roll(batch, 1, 0)) ** 2)


def _ordinary(tx: optax.GradientTransformation, params: Any, batch: Any) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: _layer(w, x, None, 0))
        return _loss(jax.lax.scan(layer, batch, params["layers"])[0], batch)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return _running(step, (params, tx.init(params)), batch)


def _layerwise(
    params: Any,
    batch: Any,
    host_dtype: Any = None,
    deferred: bool = False,
    **settings: Any,
) -> Any:
    tx = po.paged_adamw(LEARNING_RATE)
    step = po.layerwise_step(
        po.LayerwiseModel(
            lambda rest, batch: (batch, None),
            _layer,
            lambda rest, x, kept, batch: _loss(x, batch),
        ),
        tx,
        **settings,
    )
    workspace = po.GradientWorkspace.allocate(
        params["layers"], host_dtype=host_dtype, rest={} if deferred else None
    )
    return _running(step, (params, tx.init(params), workspace), batch)


def _running(step: Any, donated: tuple[Any, ...], batch: Any) -> Callable[[], None]:
    positions = tuple(range(len(donated)))
    compiled = po.jit_step(step, *donated, batch, donate_argnums=positions)
    kept = list(donated)

    def run() -> None:
        *kept[:], _ = jax.block_until_ready(compiled(*kept, batch))

    run()
    return run


def measure(hidden: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    """Times training steps of a stack of MLP layers.

    Args:
      hidden: The width; a layer's inner one is 4 times that.
      layers: Their number.
      rounds: How often everyone has a turn.

    Returns:
      A row a contestant.
    """
    key = jax.random.key(0)
    make = lambda: {
        "layers": {
            "up": jax.random.normal(key, (layers, hidden, 4 * hidden)) * 0.02,
            "down": jax.random.normal(key, (layers, 4 * hidden, hidden)) * 0.02,
        }
    }
    batch = jax.random.normal(key, (256, hidden))
    adamw = optax.adamw(LEARNING_RATE)
    clipped = optax.chain(optax.clip_by_global_norm(MOST), adamw)
    running = {
        ORDINARY: _ordinary(adamw, make(), batch),
        "layerwise_step": _layerwise(make(), batch),
        CLIPPED: _ordinary(clipped, make(), batch),
        "layerwise_step, clip by two backward passes": _layerwise(
            make(), batch, max_norm=MOST
        ),
        "layerwise_step, clip by gradients on the host": _layerwise(
            make(), batch, jnp.float32, max_norm=MOST
        ),
        "layerwise_step, clip by gradients on the host, deferred": _layerwise(
            make(), batch, jnp.float32, deferred=True, max_norm=MOST
        ),
    }
    turns: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        for name in list(running)[:: -1 if number % 2 else 1]:
            before = time.perf_counter()
            running[name]()
            turns[name].append(time.perf_counter() - before)
    rows = []
    for name, seconds in turns.items():
        beside = turns[CLIPPED if "clip" in name else ORDINARY]
        ratios = [x / y for x, y in zip(seconds, beside, strict=True)]
        rows.append(
            {
                "section": SECTION,
                "name": name,
                "layers": layers,
                "parameters": layers * 8 * hidden**2,
                "rounds": rounds,
                "seconds": statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
        )
    return rows
