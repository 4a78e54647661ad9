"""Types that several folders share."""

from typing import Protocol, runtime_checkable

import jax
import numpy as np

#: What has a shape and a dtype: an array, a NumPy scalar, or a description of one.
ArrayOrShape = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


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
