"""Meshes of explicit axes, on which an array's type says how it is divided."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)


def automatically(
    function: Callable[..., Any], arguments: Sequence[Any], results: Any
) -> Any:
    """Calls a function on a mesh of explicit axes as if they were automatic.

    What is traced of a transformation knows no axes: its equations would make arrays of
    other types than those that they meet.

    Args:
      function: What to call.
      arguments: Its arguments, trees of arrays.
      results: A tree like its results: for each an array or a type that is divided as
        it is to be; None for what is on all devices.

    Returns:
      The results.
    """
    meshes = map(_explicit_mesh, jax.tree.leaves(arguments))
    mesh = next(filter(None, meshes), None)
    if mesh is None:
        return function(*arguments)
    spec = lambda x: jax.typeof(x).sharding.spec if _explicit_mesh(x) else None
    # The mesh is stated too: without one around, `auto_axes` would do nothing.
    like = lambda x: NamedSharding(mesh, spec(x) or PartitionSpec())
    shardings = jax.tree.map(like, results, is_leaf=lambda x: x is None)
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*arguments)


def without_explicit_axes() -> contextlib.AbstractContextManager[Any]:
    """Traces within as on one device, where the mesh around has explicit axes.

    What is traced then runs on such a mesh and on automatic axes alike.
    """
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _explicit_mesh(x: Any) -> Any:
    """The mesh of explicit axes that an array's type names, or None."""
    if not hasattr(x, "dtype"):
        return None
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    return sharding.mesh if AxisType.Explicit in axis_types(sharding) else None


def axis_types(sharding: Any) -> set[AxisType]:
    """The types of a sharding's axes; empty where it has no mesh."""
    return set(getattr(getattr(sharding, "mesh", None), "axis_types", ()))
