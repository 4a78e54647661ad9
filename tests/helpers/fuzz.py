"""Random transformations, paged and unpaged, where XLA:CPU rounds one way only.

A recipe is a dictionary of numbers and names, so that hypothesis can draw and shrink
it. `python tests/helpers/fuzz.py` answers with the distances of the recipes it is asked
for, see `apart`; the flags are those of `exact`.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import apart, exact, reference
from paged_optax.codecs import arranged
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.codec_rules import check, choose
from paged_optax.transform.owners import parameter_of


def _closing_over(x: Array) -> Array:
    factor = np.linspace(0.5, 1.5, x.size, dtype=np.float32).reshape(x.shape)
    return jax.jit(lambda x: x * factor.astype(x.dtype))(x)


def _noise(x: Array) -> Array:
    return x + jax.random.normal(jax.random.key(5), x.shape, x.dtype)


def _product(x: Array) -> Array:
    rows = x.reshape(x.shape[0] if x.ndim else 1, -1) if x.size else x
    return (rows @ rows.T @ rows).reshape(x.shape) / max(x.size, 1)


def _other_order(x: Array) -> Array:
    return lax.reshape(x, x.shape, tuple(reversed(range(x.ndim))))


def _iota(x: Array) -> Array:
    return x * lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) if x.ndim else x


#: Machine code that is not optimized is sooner made: a case takes 1.5 s instead of 2.2.
FLAGS = (
    f"{exact.FLAGS} --xla_force_host_platform_device_count=4"
    " --xla_backend_optimization_level=0"
)

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
    "log1p": lambda x, y: jnp.log1p(abs(x)),
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
    "noise": lambda x, y: _noise(x),
    "norm": lambda x, y: x / (1 + jnp.linalg.norm(x.ravel())),
    "other order": lambda x, y: _other_order(x),
    "product": lambda x, y: _product(x),
    "reverse": lambda x, y: jnp.flip(x),
    "sort": lambda x, y: jnp.sort(x, axis=-1) if x.ndim else x,
    "sum of columns": lambda x, y: x + jnp.sum(x, 0) if x.ndim > 1 else x,
    "there and back": lambda x, y: x.ravel().reshape(x.shape),
}

STEPS = ELEMENTWISE | WITHIN

_every_other = lambda params: {name: name != "b" for name in params}

#: What Optax chains before and after.
BLOCKS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.55, jax.random.key(0)),
    "centralize": optax.centralize,
    "clip": lambda: optax.clip(0.3),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "ema": lambda: optax.ema(0.9),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.scale)(0.5),
    "masked": lambda: optax.masked(optax.trace(0.9), _every_other),
    "scale_by_adam": optax.scale_by_adam,
    "scale_by_adamax": optax.scale_by_adamax,
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=4
    ),
    "scale_by_lion": optax.scale_by_lion,
    "scale_by_param_block_norm": optax.scale_by_param_block_norm,
    "scale_by_rms": optax.scale_by_rms,
    "scale_by_rss": optax.scale_by_rss,
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1.0 + n)),
    "scale_by_sign": optax.scale_by_sign,
    "scale_by_stddev": optax.scale_by_stddev,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "scale_by_yogi": optax.scale_by_yogi,
    "trace": lambda: optax.trace(0.9, nesterov=True),
    "zero_nans": optax.zero_nans,
}

SHAPES = [(), (1,), (7,), (300,), (33, 5), (8, 16), (3, 5, 7), (16, 40), (0, 4)]
EVEN_SHAPES = [(64, 80), (64, 1024), (8192,), (32, 4, 64), (3, 40, 50), (7,)]
#: Of enough values that a codec stores them.
CODED_SHAPES = [(64, 80), (5000,), (3, 40, 50), (260, 33), (16, 1024), (7,)]
CODECS = ["dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16"]
DTYPES = ["float32", "bfloat16", "float16"]


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
        first = values[0]
        made = [*values, (1 + count).astype(first.dtype)]
        for name, one, two in steps:
            result = STEPS[name](made[-1 - one], made[-1 - two])
            made.append(jnp.asarray(result).astype(first.dtype))

        def finite(x: Array) -> Array:
            return jnp.clip(jnp.nan_to_num(jnp.broadcast_to(x, first.shape)), -4, 4)

        return tuple(map(finite, (made[-1], 0.5 * made[2] + made[-2], made[-3])))

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


class Leaf(NamedTuple):
    """One leaf of a state.

    Attributes:
      shape: Its shape.
      codec: What stores it, or None.
      owner: The number of its parameter, or None.
    """

    shape: tuple[int, ...]
    codec: Any
    owner: int | None

    def encode(self, x: Any) -> Any:
        return x if self.codec is None else jax.jit(self.codec.encode)(x)

    def decode(self, stored: Any) -> Any:
        """The leaf on one device, as the transformation sees it."""
        stored = jax.tree.map(_on_one_device, stored)
        if self.codec is None:
            return stored
        return jax.jit(self.codec.decode, static_argnums=1)(stored, self.shape)


def _on_one_device(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def leaves_of(codec: Any, init: Callable[[Any], Any], params: Any) -> list[Leaf]:
    """The leaves of a transformation's state, in order."""
    flat = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, params))
    paths, avals = [path for path, _ in flat], [x for _, x in flat]
    own = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    owners = parameter_of(paths, own)
    codecs = choose(check(codec), paths, avals, own, owners)
    return [
        Leaf(x.shape, codec and arranged(codec, x.shape), owner)
        for x, codec, owner in zip(avals, codecs, owners, strict=True)
    ]


