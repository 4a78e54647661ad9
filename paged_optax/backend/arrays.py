"""What is known of an array: whether it is traced, tied to devices, or on several."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import PyTree


def is_traced(tree: PyTree) -> bool:
    """Whether any array of a tree is a tracer, which has a type and no place."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def holds_moments(dtype: np.dtype) -> bool:
    """Whether an update may read and write arrays of a dtype beside each parameter.

    Moments have fractions. Remainders of master weights are the only 16-bit integers.
    """
    return jnp.issubdtype(dtype, jnp.inexact) or dtype == jnp.int16


def counts_steps(dtype: np.dtype) -> bool:
    """Whether a scalar of a dtype counts steps, in a state."""
    return jnp.issubdtype(dtype, jnp.integer) and not holds_moments(dtype)


def is_committed(x: object) -> TypeGuard[Array]:
    """Whether something is an array that JAX does not move to other devices."""
    return isinstance(x, Array) and not is_traced(x) and x.committed


def on_one_device(tree: PyTree[Array]) -> bool:
    """Whether the types of a tree's arrays name no mesh of several devices."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return all(mesh.empty or mesh.size == 1 for mesh in meshes)
