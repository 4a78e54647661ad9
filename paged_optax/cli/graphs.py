"""Steps with CUDA graphs and without: whether they compute the same numbers.

XLA:GPU runs kernels, page loops and layers as CUDA graphs (its command buffers), which
it records anew if an address changes. It reads its flags once, so that each run needs a
new process.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, PyTree

from paged_optax.backend.text import track
from paged_optax.cli.comparison import Difference, difference, refuse_not_finite
from paged_optax.compiling.jit_step import jit_step
from paged_optax.layerwise import GradientWorkspace, LayerwiseModel, layerwise_step
from paged_optax.transform.paged import paged_adamw, paged_adamw_8bit

#: Steps of each run.
STEPS = 20
#: Seconds that a run may take.
LIMIT = 120.0
#: What switches graphs off.
OFF = "--xla_gpu_enable_command_buffer="

# Otherwise each run times products, and may choose other kernels than the other run.
_SAME_PRODUCTS = "--xla_gpu_autotune_level=0"
_LAYERS, _WIDTH, _TOKENS = 4, 256, 32
# Several pages a leaf, and in every leaf.
_PAGES = {"page_size": 128 << 10, "min_paged_size": 0}

Hidden = Float[Array, "tokens width"]
Trained = dict[str, np.ndarray]


def compare(steps: int = STEPS, limit: float = LIMIT) -> Difference:
    """Trains in two processes, with graphs and without, on the same numbers.

    Args:
      steps: Steps to train.
      limit: Seconds that each process may take.

    Returns:
      How far parameters and moments are apart.

    Raises:
      RuntimeError: If a process fails or takes too long.
      ArithmeticError: If what is trained without graphs is not finite.
    """
    runs = track((OFF, ""), "with CUDA graphs and without", 2)
    without, with_graphs = (trained(flag, steps, limit) for flag in runs)
    refuse_not_finite(without)
    return difference(with_graphs, without)


def trained(flag: str, steps: int, limit: float) -> Trained:
    """The result of `train` in a new process.

    Args:
      flag: A flag of XLA for it, in addition to those of `XLA_FLAGS`.
      steps: Steps to train.
      limit: Seconds that it may take.

    Raises:
      RuntimeError: If it fails or takes too long.
    """
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), _SAME_PRODUCTS, flag])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trained.npz"
        root = str(pathlib.Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r})\n"
        code += f"from {__name__} import save; save({str(path)!r}, {steps})"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                # This process may have taken most of the device's memory.
                env=os.environ
                | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"with XLA_FLAGS={flags!r}: over {limit:g} s") from None
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"with XLA_FLAGS={flags!r}: {last[:300]}")
        with np.load(path) as file:
            return dict(file)


def save(path: str, steps: int) -> None:
    """Writes the result of `train` as NumPy's npz."""
    np.savez(path, allow_pickle=False, **train(steps))


def train(steps: int) -> Trained:
    """Parameters and moments after steps of both kinds, ordinary and layerwise."""
    generator = np.random.default_rng(0)
    draw = lambda *shape: generator.normal(size=shape).astype(np.float32)
    params = {
        "up": draw(_LAYERS, _WIDTH, 4 * _WIDTH) * 0.05,
        "down": draw(_LAYERS, 4 * _WIDTH, _WIDTH) * 0.05,
    }
    batches = [jnp.asarray(draw(_TOKENS, _WIDTH)) for _ in range(steps)]
    trees = {
        "ordinary": _ordinary(params, batches),
        "layerwise": _layerwise(params, batches),
    }
    flat = jax.tree_util.tree_flatten_with_path(trees)[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def _layer(weights: PyTree[Array], x: Hidden, context: None, i: object) -> PyTree:
    del context, i
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def _error(x: Hidden, batch: Hidden) -> Float[Array, ""]:
    return jnp.mean((x - jnp.roll(batch, 1, 0)) ** 2)


def _ordinary(params: PyTree[np.ndarray], batches: list[Hidden]) -> PyTree[Array]:
    """Parameters and moments in float32, all gradients at once."""
    tx = paged_adamw(1e-3, **_PAGES)

    def loss(params: PyTree[Array], batch: Hidden) -> Float[Array, ""]:
        layer = lambda x, weights: _layer(weights, x, None, 0)
        return _error(lax.scan(layer, batch, params)[0], batch)

    @jit_step(donate_argnums=(0, 1))
    def step(
        params: PyTree[Array], state: optax.OptState, batch: Hidden
    ) -> tuple[PyTree[Array], optax.OptState]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    carried = jax.tree.map(jnp.array, params), tx.init(params)
    for batch in batches:
        carried = step(*carried, batch)
    return carried


def _layerwise(params: PyTree[np.ndarray], batches: list[Hidden]) -> PyTree[Array]:
    """Parameters and moments in eight bits, one layer's gradients at a time."""
    tx = paged_adamw_8bit(1e-3, **_PAGES)
    model = LayerwiseModel(
        lambda rest, batch: (batch, None),
        _layer,
        lambda rest, x, kept, batch: _error(x, batch),
    )
    step = jit_step(layerwise_step(model, tx), donate_argnums=(0, 1, 2))
    layers = jax.tree.map(jnp.array, params)
    workspace = GradientWorkspace.allocate(layers)
    carried = {"layers": layers}, tx.init({"layers": layers}), workspace
    for batch in batches:
        *carried, _ = step(*carried, batch)
    return carried
