"""Training whose gradients nearly vanish: how large updates become, in units of lr.

`python tests/helpers/vanishing.py` prints a table: float32, each codec, and Adam with
states of bitsandbytes' own kernels where its shared library is installed (PyTorch need
not be).
"""

import ctypes
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from paged_optax.codecs import DynamicInt8
from paged_optax.codecs.dynamic_int8 import dynamic_map

LEARNING_RATE = 1e-3
STEPS = 200
CODECS: dict[str, Any] = {
    "int8": "dynamic_int8",
    "int4": "dynamic_int4",
    "fp8": "float8_e4m3",
}

Loss = Callable[[Any, jax.Array], jax.Array]


def _normal(seed: int, *shape: int) -> jax.Array:
    """Weights of variance 1 / inputs."""
    key = jax.random.key(seed)
    return jax.random.truncated_normal(key, -2, 2, shape) / shape[0] ** 0.5


def _classified(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def equal_examples() -> tuple[Any, Loss]:
    """An MLP that eight equal examples of different labels soon cannot teach."""
    params = {"a": _normal(0, 784, 256), "b": _normal(1, 256, 256)}
    params |= {"c": _normal(2, 256, 10)}
    x, labels = jnp.ones((8, 784)), jnp.arange(8)

    def loss(p: Any, key: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"])
        return _classified(hidden @ p["c"], labels)

    return params, loss


def dead_units() -> tuple[Any, Loss]:
    """An MLP half of whose hidden units die after the first steps."""
    params = {"a": _normal(0, 64, 256), "b": jnp.zeros(256), "c": _normal(1, 256, 16)}

    def loss(p: Any, key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (32, 64))
        bias = p["b"] - jnp.where(jnp.arange(256) % 2, 0.0, 3.0)
        hidden = jax.nn.relu(x @ p["a"] + bias)
        return _classified(hidden @ p["c"], jnp.arange(32) % 16)

    return params, loss


def sparse_rows() -> tuple[Any, Loss]:
    """An embedding of which each step sees some rows, the frequent ones mostly."""
    params = {"embedding": _normal(0, 2000, 64), "out": _normal(1, 64, 2000)}

    def loss(p: Any, key: jax.Array) -> jax.Array:
        tokens = (2000 * jax.random.uniform(key, (64,)) ** 6).astype(jnp.int32)
        return _classified(p["embedding"][tokens] @ p["out"], jnp.roll(tokens, 1))

    return params, loss


def lora() -> tuple[Any, Loss]:
    """Adapters whose second factor starts at zero: the first has no gradient."""
    weight = _normal(0, 512, 512)
    params = {"a": _normal(1, 512, 16), "b": jnp.zeros((16, 512))}
    target = weight + 0.1 * _normal(3, 512, 4) @ _normal(4, 4, 512)

    def loss(p: Any, key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (16, 512))
        return jnp.mean(jnp.square(x @ (weight + p["a"] @ p["b"] - target)))

    return params, loss


def convergence() -> tuple[Any, Loss]:
    """A regression that ends at machine zero, where gradients are rounding errors."""
    params = {"w": _normal(0, 256, 64)}
    x, target = _normal(1, 64, 256), _normal(2, 256, 64)

    def loss(p: Any, key: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ (p["w"] - target)))

    return params, loss


SCENARIOS: dict[str, Callable[[], tuple[Any, Loss]]] = {
    "equal examples": equal_examples,
    "dead units": dead_units,
    "sparse rows": sparse_rows,
    "LoRA, B at zero": lora,
    "converges to zero": convergence,
}


def largest_update(
    scenario: Callable[[], tuple[Any, Loss]], tx: optax.GradientTransformation
) -> float:
    """The largest |update| of some steps, over the learning rate."""
    params, loss = scenario()

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, key), state, params)
        size = optax.tree.max(jax.tree.map(jnp.abs, updates))
        return optax.apply_updates(params, updates), state, size

    state, sizes = tx.init(params), []
    for key in jax.random.split(jax.random.key(9), STEPS):
        params, state, size = step(params, state, key)
        sizes.append(size)
    return max(map(float, sizes)) / LEARNING_RATE


def eight_bits(**how: Any) -> optax.GradientTransformation:
    """`paged_adamw` without decay."""
    return po.paged_adamw(LEARNING_RATE, weight_decay=0.0, **how)


EXACT = optax.adamw(LEARNING_RATE, weight_decay=0.0)
#: What bitsandbytes' exact kernels store: second moments may vanish.
ROUNDING = {"mu": "dynamic_int8", "nu": DynamicInt8(signed=False, rounds_to_zero=True)}


def bitsandbytes_adam() -> optax.GradientTransformation | None:
    """Adam between bitsandbytes' own kernels for the CPU; None where there are none."""
    spec = importlib.util.find_spec("bitsandbytes")
    folders = (spec and spec.submodule_search_locations) or []
    paths = [pathlib.Path(x) / "libbitsandbytes_cpu.so" for x in folders]
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    pointer = lambda x: x.ctypes.data_as(ctypes.c_void_p)
    size, block = ctypes.c_longlong, 256

    def through(x: np.ndarray, *, signed: bool) -> np.ndarray:
        """A moment, stored and read back."""
        x = np.ascontiguousarray(x, np.float32)
        code = np.array(dynamic_map(signed))
        scales = np.zeros(-(-x.size // block), np.float32)
        codes, back = np.zeros(x.shape, np.uint8), np.zeros_like(x)
        arguments = (pointer(scales), size(block), size(x.size))
        library.cquantize_blockwise_cpu_fp32(
            pointer(code), pointer(x), arguments[0], pointer(codes), *arguments[1:]
        )
        library.cdequantize_blockwise_cpu_fp32(
            pointer(code), pointer(codes), arguments[0], pointer(back), *arguments[1:]
        )
        return back

    def stored(tree: Any, *, signed: bool) -> Any:
        def one(x: jax.Array) -> jax.Array:
            if x.size < 4096:
                return x
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(functools.partial(through, signed=signed), like, x)

        return jax.tree.map(one, tree)

    adam = EXACT

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = adam.update(updates, state, params)
        mu, nu = stored(state[0].mu, signed=True), stored(state[0].nu, signed=False)
        return updates, (state[0]._replace(mu=mu, nu=nu), *state[1:])

    return optax.GradientTransformation(adam.init, update)


def contestants() -> Iterator[tuple[str, optax.GradientTransformation]]:
    """Who trains, by name."""
    yield "float32", EXACT
    for name, codec in CODECS.items():
        yield name, eight_bits(codec=codec)
    yield "int8, rounds_to_zero", eight_bits(codec=ROUNDING)
    if (theirs := bitsandbytes_adam()) is not None:
        yield "bitsandbytes", theirs


def main() -> None:
    """Prints the table."""
    from paged_optax.backend.text import table

    each = list(contestants())
    rows = [
        (name, *(f"{largest_update(scenario, tx):.2f}" for _, tx in each))
        for name, scenario in SCENARIOS.items()
    ]
    print(table(("largest update / lr", *(name for name, _ in each)), rows))


if __name__ == "__main__":
    main()
