"""Shapes of a Flax module, or of any function that makes parameters."""

import importlib
import operator
import os
import re
import sys

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import ArrayOrShape

_FORM = "--module names a function as package.module:function"


def module_shapes(name: str) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the parameters that a function makes; nothing is allocated.

    Args:
      name: `"package.module:function"`. The function takes no arguments and returns a
        Flax NNX module; or a Linen module and its example inputs, `(module, *inputs)`;
        or the parameters themselves, as arrays or `ShapeDtypeStruct`s.

    Returns:
      A pytree of `ShapeDtypeStruct`s.

    Raises:
      ValueError: If there is no such function, or it fails, or it returns none.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f"{name!r}: {_FORM}, such as mymodel:make_model.")
    place, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # As `python -m` does, for a console script.
    try:
        make = operator.attrgetter(attribute)(importlib.import_module(place))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {_FORM}, and {error}.") from error
    except (Exception, SystemExit) as error:  # Whatever a module does at its import.
        raise ValueError(f"{name!r}: importing {place} {_failed(error)}") from error
    try:
        made = jax.eval_shape(lambda: _parameters(make()))
    except (Exception, SystemExit) as error:  # Whatever the function does.
        raise ValueError(
            f"{name!r}: calling it without arguments {_failed(error)}"
        ) from error
    if not jax.tree.leaves(made):
        raise ValueError(f"{name!r} returns no parameters.")
    return _without_values(made)


def _failed(error: BaseException) -> str:
    """Another's error in a line."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"failed with {type(error).__name__}: {first}".rstrip(": ")


def _parameters(made: PyTree) -> PyTree[ArrayLike]:
    """The parameters of what a function made, while it is traced."""
    if "flax" in sys.modules:  # Or it is no Flax module.
        from flax import linen, nnx

        if isinstance(made, nnx.Module):
            return nnx.to_pure_dict(nnx.split(made, nnx.Param, ...)[1])
        module, *inputs = made if isinstance(made, tuple) and made else (made,)
        if isinstance(module, linen.Module):
            return module.init(jax.random.key(0), *inputs)["params"]
    return jax.tree.map(_array, made)


def _array(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.lax.empty(x.shape, x.dtype)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"it returns a {type(x).__name__}, and that is no parameter")
    return x


def _without_values(tree: PyTree[ArrayOrShape]) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
