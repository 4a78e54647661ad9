"""What is known of an array: whether it is traced, tied to devices, of which dtype."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import PyTree


def is_traced(tree: PyTree) -> bool:
    """Whether any array of a tree is a tracer, which has a type and no place."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def is_committed(x: object) -> TypeGuard[Array]:
    """Whether something is an array that JAX does not move to other devices."""
    return isinstance(x, Array) and not is_traced(x) and x.committed


def floating_dtype(name: str, dtype: DTypeLike | None) -> np.dtype:
    """Reads a floating point dtype.

    Args:
      name: The argument's name, for messages.
      dtype: A dtype, or its name; None is none.

    Raises:
      ValueError: If it is no dtype, or none of floating point.

    Example:
      >>> floating_dtype("dtype", "bfloat16").itemsize
      2
    """
    try:
        found = jnp.dtype("O" if dtype is None else dtype)
    except (TypeError, ValueError, SyntaxError):
        found = jnp.dtype("O")
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{name}={dtype!r} is no floating point dtype: pass such as 'bfloat16' or"
            " 'float32'."
        )
    return found
