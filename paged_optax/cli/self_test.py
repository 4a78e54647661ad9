"""Self-tests: paging computes what Optax does, and CUDA graphs what kernels do.

XLA:GPU runs kernels, page loops and layers as CUDA graphs (its command buffers) unless
it is told not to, as `jit_step` does. It records them anew if an address changes. It
reads its flags once, so that each run needs a new process.
"""

import dataclasses
import math
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
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree

from paged_optax.backend.text import track
from paged_optax.backend.types import Transformation
from paged_optax.cli.machine import typed_shapes
from paged_optax.compiling.jit_step import jit_step
from paged_optax.layerwise import GradientWorkspace, LayerwiseModel, layerwise_step
from paged_optax.planning.page_plan import plan
from paged_optax.transform.paged import paged, paged_adamw, paged_adamw_8bit
from paged_optax.transform.planned_moments import Moment

PAGE_BYTES = 8192

_SHAPES = {
    "matrix": (509, 256),
    "narrow": (129, 65),
    "cube": (3, 5, 257),
    "vector": (5000,),
    "scalar": (),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The distance between two pytrees.

    Attributes:
      values: Number of values.
      differing: How many of them have other bits.
      ulps: Most floats that lie between two values.
      error: The worst error relative to the largest value of its leaf.
    """

    values: int
    differing: int
    ulps: int
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A paged optimizer beside the same one of Optax.

    Attributes:
      moments: The paged moments, as `plan` lists them.
      state: How far the states are apart.
      parameters: How far the parameters are apart.
    """

    moments: tuple[Moment, ...]
    state: Difference
    parameters: Difference

    @property
    def error(self) -> float:
        """The worst relative error."""
        return max(self.state.error, self.parameters.error)


def compare_with_optax(
    inner: optax.GradientTransformation, steps: int, device_budget: int = 0
) -> Comparison:
    """Trains twice from the same parameters, on the same gradients.

    One run is Optax's. The other pages several pages a leaf, the last one smaller. So
    many bytes of its moments stay on the device.
    """
    generator = np.random.default_rng(0)
    draw = lambda: {
        key: generator.normal(size=shape).astype(np.float32)
        for key, shape in _SHAPES.items()
    }
    # Magnitudes are 1 to about 2, so that ulps are comparable. Near zero the smallest
    # rounding of an update is a thousand ulps of the parameter.
    start = {key: np.copysign(1 + np.abs(x) / 4, x) for key, x in draw().items()}
    gradients = [draw() for _ in range(steps)]
    tx = paged(
        inner, page_size=PAGE_BYTES, min_paged_size=0, device_budget=device_budget
    )
    wanted_params, wanted_state = _train(inner, start, gradients)
    params, state = _train(tx, start, gradients)
    return Comparison(
        plan(tx, start).moments,
        difference(state, wanted_state),
        difference(params, wanted_params),
    )


def _train(
    tx: Transformation,
    start: PyTree[ArrayLike],
    gradients: list[PyTree[ArrayLike]],
) -> tuple[PyTree[np.ndarray], PyTree[np.ndarray]]:
    params = jax.tree.map(jnp.array, start)
    state = tx.init(params)

    # Shapes that state where they live, as uncommitted arrays do not: without that,
    # jax 0.10.2 to 0.12.0.1 pair donated buffers with outputs in other memory.
    arguments = typed_shapes((params, state, params))
    update = jit_step(tx.update, *arguments, donate_argnums=(0, 1))
    # A program of its own, so that both runs add alike: within one program XLA
    # multiplies by the learning rate and adds in one rounding where it can fuse them.
    apply = jax.jit(optax.apply_updates, donate_argnums=0)
    for gradient in gradients:
        updates, state = update(jax.tree.map(jnp.array, gradient), state, params)
        params = apply(params, updates)
    return jax.tree.map(np.asarray, (params, state))


def difference(actual: PyTree[np.ndarray], wanted: PyTree[np.ndarray]) -> Difference:
    """The distance between two trees' arrays; errors are relative to the second."""
    different, ulps, error = 0, 0, 0.0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(f"{x.dtype}{x.shape}, wanted {y.dtype}{y.shape}")
        steps = np.abs(_ordered(x) - _ordered(y))
        different += int(np.count_nonzero(steps))
        ulps = max(ulps, int(steps.max(initial=0)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        if steps.any():
            # Relative to the largest value of the leaf, and never to zero.
            scale = np.abs(y).max(initial=np.finfo(np.float32).tiny)
            worst = float(np.abs(x - y).max() / scale)
            error = max(error, worst if math.isfinite(worst) else math.inf)
    values = sum(map(np.size, jax.tree.leaves(wanted)))
    return Difference(values, different, ulps, error)


def refuse_not_finite(tree: PyTree[np.ndarray]) -> None:
    """Refuses values that are equal and yet prove nothing: NaN and infinities."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree)):
        raise ArithmeticError("values are not finite")


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, one apart for neighbouring floats."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bits
    # Bit patterns of negative floats are in the reverse order.
    lowest = -(1 << (8 * x.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)


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
    runs = track((NO_GRAPHS, GRAPHS), "with CUDA graphs and without", 2)
    without, with_graphs = (trained(flag, steps, limit) for flag in runs)
    refuse_not_finite(without)
    return difference(with_graphs, without)


def trained(flag: str, steps: int, limit: float) -> Trained:
    """The result of `train` in a new process, with this flag of XLA besides."""
    # What the environment says of graphs would hold for both runs.
    told = os.environ.get("XLA_FLAGS", "").split()
    told = [x for x in told if not x.startswith(NO_GRAPHS)]
    flags = " ".join([*told, _SAME_PRODUCTS, flag])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trained.npz"
        # The process is to import this package, wherever it starts.
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
