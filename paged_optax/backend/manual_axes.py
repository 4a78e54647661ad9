"""Axes of a mesh along which values vary, within a `jax.shard_map` that checks it.

There an array's type tells along which axes its values differ between devices.
Primitives take operands that vary alike: JAX's own functions see to that, and loops,
which carry what they were given, do not.
"""

import jax
from jax.core import ShapedArray
from jax.sharding import AxisType, ManualAxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree


def in_shard_map() -> bool:
    """Whether what is traced here sees a device's own parts of arrays."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """The axes along which any array, or type of one, of these trees varies."""
    found = map(_manual_type, jax.tree.leaves(trees))
    return frozenset(axis for x in found if x is not None for axis in x.varying)


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


def abstract(
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
