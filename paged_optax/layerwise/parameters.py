"""Partitions parameters into stacked layers and the rest."""

import dataclasses
import functools
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
    default_memory_kind,
    nbytes,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.text import keystr, parse_bytes
from paged_optax.backend.types import ArrayOrShape, PyTreeDef, is_committed
from paged_optax.backend.validation import check_arrays
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.slices import is_sliced

#: An array, or what says its shape and dtype.
Shaped = Array | np.ndarray | jax.ShapeDtypeStruct

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Partition:
    """A model's parameters, partitioned into layers and the rest.

    Attributes:
      rest: The other parameters, by name.
      in_layers: For each parameter, true if it belongs to the layers.
    """

    key: str
    layers: PyTree
    rest: dict[Hashable, PyTree]
    structure: PyTreeDef
    in_layers: tuple[bool, ...]

    @classmethod
    def create(cls, params: PyTree, key: str = "layers") -> "Partition":
        """Partitions parameters.

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
        in_layers = tuple(
            name == key for name, x in children.items() for _ in jax.tree.leaves(x)
        )
        layers = children.pop(key)
        structure = jax.tree.structure(params)
        return cls(key, layers, children, structure, in_layers)

    @classmethod
    def of_frozen(cls, frozen: PyTree, key: str, length: int) -> "Partition":
        """Partitions parameters that are not trained; layers may have none.

        Raises:
          TypeError: If they are no mapping of arrays.
          ValueError: If the number of layers differs.
        """
        children = by_name(frozen)
        if children is None:
            raise TypeError(
                f"frozen is of type {type(frozen).__name__}: pass a dict or another"
                " mapping that JAX knows as a pytree, with what is frozen of the layers"
                f" stacked on a leading axis under the key {key!r}."
            )
        layers, name = children.setdefault(key, None), f"frozen[{key!r}]"
        check_arrays(name, layers)
        for path, x in jax.tree_util.tree_flatten_with_path(layers)[0]:
            if x.shape[:1] != (length,):
                raise ValueError(
                    f"{name}{keystr(path)} has shape {x.shape}, and params[{key!r}] has"
                    f" {length} layers: stack what is frozen of them on a leading axis"
                    f" of {length}. What all layers share goes into frozen beside"
                    f" {key!r}, and to the layers as the prologue's context."
                )
        return cls.create(children, key)

    def others(self, rest: Mapping[Hashable, PyTree[Array]]) -> list[Array]:
        """Flattens a tree like `rest`, in the order of all parameters."""
        return [x for name in self.rest for x in jax.tree.leaves(rest[name])]

    def rest_of(self, others: Sequence[Array]) -> dict[Hashable, PyTree[Array]]:
        """Unflattens what `others` returns."""
        structure = jax.tree.structure([*self.rest.values()])
        return dict(zip(self.rest, structure.unflatten(others), strict=True))

    def combine(self, layers: Sequence[Value], others: Sequence[Value]) -> list[Value]:
        """Merges the layers' and the other values, in the order of all parameters."""
        of_layers, of_others = iter(layers), iter(others)
        return [next(of_layers if inner else of_others) for inner in self.in_layers]


def by_name(tree: PyTree) -> dict[Hashable, PyTree] | None:
    """Returns a mapping's children in the order of its leaves; None if it is none.

    Args:
      tree: A mapping that is registered as a pytree.
    """
    children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    # The order of a mapping's leaves is read off its pytree.
    numbers = jax.tree.unflatten(outer, range(len(children)))
    if not isinstance(numbers, Mapping):
        return None
    names = sorted(numbers, key=lambda name: numbers[name])
    return dict(zip(names, children, strict=True))


def offload(layers: PyTree, min_size: int | str = "256KiB") -> PyTree:
    """Moves stacked layers to host memory, from which a step fetches each layer.

    Args:
      layers: The layers' parameters, stacked on the leading axis of each leaf, or their
        `ShapeDtypeStruct`s. NumPy arrays are copied to host memory directly.
      min_size: Leaves of fewer bytes for each layer stay on the device. Vectors and
        scalars of a layer stay there too.

    Returns:
      The layers, with the larger leaves in host memory.

    Raises:
      ValueError: If the layers' stacks have different lengths.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> layers = po.offload({"kernel": jnp.ones((4, 512, 512))})
      >>> layers["kernel"].sharding.memory_kind
      'pinned_host'
    """
    smallest = parse_bytes("min_size", min_size)
    check_arrays("layers", layers)
    stack_length(layers)

    def place(x: Shaped) -> Array | jax.ShapeDtypeStruct:
        kind = jax.typeof(x)  # of NumPy's float64, what JAX makes of it
        small = not is_sliced(x) or nbytes(kind) // kind.shape[0] < smallest
        if not small:
            return place_on_host(x)
        return jnp.asarray(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(place, layers)


def place_on_host(x: Shaped) -> Array | jax.ShapeDtypeStruct:
    """Moves an array, or the placement of its shape, to host memory."""
    if not isinstance(x, np.ndarray) and on_host(x):
        return x
    if not isinstance(x, jax.ShapeDtypeStruct) and not is_committed(x):
        return jax.device_put(x, HOST)  # on the current mesh, if there is one
    sharding = placed_shape(x).sharding.with_memory_kind(PINNED_HOST)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    return jax.device_put(x, sharding)


def from_numpy(params: PyTree) -> PyTree:
    """Converts NumPy arrays to JAX arrays."""
    array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    return jax.tree.map(array, params)


def stack_length(layers: PyTree) -> int:
    """Returns the number of layers: the length of every leaf's leading axis."""
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
            " axis of every leaf, as jax.tree.map(lambda *x: jnp.stack(x), *layers)"
            " does with a list."
        )
    return next(iter(lengths))


def placed_shape(x: Shaped) -> jax.ShapeDtypeStruct:
    """The shape of a parameter, with its sharding or the default one."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    dtype, sharding = jax.typeof(x).dtype, typed_by_memory(sharding)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def zeros(
    like: Shaped, shape: tuple[int, ...], dtype: DTypeLike, host: bool = False
) -> Array | jax.ShapeDtypeStruct:
    """Zeros on the devices of `like`; a `ShapeDtypeStruct` if `like` is one."""
    sharding = getattr(like, "sharding", None)
    kind = default_memory_kind(host)
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


def widest(*trees: PyTree[ArrayOrShape]) -> np.dtype:
    """The widest real dtype of any leaf: float32, or float64."""
    dtypes = [jax.typeof(x).dtype for x in jax.tree.leaves(trees)]
    return jnp.finfo(functools.reduce(np.promote_types, dtypes, np.float32)).dtype
