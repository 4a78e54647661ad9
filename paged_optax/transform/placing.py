"""Where the leaves of a new state go."""

from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paged_optax.backend.memory import (
    HOST,
    PINNED_HOST,
    on_host,
)


def place(value: Any, host: bool, like: Any, mesh: Any) -> Any:
    """Puts one leaf of a new state beside its parameter, in its own memory.

    What is not divided as its parameter is on all devices of the mesh, if there is one.
    """

    def place(x: Array) -> Array:
        sharding = None
        if isinstance(x, Tracer) or isinstance(like, Tracer):
            pass  # its type says where it is
        elif getattr(like, "committed", False) and like.shape == x.shape:
            sharding = like.sharding
        elif isinstance(mesh, Mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        if sharding is not None:
            if host:
                sharding = sharding.with_memory_kind(PINNED_HOST)
            return jax.device_put(x, sharding)
        return jax.device_put(x, HOST) if host and not on_host(x) else x

    return jax.tree.map(place, value)


def tied(values: list[Any]) -> list[Any]:
    """Commits a new state to the device of its host arrays, where it has some.

    What a program with host arrays returns is committed, and `jax.jit` would compile
    the next step again for a count that was not.
    """
    devices = {d for x in jax.tree.leaves(values) if on_host(x) for d in x.devices()}
    if len(devices) != 1:
        return values
    (place,) = map(SingleDeviceSharding, devices)
    tie = lambda x: x if x.committed else jax.device_put(x, place)
    return jax.tree.map(tie, values)
