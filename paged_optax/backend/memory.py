"""Memory spaces, bytes, and donation within a memory space.

The memory of an array is part of its JAX type: `jax.typeof(x).memory_space` is `Host`
for an array in pinned memory, eager and under `jit` (checked with jax 0.10.2 and
0.12.0.1).
"""

import collections
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxtyping import PyTree

from paged_optax.backend import tiling
from paged_optax.backend.types import ArrayOrShape, Device, is_traced

Tree = TypeVar("Tree")

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device

#: The only memory kind that JAX types as host memory. Arrays in `unpinned_host` have
#: the type of device memory (jax 0.10.2 to 0.12.0.1).
PINNED_HOST = "pinned_host"

_PAIR = "tf.aliasing_output"


def on_host(x: PyTree) -> bool:
    """Returns whether an array, or a type, is in host memory."""
    # The arrays in which a codec stores a moment are in one memory.
    x = x if isinstance(x, ShapedArray) else jax.tree.leaves(x)[0]
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return aval.memory_space == HOST


def is_mistyped(x: PyTree) -> bool:
    """Returns whether a concrete array in host memory has the type of device memory."""
    # Arrays with a `SingleDeviceSharding`, from a restore into concrete arrays (jax
    # 0.10.2 to 0.12.0.1).
    if not isinstance(x, jax.Array) or is_traced(x):
        return False
    return x.sharding.memory_kind == PINNED_HOST and not on_host(x)


def typed_by_memory(sharding: Sharding) -> Sharding:
    """Returns an equal sharding whose arrays have the type of their memory."""
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    # Otherwise they would not be paged: see `is_mistyped`. A mesh without axes keeps
    # the rest of the type equal to that of a step's results, so that `jax.jit` does not
    # compile twice.
    (device,) = sharding.device_set
    mesh = Mesh(np.array(device), ())
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def replicated_sharding(
    arrays: Iterable[ArrayOrShape],
) -> NamedSharding | SingleDeviceSharding | None:
    """Returns the sharding of an array that belongs to no single parameter.

    It is replicated over the devices of the first parameter with a sharding, so that a
    step returns it where it was; None if no parameter has one.
    """
    for x in arrays:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return SingleDeviceSharding(device)
    return None


def platform() -> str:
    """Returns the platform of the default backend: `"cpu"`, `"gpu"` or `"tpu"`."""
    return jax.default_backend()


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of a pytree of arrays or types."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def layout_bytes(tree: PyTree, order: tuple[int, ...] | None = None) -> int:
    """Returns the bytes of arrays in the default backend's layout, tiled on a TPU.

    `order` has the axes from minor to major; None: the backend's choice.
    """
    if platform() != "tpu":
        return nbytes(tree)
    leaves = jax.tree.leaves(tree)
    return sum(tiling.tiled_bytes(x.shape, x.dtype.itemsize, order) for x in leaves)


def bytes_per_device(tree: PyTree) -> int:
    """Returns the bytes of a pytree of arrays on each of their devices."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


@functools.cache
def memory_kinds() -> tuple[str, ...]:
    """Returns the memory kinds of the default backend, the default first."""
    device = jax.local_devices()[0]
    default = device.default_memory().kind
    remaining = (memory.kind for memory in device.addressable_memories())
    return (default, *(kind for kind in remaining if kind != default))


def default_memory_kind(host: bool) -> str:
    """Returns the default backend's memory kind of host, or device, memory."""
    return PINNED_HOST if host else memory_kinds()[0]


def memory_kind(x: PyTree) -> str:
    """Returns the default backend's memory kind of a value's type."""
    return default_memory_kind(on_host(x))


def resolve_host_memory_kind(requested: object) -> str:
    """Returns the memory kind of paged moments on this backend.

    `"auto"` is pinned host memory, or the device's own memory on a backend without it.
    """
    kinds, backend = memory_kinds(), jax.default_backend()
    if requested == "auto":
        return PINNED_HOST if PINNED_HOST in kinds else kinds[0]
    if requested != PINNED_HOST:
        raise ValueError(
            f"host_memory_kind={requested!r} cannot hold paged moments: JAX tells only"
            f" {PINNED_HOST!r} from device memory in an array's type. This backend"
            f" ({backend}) has {', '.join(kinds)}. Use {PINNED_HOST!r}, or 'auto'."
        )
    if requested not in kinds:
        raise ValueError(
            f"host_memory_kind={requested!r}: this backend ({backend}) has only"
            f" {', '.join(kinds)}. Pass host_memory_kind='auto' to keep the moments in"
            " device memory where the host kind is missing."
        )
    return PINNED_HOST


