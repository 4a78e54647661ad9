"""Where the leaves of a new state go."""

from collections.abc import Sequence

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    memory_kinds,
    on_host,
    replicated_sharding,
)
from paged_optax.backend.types import is_committed, is_traced
from paged_optax.transform.trees import Parameter, StoredOrShape


def place(
    value: StoredOrShape,
    host: bool,
    like: Parameter | None,
    mesh: Mesh | AbstractMesh | None,
) -> StoredOrShape:
    """Puts one leaf of a new state beside its parameter, in its own memory.

    Args:
      value: The leaf.
      host: Whether it goes to host memory.
      like: Its parameter, or a type that is divided as it is to be; None if it belongs
        to no single parameter.
      mesh: If the leaf is not put beside its parameter, it goes to all devices of this
        mesh; None if there is no mesh.

    Returns:
      The leaf.
    """

    def placed(x: Array) -> Array:
        sharding = None
        known = is_committed(like) or isinstance(like, jax.ShapeDtypeStruct)
        if is_traced((x, like)):
            pass  # its type says where it is
        elif known and like is not None and like.shape == x.shape:
            sharding = like.sharding
        elif isinstance(mesh, Mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        elif is_committed(like) and len(like.sharding.device_set) == 1:
            sharding = replicated_sharding(
                [like]
            )  # what a codec stores has shapes of its own
        if sharding is not None:
            # A parameter may be on the host, as an offloaded layer is.
            if host or (like is not None and on_host(like)):
                kind = PINNED_HOST if host else memory_kinds()[0]
                sharding = sharding.with_memory_kind(kind)
            return jax.device_put(x, sharding)
        if on_host(x) != host:
            return jax.device_put(x, HOST if host else DEVICE)
        return x

    return jax.tree.map(placed, value)


def tied(state: PyTree, parameters: Sequence[object]) -> PyTree:
    """Commits a new state to the devices of its host arrays, and of its parameters.

    A program that uses host arrays, or any that are committed, returns committed
    arrays. If a step count was not committed before, `jax.jit` would compile the next
    step again. A traced state, as of parameters that a `jax.jit` closes over, is
    committed by what runs it.
    """
    leaves = jax.tree.leaves(state)
    if is_traced((leaves, parameters)):
        return state
    tying = [*filter(is_committed, parameters), *filter(on_host, leaves)]
    place = replicated_sharding(tying)
    if place is None or any(x.sharding.device_set != place.device_set for x in tying):
        return state
    tie = lambda x: x if is_committed(x) else jax.device_put(x, place)
    return jax.tree.map(tie, state)
