"""Shapes of a Flax module, or of any function that makes parameters."""

import importlib
import operator
import os
import sys

import jax
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
      ValueError: If there is no such function.
    """
    place, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r}: {_FORM}, such as mymodel:make_model.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # As `python -m` does, for a console script.
    try:
        make = operator.attrgetter(attribute)(importlib.import_module(place))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {_FORM}, and {error}.") from error
    return _without_values(jax.eval_shape(lambda: _parameters(make())))


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
    return x


def _without_values(tree: PyTree[ArrayOrShape]) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
