"""What random transformations are made of: steps, Optax's blocks, and wrappers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.extend import core


def _closing_over(x: Array) -> Array:
    factor = np.linspace(0.5, 1.5, x.size, dtype=np.float32).reshape(x.shape)
    return jax.jit(lambda x: x * factor.astype(x.dtype))(x)


def _product(x: Array) -> Array:
    rows = x.reshape(x.shape[0] if x.ndim else 1, -1) if x.size else x
    return (rows @ rows.T @ rows).reshape(x.shape) / max(x.size, 1)


def _iota(x: Array) -> Array:
    return x * lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) if x.ndim else x


Transformation = optax.GradientTransformation

#: A step of a transformation takes two arrays, or scalars, and gives one.
Step = Callable[[Array, Array], Any]

#: Those that make each value of the same value of their operands. XLA:CPU of jax 0.12
#: gives `cbrt` other last bits in a vector than in a scalar: it is not here.
ELEMENTWISE: dict[str, Step] = {
    "abs": lambda x, y: abs(x),
    "add": lambda x, y: x + y,
    "atan2": jnp.arctan2,
    "clamp": lambda x, y: lax.clamp(jnp.float32(-0.5), x.astype(jnp.float32), 0.5),
    "convert": lambda x, y: x.astype(jnp.bfloat16),
    "copy": lambda x, y: jnp.copy(x),
    "cos": lambda x, y: jnp.cos(x),
    "div": lambda x, y: x / (1 + abs(y)),
    "erf": lambda x, y: lax.erf(x),
    "exp": lambda x, y: jnp.exp(-abs(x)),
    "fill": lambda x, y: jnp.full_like(x, 0.5),
    "floor": lambda x, y: jnp.floor(4 * x),
    "integer_pow": lambda x, y: x**3,
    "integers": lambda x, y: jnp.round(8 * x).astype(jnp.int32) & 7,
    "is_finite": lambda x, y: jnp.isfinite(x / y),
    "less": lambda x, y: x < y,
    "log1p": lambda x, y: lax.log1p(abs(x)),
    "logistic": lambda x, y: jax.nn.sigmoid(x),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "pow": lambda x, y: (1 + abs(x)) ** jnp.clip(y, -2, 2),
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 5, 3),
    "relu": lambda x, y: jax.nn.relu(x),
    "rem": lambda x, y: lax.rem(*jnp.broadcast_arrays(x, 1 + abs(y))),
    "rsqrt": lambda x, y: lax.rsqrt(1 + x * x),
    "scale": lambda x, y: 0.9 * x,
    "select": lambda x, y: jnp.where(x > 0, x, y),
    "sign": lambda x, y: jnp.sign(x),
    "sin": lambda x, y: jnp.sin(x),
    "sqrt": lambda x, y: jnp.sqrt(abs(x)),
    "square": lambda x, y: jnp.square(x),
    "sub": lambda x, y: x - y,
    "tanh": lambda x, y: jnp.tanh(x),
    "checkpoint": lambda x, y: jax.checkpoint(jnp.square)(x),
    "closure": lambda x, y: _closing_over(x),
}

#: Those that look at the rest of the leaf, or may.
WITHIN: dict[str, Step] = {
    "loop": lambda x, y: lax.fori_loop(0, 2, lambda _, x: 0.5 * x + 1, x),
    "branch": lambda x, y: lax.cond(jnp.any(y > 0), jnp.sin, jnp.cos, x),
    "argmax": lambda x, y: x + jnp.argmax(y) if y.size else x,
    "cumsum": lambda x, y: jnp.cumsum(x, axis=-1) if x.ndim else x,
    "first": lambda x, y: jnp.full_like(x, x.ravel()[0]) if x.size else x,
    "iota": lambda x, y: _iota(x),
    "largest": lambda x, y: jnp.max(abs(x), initial=0.0),
    "largest of rows": lambda x, y: (
        x - jnp.max(x, -1, keepdims=True, initial=-9.0) if x.ndim else x
    ),
    "mean": lambda x, y: x - jnp.mean(x) if x.size else x,
    "noise": lambda x, y: x + jax.random.normal(jax.random.key(5), x.shape, x.dtype),
    "norm": lambda x, y: x / (1 + jnp.linalg.norm(x.ravel())),
    "other order": lambda x, y: lax.reshape(x, x.shape, (*reversed(range(x.ndim)),)),
    "product": lambda x, y: _product(x),
    "reverse": lambda x, y: jnp.flip(x),
    "sort": lambda x, y: jnp.sort(x, axis=-1) if x.ndim else x,
    "sum of columns": lambda x, y: x + jnp.sum(x, 0) if x.ndim > 1 else x,
    "there and back": lambda x, y: x.ravel().reshape(x.shape),
}

STEPS = ELEMENTWISE | WITHIN


def every_other(tree: Any) -> Any:
    """A mask: the first leaf of a tree, not the second, the third, and so on."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [n % 2 == 0 for n in range(len(leaves))])


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda even: "even" if even else "odd", every_other(tree))


