"""Steps with CUDA graphs and without compute the same numbers.

XLA:GPU runs kernels, page loops and layers as CUDA graphs (its command buffers) unless
it is told not to, as `jit_step` does. It records them anew if an address changes. It
reads its flags once, so that each run needs a new process.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import paged_optax as po
from paged_optax.cli.self_test import Difference, difference

#: What switches graphs off; and what changes nothing, and keeps `jit_step` from that.
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
GRAPHS = "--xla_gpu_command_buffer_scheduling_mode=LHS"

# Otherwise each run times products, and may choose other kernels than the other run.
_SAME_PRODUCTS = "--xla_gpu_autotune_level=0"
_LAYERS, _WIDTH, _TOKENS = 4, 256, 32
# Several pages a leaf, and in every leaf.
_PAGES = {"page_size": 128 << 10, "min_paged_size": 0}


def refuse_not_finite(tree: Any) -> None:
    """Refuses values that are equal and yet prove nothing: NaN and infinities."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree)):
        raise ArithmeticError("values are not finite")


def compare_graphs(steps: int = 20, limit: float = 120.0) -> Difference:
    """Trains in two processes of so many seconds, with graphs and without."""
    without, with_graphs = (trained(x, steps, limit) for x in (NO_GRAPHS, GRAPHS))
    refuse_not_finite(without)
    return difference(with_graphs, without)


def trained(flag: str, steps: int, limit: float) -> dict[str, np.ndarray]:
    """The result of `train` in a new process, with this flag of XLA besides."""
    # What the environment says of graphs would hold for both runs.
    told = os.environ.get("XLA_FLAGS", "").split()
    told = [x for x in told if not x.startswith(NO_GRAPHS)]
    flags = " ".join([*told, _SAME_PRODUCTS, flag])
    # This process may have taken most of the device's memory.
    env = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "trained.npz"
        # The process is to import this file and the package, wherever it starts.
        folder = pathlib.Path(__file__).parent
        code = f"import sys; sys.path[:0] = {[str(folder), str(folder.parents[1])]}\n"
        code += "import graphs, numpy\n"
        code += f"numpy.savez({str(path)!r}, **graphs.train({steps}))"
        command = [sys.executable, "-c", code]
        how: Any = {"env": env, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=limit, **how)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"with XLA_FLAGS={flags!r}: over {limit:g} s") from None
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"with XLA_FLAGS={flags!r}: {last[:300]}")
        with np.load(path) as file:
            return dict(file)


def train(steps: int) -> dict[str, np.ndarray]:
    """Parameters and moments after steps of both kinds, ordinary and layerwise."""
    params, batches = drawn(_LAYERS, _WIDTH, _TOKENS, steps)
    tx = po.paged_adamw_8bit(1e-3, **_PAGES)
    trees = {
        "ordinary": _ordinary(params, batches),
        "layerwise": layerwise(params, batches, tx)[:2],
    }
    flat = jax.tree_util.tree_flatten_with_path(trees)[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def drawn(layers: int, width: int, tokens: int, steps: int) -> tuple[Any, list[Array]]:
    """The weights of an MLP's layers, and batches."""
    generator = np.random.default_rng(0)
    draw = lambda *shape: generator.normal(size=shape).astype(np.float32)
    params = {
        "up": draw(layers, width, 4 * width) * 0.05,
        "down": draw(layers, 4 * width, width) * 0.05,
    }
    return params, [jnp.asarray(draw(tokens, width)) for _ in range(steps)]


def _layer(weights: Any, x: Array, context: Any, i: Any) -> tuple[Array, None]:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def _error(x: Array, batch: Array) -> Array:
    return jnp.mean((x - jnp.roll(batch, 1, 0)) ** 2)


def _ordinary(params: Any, batches: list[Array]) -> Any:
    """Parameters and moments in float32, all gradients at once."""
    tx = po.paged_adamw(1e-3, **_PAGES)

    def loss(params: Any, batch: Array) -> Array:
        layer = lambda x, weights: _layer(weights, x, None, 0)
        return _error(lax.scan(layer, batch, params)[0], batch)

    @po.jit_step(donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Array) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    carried = jax.tree.map(jnp.array, params), tx.init(params)
    for batch in batches:
        carried = step(*carried, batch)
    return carried


def layerwise(params: Any, batches: list[Array], tx: Any, **settings: Any) -> Any:
    """Parameters, moments and losses of steps layer by layer."""
    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        _layer,
        lambda rest, x, kept, batch: _error(x, batch),
    )
    step = po.layerwise_step(model, tx, **settings)
    step = po.jit_step(step, donate_argnums=(0, 1, 2))
    layers = jax.tree.map(jnp.array, params)
    workspace = po.GradientWorkspace.allocate(layers)
    carried, losses = ({"layers": layers}, tx.init({"layers": layers}), workspace), []
    for batch in batches:
        *carried, output = step(*carried, batch)
        losses.append(output.loss)
    return jax.tree.map(np.asarray, (*carried[:2], losses))
