"""Containers that people keep layers in, and a model of such layers.

All have their leaves in one order, so that what is compiled for one serves the others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from helpers.stacked import mean_loss


class Named(NamedTuple):
    b: Any
    w: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    b: Any
    w: Any


class Struct(flax.struct.PyTreeNode):
    b: Any
    w: Any


class Module(eqx.Module):
    b: Any
    w: Any


def _variables(**leaves: Any) -> nnx.State:
    return nnx.State(jax.tree.map(nnx.Param, leaves))


def _nested(b: Any, w: Any) -> dict[str, Any]:
    inner = Named(_variables(bias=b), flax.core.FrozenDict({"kernel": w}))
    return {"linear": inner, "none": None}


#: Of a vector `b` and a matrix `w`, or of a stack of each.
CONTAINERS: dict[str, Callable[..., Any]] = {
    "dict": lambda **leaves: leaves,
    "State": _variables,
    "unboxed": lambda **leaves: nnx.State(leaves),
    "FrozenDict": lambda **leaves: flax.core.FrozenDict(leaves),
    "named tuple": Named,
    "dataclass": Plain,
    "struct": Struct,
    "module": Module,
    "nested": _nested,
}


def taken(weights: Any) -> tuple[Array, Array]:
    """The vector and the matrix of any of them in float32, as its own access gives."""
    if isinstance(weights, dict) and "linear" in weights:
        linear = weights["linear"]
        found = linear.b["bias"], linear.w["kernel"]
    elif isinstance(weights, (Named, Plain, Struct, Module)):
        found = weights.b, weights.w
    else:
        found = weights["b"], weights["w"]
    b, w = (x[...] if isinstance(x, nnx.Variable) else x for x in found)
    wide = jnp.promote_types(w.dtype, jnp.float32)
    return b.astype(wide), w.astype(wide)


def prologue(rest: Any, batch: Array) -> tuple[Array, None]:
    b, w = taken(rest["first"])
    return jnp.tanh(batch @ w + b), None


def layer(weights: Any, x: Array, context: None, i: Array) -> tuple[Array, None]:
    b, w = taken(weights)
    return x + jnp.tanh(x @ w + b) @ w.T, None


def epilogue(rest: Any, x: Array, kept: None, batch: Array) -> Array:
    return jnp.mean((x - jnp.roll(batch, 1, -1)) ** 2)


def model(
    make: Callable[..., Any], dtype: Any = "float32", width: int = 64, rows: int = 64
) -> Any:
    """Parameters of two layers, and others."""
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: (0.1 * jax.random.normal(key, shape)).astype(dtype)
    return {
        "first": make(b=normal(keys[0], rows), w=normal(keys[1], rows, rows)),
        "layers": make(b=normal(keys[2], 2, width), w=normal(keys[3], 2, rows, width)),
    }


#: The same as one function of all parameters.
loss = mean_loss((prologue, layer, epilogue))
