"""What the tests compare with: Optax itself, and how far apart two numbers are."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paged_optax as po
from paged_optax.backend.memory import on_host

#: Each alias, the optimizer it pages, and keyword arguments that reach most of it.
ALIASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "paged_adamw": (optax.adamw, {"weight_decay": 0.1}),
    "paged_adam": (optax.adam, {}),
    "paged_nadamw": (optax.nadamw, {}),
    "paged_lion": (optax.lion, {}),
    "paged_ademamix": (optax.contrib.ademamix, {"weight_decay": 0.1}),
    "paged_sgd": (optax.sgd, {"momentum": 0.9, "nesterov": True}),
    "paged_rmsprop": (optax.rmsprop, {"momentum": 0.9}),
    "paged_adagrad": (optax.adagrad, {}),
    "paged_lamb": (optax.lamb, {"weight_decay": 0.1}),
    "paged_lars": (optax.lars, {"weight_decay": 0.1}),
    "paged_adafactor": (optax.adafactor, {"momentum": 0.9}),
    "paged_muon": (optax.contrib.muon, {"weight_decay": 0.1}),
    "paged_adamw_32bit": (optax.adamw, {"b2": 0.95}),
    "paged_lion_32bit": (optax.lion, {"weight_decay": 0.1}),
    "paged_ademamix_32bit": (optax.contrib.ademamix, {"alpha": 2.0}),
}

#: A scalar, single values, odd sizes, a stack of matrices, and several pages.
SHAPES = {
    "scalar": (),
    "one": (1,),
    "seven": (7,),
    "odd": (129, 65),
    "stack": (3, 5, 257),
    "large": (512, 130),
}

#: Several pages a leaf, and even a single value paged.
SMALL_PAGES = {"page_size": "4KiB", "min_paged_size": "1B"}


def arrays(
    dtype: Any = jnp.float32, seed: int = 0, shapes: dict[str, Any] = SHAPES
) -> dict[str, jax.Array]:
    """A tree of normally distributed values."""
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.normal(size=shape), dtype)
        for name, shape in shapes.items()
    }


def ulps(first: Any, second: Any, scale: Any = None) -> float:
    """The largest difference of two arrays, in units in the last place of `scale`.

    Args:
      first: An array.
      second: Another of the same shape and dtype.
      scale: The values whose ulp is the unit, element by element; `first` if absent.
        A sum can be far smaller than its terms, and is only as exact as they are.

    Returns:
      0.0 where they are equal bit for bit, but for the bits of a NaN and the sign of
      zero; infinity where one is finite, or NaN, and the other is not.
    """
    if jnp.issubdtype(first.dtype, jax.dtypes.prng_key):
        first, second = map(jax.random.key_data, (first, second))
    first, second = np.asarray(first), np.asarray(second)
    assert (first.shape, first.dtype) == (second.shape, second.dtype)
    if not first.size:
        return 0.0
    if not jnp.issubdtype(first.dtype, jnp.inexact):
        return float(np.max(first != second))
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        return max(
            ulps(first.real, second.real, np.abs(first)),
            ulps(first.imag, second.imag, np.abs(first)),
        )
    unit = np.abs(first if scale is None else np.asarray(scale, first.dtype))
    unit = np.maximum(unit, jnp.finfo(first.dtype).tiny)
    with np.errstate(all="ignore"):
        unit = np.nextafter(unit, np.array(np.inf, unit.dtype)) - unit
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        distance = np.abs(first.astype(np.float64) - second) / unit.astype(np.float64)
    distance = np.where(np.isnan(distance), np.inf, distance)
    return float(np.max(np.where(same, 0.0, distance)))


def distances(first: Any, second: Any, scale: Any = None) -> dict[str, float]:
    """The `ulps` of each leaf that differs, by path: none where two trees are equal."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    flat = jax.tree_util.tree_flatten_with_path(first)[0]
    scales = [None] * len(flat) if scale is None else jax.tree.leaves(scale)
    found = {
        jax.tree_util.keystr(path): ulps(x, y, unit)
        for (path, x), y, unit in zip(
            flat, jax.tree.leaves(second), scales, strict=True
        )
    }
    return {path: distance for path, distance in found.items() if distance}