def device_memory(device: Device | None = None) -> tuple[int, int]:
    """Returns the bytes of a device's memory, and the bytes in use.

    Both are zero where JAX has no such statistics: on a CPU, and of a device that is
    another process's, or that is only compiled for. None: the first local device.
    """
    device = device or jax.local_devices()[0]
    try:
        statistics = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        statistics = {}
    return statistics.get("bytes_limit", 0), statistics.get("bytes_in_use", 0)


def device_share() -> float:
    """Returns the share of a device's memory that JAX allocates.

    It is 1 on a TPU. On a GPU it is `XLA_CLIENT_MEM_FRACTION`, or in older releases
    `XLA_PYTHON_CLIENT_MEM_FRACTION`, by default three quarters
    (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).
    """
    if platform() == "tpu":
        return 1.0
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            return min(1.0, float(text))
    return 0.75


# `jax.jit` pairs donated arguments with results by shape and dtype, in their order.
# Without `out_shardings` it pairs a moment in host memory with a parameter, which
# aborts on a CPU, and elsewhere moves the parameter to the host (`_set_up_aliases` in
# JAX's `mlir.py`, which runs before the memory of results is determined). Functions of
# states therefore bind a primitive, whose only effect is to pair again when the program
# is lowered.
def donate_within_memory(tree: Tree) -> Tree:
    """Returns the same arrays; their program donates within a memory only."""
    return jax.tree.map(lambda x: _pair.bind(x) if is_traced(x) else x, tree)


_pair = Primitive("pair_donated")
_pair.def_impl(lambda x: x)
_pair.def_abstract_eval(lambda type_: type_)
ad.primitive_jvps[_pair] = lambda xs, tangents: (_pair.bind(*xs), *tangents)
batching.primitive_batchers[_pair] = lambda xs, axes: (_pair.bind(*xs), *axes)


def _lower(
    context: mlir.LoweringRuleContext, *operands: "ir.Value[ir.Type]"
) -> "Sequence[ir.Value[ir.Type]]":
    module = context.module_context
    # Once a program, which binds the primitive for each array.
    if module.cached_primitive_lowerings.setdefault(_pair, context) is context:
        for operation in module.module.body.operations:
            if isinstance(operation, func.FuncOp) and operation.name.value == "main":
                _pair_within_memories(operation)
    return operands


mlir.register_lowering(_pair, _lower, cacheable=False)


def _pair_within_memories(main: func.FuncOp) -> None:
    """Pairs by memory and type, in JAX's order, unless all pairs are right."""
    args = _dicts(main.attributes["arg_attrs"])
    results = _dicts(main.attributes["res_attrs"])
    pairs = {
        i: ir.IntegerAttr(x[_PAIR]).value for i, x in enumerate(args) if _PAIR in x
    }
    if all(_host(args[i]) == _host(results[k]) for i, k in pairs.items()):
        return
    signature = main.type
    donors = collections.defaultdict(collections.deque)
    for i in pairs:
        donors[signature.inputs[i], _host(args[i])].append(i)
        del args[i][_PAIR]
    int32 = ir.IntegerType.get_signless(32)
    for k, (type_, attributes) in enumerate(
        zip(signature.results, results, strict=True)
    ):
        if queue := donors[type_, _host(attributes)]:
            args[queue.popleft()][_PAIR] = ir.IntegerAttr.get(int32, k)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(x) for x in args])


def _dicts(attributes: ir.Attribute) -> list[dict[str, ir.Attribute]]:
    return [
        {x.name: x.attr for x in ir.DictAttr(item)} for item in ir.ArrayAttr(attributes)
    ]


def _host(attributes: dict[str, ir.Attribute]) -> bool:
    kind = attributes.get("mhlo.memory_kind")
    return kind is not None and ir.StringAttr(kind).value == PINNED_HOST
