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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, PyTree

from paged_optax.cli.self_test import Difference, difference
from paged_optax.compiling.jit_step import jit_step
from paged_optax.layerwise import GradientWorkspace, LayerwiseModel, layerwise_step
from paged_optax.transform.paged import paged_adamw, paged_adamw_8bit


def refuse_not_finite(tree: PyTree[np.ndarray]) -> None:
    """Refuses values that are equal and yet prove nothing: NaN and infinities."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree)):
        raise ArithmeticError("values are not finite")


#: Steps with CUDA graphs, and without.
GRAPH_STEPS = 20
#: Seconds that either may take.
GRAPH_SECONDS = 120.0
#: What switches graphs off; and what changes nothing, and keeps `jit_step` from that.
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
GRAPHS = "--xla_gpu_command_buffer_scheduling_mode=LHS"

# Otherwise each run times products, and may choose other kernels than the other run.
_SAME_PRODUCTS = "--xla_gpu_autotune_level=0"
_LAYERS, _WIDTH, _TOKENS = 4, 256, 32
# Several pages a leaf, and in every leaf.
_PAGES = {"page_size": 128 << 10, "min_paged_size": 0}

Hidden = Float[Array, "tokens width"]
Trained = dict[str, np.ndarray]


def compare_graphs(
    steps: int = GRAPH_STEPS, limit: float = GRAPH_SECONDS
) -> Difference:
    """Trains in two processes, with graphs and without, on the same numbers.

    Each may take so many seconds.
    """
    without, with_graphs = (trained(x, steps, limit) for x in (NO_GRAPHS, GRAPHS))
    refuse_not_finite(without)
    return difference(with_graphs, without)


def trained(flag: str, steps: int, limit: float) -> Trained:
    """The result of `train` in a new process, with this flag of XLA besides."""
    # What the environment says of graphs would hold for both runs.
    told = os.environ.get("XLA_FLAGS", "").split()
    told = [x for x in told if not x.startswith(NO_GRAPHS)]
    flags = " ".join([*told, _SAME_PRODUCTS, flag])
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "trained.npz"
        # The process is to import this file and the package, wherever it starts.
        folder = pathlib.Path(__file__).parent
        places = [str(folder), str(folder.parents[1])]
        code = f"import sys; sys.path[:0] = {places}\n"
        code += f"from graphs import save; save({str(path)!r}, {steps})"
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