def _partition(even: Transformation, odd: Transformation) -> Transformation:
    return optax.partition({"even": even, "odd": odd}, _labels)


def scale_by_value() -> optax.GradientTransformationExtraArgs:
    """Reads an extra argument, `value`, into the updates and the state."""

    def update(updates, state, params=None, *, value, **extra_args):
        del params, extra_args
        state = jax.tree.map(lambda x: 0.5 * x + value.astype(x.dtype), state)
        updates = jax.tree.map(lambda u, x: u * x.astype(u.dtype), updates, state)
        return updates, state

    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformationExtraArgs(init, update)


#: The blocks that read an extra argument.
WITH_VALUE = ("scale_by_value",)

#: What Optax makes without arguments.
_PLAIN = "centralize keep_params_nonnegative zero_nans"
_PLAIN += "".join(
    f" scale_by_{name}"
    for name in (
        "adadelta adam adamax adan amsgrad belief lion novograd optimistic_gradient"
        " param_block_norm param_block_rms radam rms rss sign stddev trust_ratio yogi"
    ).split()
)

#: What Optax chains before and after.
BLOCKS: dict[str, Callable[[], Transformation]] = {
    **{name: getattr(optax, name) for name in _PLAIN.split()},
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_decayed_weights, masked": lambda: optax.add_decayed_weights(
        0.1, mask=every_other
    ),
    "add_noise": lambda: optax.add_noise(0.1, 0.55, jax.random.key(0)),
    "apply_every": lambda: optax.apply_every(2),
    "clip": lambda: optax.clip(0.3),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "ema": lambda: optax.ema(0.9),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.scale)(0.5),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.scale)(
        optax.linear_schedule(0.9, 0.5, 2)
    ),
    "masked": lambda: optax.masked(optax.trace(0.9), every_other),
    "partition": lambda: _partition(optax.scale_by_lion(), optax.trace(0.5)),
    "scale_by_ademamix": optax.contrib.scale_by_ademamix,
    "scale_by_adopt": optax.contrib.scale_by_adopt,
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=4
    ),
    "scale_by_rprop": lambda: optax.scale_by_rprop(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1.0 + n)),
    "scale_by_value": scale_by_value,
    "trace": lambda: optax.trace(0.9, nesterov=True),
}
BLOCKS = dict(sorted(BLOCKS.items()))


#: Blocks and steps that sum over a leaf, or a row of it. XLA:CPU sums in another order
#: in a loop than outside, so that the last bits of what follows may differ.
SUMS = {"clip_by_global_norm", "cumsum", "mean", "norm", "product", "sum of columns"}
SUMS |= {"adaptive_grad_clip", "centralize", "clip_by_block_rms"}
_SUMMED = "factored_rms novograd param_block_norm param_block_rms trust_ratio"
SUMS |= {f"scale_by_{name}" for name in _SUMMED.split()}

_ALSO = "apply_every clip ema keep_params_nonnegative scale_by_adam scale_by_schedule"
_ALSO += " scale_by_sign scale_by_trust_ratio trace zero_nans"

#: What is chained after a paged transformation: any of Optax's, which is not paged.
FOLLOWING: dict[str, Callable[[], Transformation]] = {
    "scale": lambda: optax.scale(0.25),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    **{name: BLOCKS[name] for name in BLOCKS if name.startswith("add_decayed")},
    **{name: BLOCKS[name] for name in _ALSO.split()},
}

#: Those that make each value of the same value.
FOLLOWING_ELEMENTWISE = [
    name for name in FOLLOWING if name not in ("clip_by_global_norm", *SUMS)
]

#: What `paged` keeps masters by.
MASTERS = [["master_dtype", "float32"], ["master_remainders", True]]


@functools.cache
def resets(block: str) -> bool:
    """Whether Optax's `lookahead` can reset a block's state, which it multiplies.

    A key cannot be multiplied, and a flag becomes an integer.
    """
    state = jax.eval_shape(BLOCKS[block]().init, {"w": jnp.zeros((2, 2))})
    return all(jnp.issubdtype(x.dtype, jnp.number) for x in jax.tree.leaves(state))


