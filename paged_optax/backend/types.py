"""Types that several folders share, and what an array's type tells."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
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