def divided(mesh: jax.sharding.Mesh | None) -> Callable[[Any], Any]:
    """What divides a tree over a mesh, along first axes that it divides evenly."""
    if mesh is None:
        return lambda tree: tree

    def place(x: Array) -> Array:
        even = x.ndim > 0 and x.size > 0 and x.shape[0] % 4 == 0
        spec = PartitionSpec("x") if even else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return lambda tree: jax.tree.map(place, tree)


def run(recipe: dict[str, Any]) -> dict[str, float]:
    """The distances of a recipe's transformation from its paged self.

    Both start each step from the same state, which Optax is given decoded. What it
    makes of it is stored as the paged state is; what belongs to a parameter that is not
    active stays.
    """
    inner = optax.chain(
        *(BLOCKS[name]() for name in recipe["before"]),
        by_steps(recipe["steps"]),
        *(BLOCKS[name]() for name in recipe["after"]),
    )
    codec = recipe["codec"]
    paged = po.paged(
        inner, page_size=recipe["page_size"], min_paged_size=0, codec=codec
    )
    shapes = dict(zip("abc", map(tuple, recipe["shapes"]), strict=False))
    make = functools.partial(
        reference.arrays, jnp.dtype(recipe["dtype"]), shapes=shapes
    )
    wrap, mesh = (lambda f: f) if recipe["eager"] else jax.jit, None
    if axes := recipe["mesh"]:
        mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType[axes],))
    explicit = axes == "Explicit"
    around = lambda: jax.set_mesh(mesh) if explicit else contextlib.nullcontext()
    divide, params = divided(mesh), make(9)
    leaves = leaves_of(codec, inner.init, params)

    def each(method: Callable[[Leaf, Any], Any], state: Any) -> Any:
        flat, structure = jax.tree.flatten(state, is_leaf=is_quantized)
        changed = [method(leaf, x) for leaf, x in zip(leaves, flat, strict=True)]
        return jax.tree.unflatten(structure, changed)

    # Under `jit` over automatic axes nothing says how arrays are divided.
    init = paged.init if mesh and not explicit else wrap(paged.init)
    with around():
        state = init(divide(params))
    found = _apart("init", each(Leaf.encode, jax.jit(inner.init)(params)), state)
    for number, gates in enumerate(recipe["active"]):
        gradients, old = make(seed=number), each(Leaf.decode, state)
        updates, new = jax.jit(inner.update)(gradients, old, params)
        kept = each(Leaf.encode, new)
        given, update = (divide(gradients), state, divide(params)), paged.update
        if gates is not None:
            gates = gates[: len(shapes)]
            active = dict(zip(shapes, gates, strict=True))
            updates = jax.tree.map(lambda x, on: x if on else 0 * x, updates, active)
            stays = [
                not (any(gates) if leaf.owner is None else gates[leaf.owner])
                for leaf in leaves
            ]
            flat, structure = jax.tree.flatten(kept, is_leaf=is_quantized)
            olds = jax.tree.leaves(state, is_leaf=is_quantized)
            both = zip(stays, olds, flat, strict=True)
            kept = jax.tree.unflatten(structure, [x if y else z for y, x, z in both])
            if recipe["traced"]:
                update = lambda *given: paged.update(*given[:-1], active=given[-1])
                given = (*given, jax.tree.map(jnp.asarray, active))
            else:
                update = functools.partial(update, active=active)
        with around():
            moved, state = wrap(update)(*given)
        found |= _apart(f"updates {number}", updates, moved)
        found |= _apart(f"state {number}", kept, state)
    return found


def _apart(name: str, wanted: Any, found: Any) -> dict[str, float]:
    distances = reference.distances(wanted, found)
    return {f"{name} {path}": distance for path, distance in distances.items()}


def _outcome(recipe: str) -> Any:
    try:
        return run(json.loads(recipe))
    except Exception as error:  # one case must not hide the others
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    apart.answer(_outcome)