#: Steps whose last bits XLA:CPU's fusion emitters give otherwise in a vector than in a
#: scalar: `jax.jit(lax.erf)` of 16 numbers from 3.5 to 4.2 differs in two of them from
#: what they are in an array of (16, 1024). Before jax 0.11, `fuzz.FLAGS` has others.
ROUNDED = {"erf"} if jax.__version_info__ >= (0, 11) else set[str]()

#: Around the random steps alone, where a parameter may be left out of them.
MASKS: dict[str, Callable[[Transformation], Transformation]] = {
    "masked": lambda inner: optax.masked(inner, every_other),
    "partition": lambda inner: _partition(inner, optax.trace(0.9)),
}

_second = lambda number, *_, **__: number % 2 == 1

#: Around what is paged: of Optax around the plain one, of either around the paged.
WRAPPERS: dict[str, Callable[[Any, Transformation], Any]] = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 3),
    "chain": lambda of, tx: optax.chain(optax.clip(0.5), tx, optax.scale(0.5)),
    "conditionally_mask": lambda of, tx: of.conditionally_mask(tx, _second),
    "conditionally_transform": lambda of, tx: of.conditionally_transform(tx, _second),
    "lookahead": lambda of, tx: of.lookahead(tx, 2, 0.5),
    "lookahead that resets": lambda of, tx: of.lookahead(tx, 2, 0.5, reset_state=True),
    "masked": lambda of, tx: optax.masked(tx, every_other),
    "partition": lambda of, tx: _partition(tx, optax.trace(0.9)),
}

#: How leaves make a tree.
TREES: dict[str, Callable[[list[Any]], Any]] = {
    "dict": lambda leaves: dict(zip("abc", leaves, strict=False)),
    "list": lambda leaves: leaves,
    "nested": lambda leaves: {"a": {"w": leaves[0]}, "b": (None, leaves[1:])},
}

#: No codec stores so few values.
SHAPES = [(), (1,), (7,), (300,), (33, 5), (8, 16), (3, 5, 7), (16, 40), (0, 4)]
#: Of enough values that a codec stores them.
CODED_SHAPES = [(64, 80), (5000,), (3, 40, 50), (260, 33), (16, 1024), (7,)]
#: Of other shapes a device's part is stored in other blocks than the whole.
EVEN_SHAPES = [(128, 80), (64, 1024), (8192,), (32, 4, 64), (3, 40, 50), (7,)]
CODECS: list[Any] = ["dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16"]
CODECS += [{"one": "bfloat16", "two": "dynamic_int8"}, {"two": "float8_e4m3"}]
DTYPES = ["float32", "bfloat16", "float16"]
#: The axes of eight devices.
MESHES = [[8], [4, 2]]
PAGE_SIZES = [16, 64, 100, 256, 500, 512, 777, 1024, 3000, 4096]
CODED_PAGE_SIZES = [2048, 3001, 4096, 16384]


def by_steps(steps: list[Any]) -> optax.GradientTransformation:
    """A transformation of two moments and a count, made of random steps.

    Args:
      steps: The name of a step, and how many values ago its two operands were made,
        0 to 4. Before the first are the gradient, the parameter, the two moments and
        the count.
    """

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        ones = jax.tree.map(jnp.ones_like, params)
        return {"count": jnp.zeros((), jnp.int32), "one": zeros, "two": ones}

    def leaf(count: Array, *values: Array) -> tuple[Array, ...]:
        dtype = values[0].dtype
        made = [x.astype(dtype) for x in (*values, 1 + count)]
        for name, one, two in steps:
            result = STEPS[name](made[-1 - one], made[-1 - two])
            made.append(jnp.asarray(result).astype(dtype))

        def finite(x: Array, like: Array) -> Array:
            x = jnp.clip(jnp.nan_to_num(jnp.broadcast_to(x, like.shape)), -4, 4)
            return x.astype(like.dtype)

        results = made[-1], 0.5 * made[2] + made[-2], made[-3]
        return tuple(map(finite, results, (values[0], *values[2:])))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        made = jax.tree.map(
            functools.partial(leaf, state["count"]),
            updates,
            params,
            state["one"],
            state["two"],
        )
        updates, one, two = (
            jax.tree.map(lambda _, x, n=n: x[n], updates, made) for n in range(3)
        )
        return updates, {"count": state["count"] + 1, "one": one, "two": two}

    return optax.GradientTransformation(init, update)


def primitives() -> set[str]:
    """The primitives that the random steps are made of."""
    found = set()

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for inner in core.jaxprs_in_params(eqn.params):
                look(inner)

    for step in STEPS.values():
        look(jax.make_jaxpr(step)(jnp.ones((8, 16)), jnp.ones((8, 16))).jaxpr)
    return found
