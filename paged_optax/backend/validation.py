"""Checks of the arguments of public functions.

Every error names the argument.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath


def brief(value: object) -> str:
    """Returns the text of a value, or its type, for one line of a message."""
    text = repr(value)
    if len(text) > 80 or "\n" in text:
        return f"<{type(value).__name__}>"
    return text


def check_transformation(name: str, value: object) -> None:
    """Raises unless `value` has `init` and `update`."""
    if not all(callable(getattr(value, x, None)) for x in ("init", "update")):
        raise ValueError(
            f"{name}={brief(value)} is not an Optax transformation: pass one, such as"
            " paged(optax.adamw(1e-3))."
        )


def check_function(name: str, value: object) -> None:
    """Raises unless `value` is callable."""
    if not callable(value):
        raise TypeError(f"{name}={brief(value)} is not a function.")


def check_count(name: str, value: object, minimum: int) -> None:
    """Raises unless `value` is an int, and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={brief(value)} is not an int.")
    if value < minimum:
        raise ValueError(f"{name}={brief(value)} is less than {minimum}.")


def check_rate(name: str, value: object) -> None:
    """Raises unless `value` is a positive number."""
    real = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, real):
        raise TypeError(f"{name}={brief(value)} is not a number.")
    if not value > 0:
        raise ValueError(f"{name}={brief(value)} is not positive.")


def check_arrays(
    name: str, tree: PyTree, *, shapes: bool = True, numbers: bool = False
) -> None:
    """Raises unless all leaves are arrays, or `ShapeDtypeStruct`s, or numbers."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_array = hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype != object
        if isinstance(x, jax.ShapeDtypeStruct):
            is_array = shapes
        if is_array or (numbers and isinstance(x, (int, float, complex))):
            continue
        hint = ""
        if name == "state" and path:
            hint = (
                " Restore the leaf, with abstract_state(tx, params) as the target, or"
                " take it from tx.init(params)."
            )
        raise TypeError(
            f"{name}{keystr(path)} is of type {type(x).__name__}: {name} is a tree of"
            f" arrays{', or of their ShapeDtypeStructs' * shapes}.{hint}"
        )


def nondifferentiable(tree: PyTree) -> Iterator[tuple[KeyPath, Array]]:
    """Yields the leaves of a tree that have no gradient, with their paths."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            yield path, x


def floating_dtype(name: str, dtype: DTypeLike | None) -> np.dtype:
    """Returns the floating point dtype that an argument names."""
    try:
        result = jnp.dtype("O" if dtype is None else dtype)
    except (TypeError, ValueError, SyntaxError):
        result = jnp.dtype("O")
    if not jnp.issubdtype(result, jnp.floating):
        raise ValueError(
            f"{name}={dtype!r} is no floating point dtype: pass one such as 'bfloat16'"
            " or 'float32'."
        )
    return result


def check_enabled_bits(name: str, dtype: DTypeLike) -> None:
    """Raises if JAX would truncate a 64-bit dtype to 32 bits."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{name}={str(jnp.dtype(dtype))!r} needs JAX's 64 bits: switch them on, by"
            " jax.config.update('jax_enable_x64', True), or pass"
            f" {str(jax.dtypes.canonicalize_dtype(dtype))!r}."
        )


def parameter_dtype(name: str, value: DTypeLike) -> np.dtype:
    """Returns the dtype of parameters that an argument names."""
    result = jnp.dtype(value)
    if not jnp.issubdtype(result, jnp.inexact):
        raise ValueError(
            f"{name}={brief(value)} has no fractions: pass one such as 'bfloat16'."
        )
    check_enabled_bits(name, result)
    return result
