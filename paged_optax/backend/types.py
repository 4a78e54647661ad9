"""Types that several folders share, and what an array's type tells.

Within a `jax.shard_map` that checks it, an array's type tells along which axes of the
mesh its values vary between devices. Primitives take operands that vary alike. JAX's
own functions see to that; loops do not, for their carry keeps its type. On a mesh of
explicit axes an array's type tells how it is divided.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
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

#: What has a shape and a dtype: an array, a NumPy scalar, or a description of one.
ArrayOrShape = Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

#: The keys that lead to a leaf of a tree. JAX gives keys no type in common.
KeyPath = tuple[Any, ...]

#: A path string, or a JAX key path.
Path = str | KeyPath

# Pyright sees a variable here, for jaxlib comes without type stubs.
PyTreeDef: TypeAlias = jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]


@runtime_checkable
class Memory(Protocol):
    """A memory of a device."""

    @property
    def kind(self) -> str:
        """Its name: `"device"`, `"pinned_host"`."""
        ...


@runtime_checkable
class Device(Protocol):
    """The memories of a `jax.Device`, which jaxlib gives no type to."""

    def default_memory(self) -> Memory:
        """The memory that arrays go to if nothing else is said."""
        ...

    def addressable_memories(self) -> list[Memory]:
        """All memories that it can address."""
        ...


@runtime_checkable
class Described(Protocol):
    """Arrays that know where they belong, beside parameters."""

    def abstract(self, params: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        """Their shapes, dtypes and placements."""
        ...


@runtime_checkable
class Transformation(Protocol):
    """An Optax transformation, or what has its two functions, as `MultiSteps` has."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]:
        """Makes the state for parameters."""
        ...

    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """Turns gradients and a state into updates and a new state."""
        ...


def is_traced(tree: PyTree) -> bool:
    """Whether any array of a tree is a tracer, which has a type and no place."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def holds_moments(dtype: np.dtype) -> bool:
    """Whether an update may read and write arrays of a dtype beside each parameter.

    Moments have fractions. Remainders of master weights are the only 16-bit integers.
    """
    return jnp.issubdtype(dtype, jnp.inexact) or dtype == jnp.int16


def counts_steps(dtype: np.dtype) -> bool:
    """Whether a scalar of a dtype counts steps, in a state."""
    return jnp.issubdtype(dtype, jnp.integer) and not holds_moments(dtype)


def is_committed(x: object) -> TypeGuard[Array]:
    """Whether something is an array that JAX does not move to other devices."""
    return isinstance(x, Array) and not is_traced(x) and x.committed


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

    The type varies along the axes of the arrays `like` too.
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

    `results` is a tree like the function's results. For each it has an array or a type
    that is divided as the result shall be; None for a result on all devices.
    """
    if (mesh := explicit_mesh(arguments)) is None:
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


def explicit_mesh(tree: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh of explicit axes that the type of any array names, or None."""
    return next(filter(None, map(_explicit_mesh, jax.tree.leaves(tree))), None)


def typed_automatic(x: PyTree) -> PyTree:
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
    if sharding is None or not is_explicit(sharding):
        return None
    return sharding.mesh


def is_explicit(sharding: Sharding | None) -> bool:
    """Whether a sharding is on a mesh of explicit axes."""
    return AxisType.Explicit in axis_types(sharding)


def axis_types(sharding: Sharding | None) -> set[AxisType]:
    """The types of a sharding's axes; empty where it has no mesh."""
    return set(getattr(getattr(sharding, "mesh", None), "axis_types", ()))
