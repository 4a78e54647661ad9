"""Axes of meshes: those along which values vary, and explicit ones.

Within a `jax.shard_map` that checks it, an array's type tells along which axes its
values differ between devices. Primitives take operands that vary alike. JAX's own
functions see to that; loops do not, for their carry keeps its type. On a mesh of
explicit axes an array's type tells how it is divided.
"""

import contextlib
from collections.abc import Callable, Sequence

import jax
from jax.core import ShapedArray
from jax.sharding import (
    AbstractMesh,
    AxisType,
    ManualAxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jax.typing import ArrayLike
from jaxtyping import PyTree


def in_shard_map() -> bool:
    """Whether the functions traced now see one device's parts of arrays."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """The axes along which any array, or type of one, of these trees varies."""
    types = map(_manual_type, jax.tree.leaves(trees))
    return frozenset(axis for x in types if x is not None for axis in x.varying)


def varying(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """The same arrays, which vary along these axes too; no value is changed."""
    if not axes:
        return tree
    order = jax.sharding.get_abstract_mesh().axis_names

    def vary(x: jax.Array) -> jax.Array:
        lacks = axes - varying_axes(x)
        names = tuple(name for name in order if name in lacks)
        return jax.lax.pcast(x, names, to="varying") if names else x

    return jax.tree.map(vary, tree)


def shape_dtype(
    x: ArrayLike | jax.ShapeDtypeStruct, like: PyTree = ()
) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, wherever it lives.

    Args:
      x: The array, or its type.
      like: The type varies along the axes of these arrays too.
    """
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak, manual = getattr(aval, "weak_type", False), _manual_type(aval)
    if manual is not None and (along := varying_axes(like)):
        manual = manual.update(varying=manual.varying | along)
    if manual is None or manual.empty or not in_shard_map():
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=weak,
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
        manual_axis_type=manual,
    )


def _manual_type(x: PyTree) -> ManualAxisType | None:
    known = isinstance(x, (ShapedArray, jax.ShapeDtypeStruct))
    return getattr(x if known else jax.typeof(x), "manual_axis_type", None)


def on_one_device(tree: PyTree[jax.Array]) -> bool:
    """Whether the types of a tree's arrays name no mesh of several devices."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return all(mesh.empty or mesh.size == 1 for mesh in meshes)


def with_automatic_axes(
    function: Callable[..., PyTree], arguments: Sequence[PyTree], results: PyTree
) -> PyTree:
    """Calls a function on a mesh of explicit axes as if they were automatic.

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
    # What is traced of a transformation knows no axes: its equations would make arrays
    # of other types than those that they meet.
    spec = lambda x: jax.typeof(x).sharding.spec if _explicit_mesh(x) else None
    # The mesh is stated too: without one around, `auto_axes` would do nothing.
    like = lambda x: NamedSharding(mesh, spec(x) or PartitionSpec())
    shardings = jax.tree.map(like, results, is_leaf=lambda x: x is None)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind is AxisType.Explicit)
    run = jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)
    return run(*arguments)


def on_automatic_axes(x: PyTree) -> PyTree:
    """A concrete array, whose type on a mesh of explicit axes then tells no division.

    Its buffers are the same.
    """
    if _explicit_mesh(x) is None:
        return x
    mesh: Mesh = x.sharding.mesh
    types = _without_explicit(mesh.axis_types)
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    kind = x.sharding.memory_kind
    sharding = NamedSharding(automatic, x.sharding.spec, memory_kind=kind)
    return jax.device_put(x, sharding)


def without_explicit_axes() -> contextlib.AbstractContextManager[None]:
    """Traces within as on one device, if the mesh around has explicit axes."""
    # What is traced then runs on such a mesh and on automatic axes alike.
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return contextlib.nullcontext()
    if AxisType.Manual not in around.axis_types:
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    # Within a `jax.shard_map` over some of the axes; what varies along them says so.
    types = _without_explicit(around.axis_types)
    return jax.sharding.use_abstract_mesh(around.update(axis_types=types))


def _without_explicit(types: Sequence[AxisType]) -> tuple[AxisType, ...]:
    automatic = {AxisType.Explicit: AxisType.Auto}
    return tuple(automatic.get(one, one) for one in types)


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
