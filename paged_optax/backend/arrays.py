"""What is known of an array: whether it is traced, or tied to devices."""

from typing import TypeGuard

import jax
from jax import Array
from jax.core import Tracer
from jaxtyping import PyTree


def is_traced(tree: PyTree) -> bool:
    """Whether any array of a tree is a tracer, which has a type and no place."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def is_committed(x: object) -> TypeGuard[Array]:
    """Whether something is an array that JAX does not move to other devices."""
    return isinstance(x, Array) and not is_traced(x) and x.committed
