"""Parameters: the layers' on a leading axis of their own, and the rest by name."""

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    memory_kinds,
    nbytes,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.text import keystr, parse_bytes, path_name
from paged_optax.backend.types import PyTreeDef, is_committed
from paged_optax.backend.validation import check_arrays
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.slabs import goes_in_slabs

#: An array, or what says its shape and dtype.
Shaped = Array | np.ndarray | jax.ShapeDtypeStruct

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Partition:
    """The parameters of a model, the layers' apart from the rest.

    Attributes:
      key: The key of the layers' parameters.
      layers: The layers' parameters, stacked.
      rest: All others, by name.
      names: The mapping's keys, in the order of its leaves.
      structure: The structure of all parameters.
      in_layers: For each leaf of all parameters whether it is of the layers.
    """

    key: str
    layers: PyTree
    rest: dict[Hashable, PyTree]
    names: tuple[Hashable, ...]
    structure: PyTreeDef
    in_layers: tuple[bool, ...]

    @classmethod
    def of(cls, params: PyTree, key: str = "layers") -> "Partition":
        """Partitions parameters.

        Args:
          params: The parameters of a model.
          key: The key of the layers' parameters.

        Raises:
          ValueError: If they are no mapping with that key.
        """
        children = by_name(params)
        if children is None or key not in children:
            keys = list(params) if isinstance(params, Mapping) else "no keys"
            raise ValueError(
                f"params is of type {type(params).__name__} and has {keys}: pass a dict"
                " or another mapping that JAX knows as a pytree, with the layers'"
                f" parameters stacked on a leading axis under the key {key!r}."
                " layerwise_step(..., layers=...) takes another key."
            )
        names = tuple(children)
        in_layers = tuple(
            name == key for name in names for _ in jax.tree.leaves(children[name])
        )
        layers = children.pop(key)
        structure = jax.tree.structure(params)
        return cls(key, layers, children, names, structure, in_layers)

    def others(self, rest: Mapping[Hashable, PyTree[Array]]) -> list[Array]:
        """Leaves of a tree like `rest`, in the order that they have among all."""
        return [
            x
            for name in self.names
            if name != self.key
            for x in jax.tree.leaves(rest[name])
        ]

    def combine(self, layers: Sequence[Value], others: Sequence[Value]) -> list[Value]:
        """Values of the layers' leaves and of others, in the order of all leaves."""
        of_layers, of_others = iter(layers), iter(others)
        return [next(of_layers if inside else of_others) for inside in self.in_layers]


def by_name(tree: PyTree) -> dict[Hashable, PyTree] | None:
    """What a mapping holds, in the order of its leaves; None of what is no mapping.

    Args:
      tree: The mapping: any that JAX knows as a pytree.
    """
    children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    # A mapping's leaves may come in any order: JAX itself says in which.
    numbers = jax.tree.unflatten(outer, range(len(children)))
    if not isinstance(numbers, Mapping):
        return None
    names = sorted(numbers, key=lambda name: numbers[name])
    return dict(zip(names, children, strict=True))


def offload(layers: PyTree, min_size: int | str = "256KiB") -> PyTree:
    """Puts stacked layers in host memory, from which each layer's weights are fetched.

    Args:
      layers: The layers' parameters, stacked on the leading axis of each leaf, or their
        `ShapeDtypeStruct`s. NumPy arrays go to the host without a detour.
      min_size: Leaves of fewer bytes a layer stay on the device; so do those of which
        a layer has a vector or a number.

    Returns:
      The layers; the larger leaves in host memory.

    Raises:
      ValueError: If layers are given one by one, and not stacked.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> layers = po.offload({"kernel": jnp.ones((4, 512, 512))})
      >>> layers["kernel"].sharding.memory_kind
      'pinned_host'
    """
    smallest = parse_bytes("min_size", min_size)
    check_arrays("layers", layers)
    refuse_one_by_one(layers)

    def place(x: Shaped) -> Array | jax.ShapeDtypeStruct:
        kind = jax.typeof(x)  # of NumPy's float64, what JAX makes of it
        small = not goes_in_slabs(x) or nbytes(kind) // kind.shape[0] < smallest
        if not small:
            return place_on_host(x)
        return jnp.asarray(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(place, layers)


def place_on_host(x: Shaped) -> Array | jax.ShapeDtypeStruct:
    """An array in host memory, or its shape; NumPy's goes there without a detour."""
    if not isinstance(x, np.ndarray) and on_host(x):
        return x
    if not isinstance(x, jax.ShapeDtypeStruct) and not is_committed(x):
        return jax.device_put(x, HOST)  # of the mesh around, if there is one
    sharding = typed_by_memory(
        x.sharding or SingleDeviceSharding(jax.devices()[0])
    ).with_memory_kind(PINNED_HOST)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    return jax.device_put(x, sharding)


def from_numpy(params: PyTree) -> PyTree:
    """The parameters, with JAX arrays for NumPy's."""
    array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    return jax.tree.map(array, params)


def length_of(layers: PyTree) -> int:
    """The number of layers: the length of every leaf's leading axis."""
    refuse_one_by_one(layers)
    lengths: dict[int, str] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(layers)[0]:
        name = f"layers{keystr(path)}"
        if not x.shape:
            raise ValueError(
                f"{name} has shape (): stack the layers' parameters on a leading axis,"
                " as nnx.vmap, nn.scan or jax.vmap of an initialiser give them."
            )
        lengths.setdefault(x.shape[0], name)
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"layers of lengths {lengths}: stack all layers' parameters on the leading"
            " axis of every leaf."
        )
    return next(iter(lengths))


def refuse_one_by_one(layers: PyTree) -> None:
    """Refuses a list of layers, or a mapping whose keys number them.

    A layer may itself be such a list, of parts whose parameters are stacked. Then some
    parameter is a stack of matrices, and all are of one length.
    """
    flat = jax.tree_util.tree_flatten_with_path(layers)[0]
    names = {path_name(path[:1]): path[0] for path, _ in flat if path}
    matches = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    numbers = {(x[1], int(x[2])) for x in matches if x}
    prefixes = {prefix for prefix, _ in numbers}
    if len(prefixes) != 1 or {n for _, n in numbers} != set(range(len(names))):
        return
    (prefix,) = prefixes
    shapes = [x.shape for _, x in flat]
    if all(len(path) == 1 for path, _ in flat):  # each an array
        matrices = len(shapes[0]) == 2 and len(set(shapes)) == 1
        stacked = bool(prefix) or len(shapes) == 1 or not matrices
    else:
        one_length = len({shape[:1] for shape in shapes}) == 1
        stacked = one_length and max(map(len, shapes)) >= 3
    if stacked:
        return
    key = getattr(next(iter(names.values())), "key", None)
    index = "i" if isinstance(key, int) else f"f'{prefix}{{i}}'" if prefix else "str(i)"
    count = len(names)
    every = f"*(layers[{index}] for i in range({count}))"
    raise ValueError(
        f"layers numbers its children, {prefix}0 to {prefix}{count - 1}, as if each was"
        " one layer: stack them, so that every leaf has all layers on its leading axis,"
        " by layers = jax.tree.map(lambda *x: jnp.stack(x),"
        f" {'*layers' if key is None else every}). Parts of a layer that are stacked"
        " already need other names than numbers. model.stack(params) stacks what"
        " split_layers took apart."
    )


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
