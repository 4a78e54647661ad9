"""Types shared by several rooms, and properties of array types.

Within a checked `jax.shard_map` an array's type has the mesh axes along which its
values vary between devices. Operands of a primitive must have equal axes; JAX's
functions convert them, but a loop's carry keeps its type. On a mesh of explicit axes
the type has the array's sharding.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import ShapedArray, Tracer
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

#: An array, a NumPy scalar, or a description of one.
ArrayOrShape = Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

#: The shape of an array.
Shape = tuple[int, ...]

#: JAX's key path. Its keys have no common type.
KeyPath = tuple[Any, ...]

#: A path string, or a JAX key path.
Path = str | KeyPath

# Pyright reads variables here, as jaxlib has no type stubs.
PyTreeDef: TypeAlias = jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]


@runtime_checkable
class Described(Protocol):
    """Arrays that describe their placement for given parameters."""

    def abstract(self, params: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        """Returns their shapes, dtypes and placements."""
        ...


#: An Optax transformation, or an object with its functions.
Transformation: TypeAlias = optax.GradientTransformation | optax.MultiSteps


def is_traced(tree: PyTree) -> bool:
    """Returns whether any leaf is a tracer."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def holds_moments(dtype: np.dtype) -> bool:
    """Returns whether arrays of a dtype may be moments.

    Moments have fractions; remainders of master weights are the only integers of 16 or
    8 bits.
    """
    return jnp.issubdtype(dtype, jnp.inexact) or dtype in (jnp.int16, jnp.int8)


def counts_steps(dtype: np.dtype) -> bool:
    """Returns whether a scalar of a dtype counts steps in a state."""
    return jnp.issubdtype(dtype, jnp.integer) and not holds_moments(dtype)


def is_committed(x: object) -> TypeGuard[Array]:
    """Returns whether an object is an array that JAX does not move."""
    return isinstance(x, Array) and not is_traced(x) and x.committed


def in_shard_map() -> bool:
    """Returns whether functions are traced for one device's shards."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """Returns the axes along which any array, or type, of the trees varies."""
    types = map(_manual_type, jax.tree.leaves(trees))
    return frozenset(axis for x in types if x is not None for axis in x.varying)


def varying(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """Makes arrays vary along these axes too; values are unchanged."""
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
    """Returns the shape and dtype of an array, without its memory.

    The type also varies along the axes of the arrays `like`.
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
    """Returns whether no array's type names a mesh of several devices."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return all(mesh.empty or mesh.size == 1 for mesh in meshes)


def with_automatic_axes(
    function: Callable[..., PyTree], args: Sequence[PyTree], results: PyTree
) -> PyTree:
    """Calls a function with explicit mesh axes treated as automatic.

    `results` is a tree like its results, of arrays or types with their shardings; None
    for a replicated result.
    """
    if (mesh := explicit_mesh(args)) is None:
        return function(*args)
    # A transformation's trace has no axes in its types, and its equations would not
    # accept arrays that do.
    spec = lambda x: jax.typeof(x).sharding.spec if _explicit_mesh(x) else None
    # Without an ambient mesh, `auto_axes` depends on the mesh of the shardings.
    like = lambda x: NamedSharding(mesh, spec(x) or PartitionSpec())
    shardings = jax.tree.map(like, results, is_leaf=lambda x: x is None)
    axes = mesh.explicit_axes
    run = jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)
    return run(*args)


def explicit_mesh(tree: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the mesh of explicit axes that an array's type names, or None."""
    return next(filter(None, map(_explicit_mesh, jax.tree.leaves(tree))), None)


def typed_automatic(x: PyTree) -> PyTree:
    """Returns a concrete array without explicit axes in its type, uncopied."""
    if _explicit_mesh(x) is None:
        return x
    mesh, kind = x.sharding.mesh, x.sharding.memory_kind
    automatic = mesh.update(axis_types=_without_explicit(mesh.axis_types))
    sharding = NamedSharding(automatic, x.sharding.spec, memory_kind=kind)
    return jax.device_put(x, sharding)


def without_explicit_axes() -> contextlib.AbstractContextManager[None]:
    """Traces as on one device if the ambient mesh has explicit axes."""
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return contextlib.nullcontext()
    if AxisType.Manual not in around.axis_types:
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    # Within a `jax.shard_map` over some of the axes, types name these.
    types = _without_explicit(around.axis_types)
    return jax.sharding.use_abstract_mesh(around.update(axis_types=types))


def _without_explicit(types: Sequence[AxisType]) -> tuple[AxisType, ...]:
    automatic = {AxisType.Explicit: AxisType.Auto}
    return tuple(automatic.get(one, one) for one in types)


def _explicit_mesh(x: PyTree) -> Mesh | AbstractMesh | None:
    if not hasattr(x, "dtype"):
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    return getattr(sharding, "mesh", None) if is_explicit(sharding) else None


def is_explicit(sharding: Sharding | None) -> bool:
    """Returns whether a sharding is on a mesh of explicit axes."""
    return AxisType.Explicit in axis_types(sharding)


def axis_types(sharding: Sharding | None) -> set[AxisType]:
    """Returns the axis types of a sharding's mesh; none without a mesh."""
    return set(getattr(getattr(sharding, "mesh", None), "axis_types", ()))