def assert_equal(first: Any, second: Any) -> None:
    """Fails unless two trees are equal bit for bit."""
    assert distances(first, second) == {}


def kinds(tree: Any) -> list[str]:
    """The memory kind of every array of a tree, in order; each is of that type too.

    What is in host memory and has the type of device memory would not be paged.
    """
    for x in jax.tree.leaves(tree):
        hosted = x.sharding.memory_kind == "pinned_host"
        assert on_host(x) == hosted or isinstance(x, jax.ShapeDtypeStruct)
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def steps(
    tx: optax.GradientTransformation,
    params: Any,
    count: int = 25,
    *,
    jit: Callable[..., Any] = jax.jit,
    gradients: Callable[[int], Any] | None = None,
    starts: list[Any] | None = None,
    **extra_args: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """Updates, parameters and state after each step.

    Args:
      tx: The transformation.
      params: The parameters.
      count: How many steps.
      jit: What to wrap `init`, `update` and `apply_updates` in.
      gradients: Makes the gradients of a step; random ones if absent.
      starts: The parameters each step starts from, instead of its own.
      **extra_args: For `update`.
    """
    gradients = gradients or functools.partial(_gradients, params)
    update, apply = jit(tx.update), jit(optax.apply_updates)
    state = jit(tx.init)(params)
    for number in range(count):
        if starts is not None:
            params = starts[number]
        updates, state = update(gradients(number), state, params, **extra_args)
        params = apply(params, updates)
        yield updates, params, state


def _gradients(params: Any, number: int) -> Any:
    random = np.random.default_rng(100 + number)
    return jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params
    )


def largest(trees: list[Any]) -> Any:
    """Element by element, the largest magnitude that any of some trees holds."""

    def of(*arrays: Any) -> Any:
        if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
            return arrays[0]
        return np.max(np.abs([np.asarray(x) for x in arrays]), axis=0)

    return jax.tree.map(of, *trees)


def compare(
    wanted: optax.GradientTransformation,
    paged: optax.GradientTransformation,
    params: Any,
    count: int = 25,
    **extra_args: Any,
) -> dict[str, dict[str, float]]:
    """How far a paged transformation is from the one of Optax.

    Both run jitted. The states run freely. Each step's parameters start from equal
    ones, and are measured in ulps of the largest of the old parameter, the update and
    the new parameter: a sum is no more exact than its terms.

    Returns:
      The distances of the last state, and the largest of all steps' parameters, by
      path, where there are any.
    """
    right = list(steps(wanted, params, count, **extra_args))
    starts = [params, *(new for _, new, _ in right[:-1])]
    found = list(steps(paged, params, count, starts=starts, **extra_args))
    assert "pinned_host" in kinds(found[-1][2])
    apart: dict[str, float] = {}
    for start, (updates, new, _), (_, ours, _) in zip(
        starts, right, found, strict=True
    ):
        by_path = distances(new, ours, largest([start, updates, new]))
        apart |= {path: max(x, apart.get(path, 0.0)) for path, x in by_path.items()}
    states = largest([state for *_, state in right])
    state = distances(right[-1][2], found[-1][2], states)
    return {"state": state, "parameters": apart}


def compare_alias(
    alias: str, params: Any, count: int = 25
) -> dict[str, dict[str, float]]:
    """`compare` for an alias, several pages a leaf forced."""
    optimizer, kwargs = ALIASES[alias]
    paged = getattr(po, alias)(1e-2, **kwargs, **SMALL_PAGES)
    return compare(optimizer(1e-2, **kwargs), paged, params, count)
