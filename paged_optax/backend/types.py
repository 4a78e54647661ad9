"""Types that several folders share."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

#: What has a shape and a dtype: an array, a NumPy scalar, or a description of one.
ArrayOrShape = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

#: The keys that lead to a leaf of a tree. JAX gives keys no type in common.
KeyPath = tuple[Any, ...]

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
