"""Meshes of explicit axes, on which an array's type says how it is divided."""

import contextlib
from collections.abc import Callable, Sequence

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jaxtyping import PyTree


def automatically(
    function: Callable[..., PyTree], arguments: Sequence[PyTree], results: PyTree
) -> PyTree:
    """Calls a function on a mesh of explicit axes as if they were automatic.

    What is traced of a transformation knows no axes: its equations would make arrays of
    other types than those that they meet.

    Args:
      function: What to call.
      arguments: Its arguments, trees of arrays.
      results: A tree like its results. For each result an array or a type that is
        divided as the result shall be; None for a result on all devices.

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
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind is AxisType.Explicit)
    run = jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)
    return run(*arguments)


def without_explicit_axes() -> contextlib.AbstractContextManager[None]:
    """Traces within as on one device, where the mesh around has explicit axes.

    What is traced then runs on such a mesh and on automatic axes alike.
    """
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return contextlib.nullcontext()
    if AxisType.Manual not in around.axis_types:
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    # Within a `jax.shard_map` over some of the axes; what varies along them says so.
    automatic = {AxisType.Explicit: AxisType.Auto}
    types = tuple(automatic.get(one, one) for one in around.axis_types)
    return jax.sharding.use_abstract_mesh(around.update(axis_types=types))


def _explicit_mesh(x: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh of explicit axes that an array's type names, or None."""
    if not hasattr(x, "dtype"):
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or AxisType.Explicit not in axis_types(sharding):
        return None
    return sharding.mesh


def axis_types(sharding: Sharding | None) -> set[AxisType]:
    """The types of a sharding's axes; empty where it has no mesh."""
    return set(getattr(getattr(sharding, "mesh", None), "axis_types", ()))
