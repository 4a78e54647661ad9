"""Buffers beside parameters, on the device or on the host."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    memory_kinds,
    typed_by_memory,
)
from paged_optax.backend.types import is_committed
from paged_optax.engine.shards import Shards

#: An array, or what says its shape and dtype.
Shaped = Array | np.ndarray | jax.ShapeDtypeStruct


def placed_shape(x: Shaped) -> jax.ShapeDtypeStruct:
    """Where a parameter is, or where it would be if it does not say."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    dtype, sharding = jax.typeof(x).dtype, typed_by_memory(sharding)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def zeros(
    like: Shaped, shape: tuple[int, ...], dtype: DTypeLike, host: bool = False
) -> Array | jax.ShapeDtypeStruct:
    """Zeros beside an array, or what stands for them beside a `ShapeDtypeStruct`."""
    sharding = getattr(like, "sharding", None)
    kind = PINNED_HOST if host else memory_kinds()[0]
    shards = Shards.of_array(like)
    if shards is not None:
        axes = shards.axes[len(like.shape) - len(shape) :]  # a layer has one fewer
        sharding = Shards(shards.mesh, axes).sharding
    elif isinstance(sharding, NamedSharding):  # of one device
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(like, jax.ShapeDtypeStruct):
        if sharding is not None:
            sharding = sharding.with_memory_kind(PINNED_HOST if host else "device")
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    if (
        sharding is not None
        and isinstance(like, Array)
        and (shards is not None or is_committed(like))
    ):
        return jax.device_put(jnp.zeros(shape, dtype), sharding.with_memory_kind(kind))
    return jax.device_put(jnp.zeros(shape, dtype), HOST if host else DEVICE)
