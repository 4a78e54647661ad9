"""Memory spaces, what a backend offers of them, and donation within them.

Where a leaf lives is part of its JAX type: `jax.typeof(x).memory_space` is
`Host` for an array in pinned memory, eager and under `jit` (checked with jax
0.10.2 and 0.12.0.1). Everything here reads that type; nothing keeps books.
"""

import collections
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

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

#: The one memory kind that JAX types as host memory. `unpinned_host` exists too,
#: but jax 0.10.2 to 0.12.0.1 give its arrays the type of device memory, so that
#: no update could tell where they live.
PINNED_HOST = "pinned_host"

_PAIR = "tf.aliasing_output"


def on_host(x: PyTree) -> bool:
    """Whether an array, a traced value or an abstract value lives in host memory."""
    # A codec may store a moment in several arrays. They live in one memory, so that
    # only the first is looked at.
    x = x if isinstance(x, ShapedArray) else jax.tree.leaves(x)[0]
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return aval.memory_space == HOST


def is_mistyped(x: PyTree) -> bool:
    """Whether a concrete array is in host memory, and its type says device memory."""
    # This is so for arrays made with a `SingleDeviceSharding`, as a restore into
    # concrete arrays makes them (jax 0.10.2 to 0.12.0.1).
    if not isinstance(x, jax.Array) or is_traced(x):
        return False
    return x.sharding.memory_kind == PINNED_HOST and not on_host(x)


@overload
def typed_by_memory(sharding: SingleDeviceSharding) -> NamedSharding: ...


@overload
def typed_by_memory(sharding: Sharding) -> Sharding: ...


def typed_by_memory(sharding: Sharding) -> Sharding:
    """The same placement, as a sharding that types arrays by their memory."""
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    # An array made with a `SingleDeviceSharding`, as by a restore, has the type of
    # device memory whatever its memory kind (jax 0.10.2 to 0.12.0.1); no update would
    # page it. A mesh without axes leaves the rest of the type as it is: a step's
    # results have the same type, so that `jax.jit` does not compile for the restored
    # and again for them.
    (device,) = sharding.device_set
    mesh = Mesh(np.array(device), ())
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def replicated_sharding(
    arrays: Iterable[ArrayOrShape],
) -> NamedSharding | SingleDeviceSharding | None:
    """Where an array of no single parameter goes: whole, on all of these devices.

    A step returns such an array there, if its arguments are like these. The first
    parameter whose sharding is of a mesh or of one device decides; None if there is
    none.
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
    """The platform of the default backend: `"cpu"`, `"gpu"` or `"tpu"`."""
    return jax.default_backend()


def nbytes(tree: PyTree) -> int:
    """Bytes of arrays, traced values or `ShapeDtypeStruct`s: one, or a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def layout_bytes(tree: PyTree, order: tuple[int, ...] | None = None) -> int:
    """Bytes of arrays as the default backend lays them out: in tiles on a TPU.

    `order` has the axes, minor to major; None: the backend's own choice.
    """
    if platform() != "tpu":
        return nbytes(tree)
    leaves = jax.tree.leaves(tree)
    return sum(tiling.tiled_bytes(x.shape, x.dtype.itemsize, order) for x in leaves)


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of an array, or of a pytree of them, on each of their devices."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


@functools.cache
def memory_kinds(device: Device | None = None) -> tuple[str, ...]:
    """The memory kinds of a device, its own default first; None: of this backend's."""
    device = jax.local_devices()[0] if device is None else device
    default = device.default_memory().kind
    others = (memory.kind for memory in device.addressable_memories())
    return (default, *(kind for kind in others if kind != default))


def kind_of(host: bool) -> str:
    """The memory kind of host memory, or of device memory, on the default backend."""
    return PINNED_HOST if host else memory_kinds()[0]


def memory_kind(x: PyTree) -> str:
    """The memory kind that a value's type calls for on the default backend."""
    return kind_of(on_host(x))


def resolve_host_memory_kind(asked: object) -> str:
    """The memory kind that will hold paged moments on this backend.

    `"auto"` takes pinned host memory where there is some. Where there is none it takes
    the device's own memory, in which moments then stay.
    """
    kinds, backend = memory_kinds(), jax.default_backend()
    if asked == "auto":
        return PINNED_HOST if PINNED_HOST in kinds else kinds[0]
    if asked != PINNED_HOST:
        raise ValueError(
            f"host_memory_kind={asked!r} cannot hold paged moments: JAX tells only"
            f" {PINNED_HOST!r} from device memory in an array's type. This backend"
            f" ({backend}) has {', '.join(kinds)}. Use {PINNED_HOST!r}, or 'auto'."
        )
    if asked not in kinds:
        raise ValueError(
            f"host_memory_kind={asked!r}: this backend ({backend}) has only"
            f" {', '.join(kinds)}. Pass host_memory_kind='auto' to keep the moments in"
            " device memory where the host kind is missing."
        )
    return PINNED_HOST


def device_memory() -> tuple[int, int]:
    """Bytes of the default device's memory, and how many of them are in use.

    Zero on a backend that keeps no such statistics (CPU).
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit", 0), statistics.get("bytes_in_use", 0)


def device_share() -> float:
    """The share of a device's memory that JAX takes.

    On a GPU three quarters, unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise, or
    `XLA_CLIENT_MEM_FRACTION`, as newer releases name it
    (https://docs.jax.dev/en/latest/gpu_memory_allocation.html). On a TPU all of it.

    Raises:
      ValueError: If what the variable says is no share.
    """
    if platform() == "tpu":
        return 1.0
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not share > 0:
                raise ValueError(f"{name}={text!r} is no share: set one such as 0.9.")
            return min(1.0, share)
    return 0.75


# `jax.jit` pairs donated arguments with results by shape and dtype, in their order.
# Where it was not told in which memory the results are, it pairs a moment in host
# memory with a parameter: on a CPU that ends the process, elsewhere the parameter goes
# to the host. (JAX says so beside the code, `_set_up_aliases` in `mlir.py`; the memory
# of results is known only after it.) So functions of states leave a mark in what is
# traced. When the program around it is lowered, the mark pairs buffers anew; it does
# nothing else.
def donate_within_memory(tree: Tree) -> Tree:
    """The same arrays; the program that computes them pairs within a memory."""
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
    # Once a program, although it has a mark for each array.
    if module.cached_primitive_lowerings.setdefault(_pair, context) is context:
        for operation in module.module.body.operations:
            if isinstance(operation, func.FuncOp) and operation.name.value == "main":
                _pair_within_memories(operation)
    return operands


mlir.register_lowering(_pair, _lower, cacheable=False)


def _pair_within_memories(main: func.FuncOp) -> None:
    """Pairs as JAX does, and by memory too, unless all its pairs are right."""
    arguments = _dicts(main.attributes["arg_attrs"])
    results = _dicts(main.attributes["res_attrs"])
    pairs = {
        i: ir.IntegerAttr(x[_PAIR]).value for i, x in enumerate(arguments) if _PAIR in x
    }
    if all(_host(arguments[i]) == _host(results[k]) for i, k in pairs.items()):
        return
    signature = main.type
    donors = collections.defaultdict(collections.deque)
    for i in pairs:
        donors[signature.inputs[i], _host(arguments[i])].append(i)
        del arguments[i][_PAIR]
    number = ir.IntegerType.get_signless(32)
    for k, (type_, attributes) in enumerate(
        zip(signature.results, results, strict=True)
    ):
        if waiting := donors[type_, _host(attributes)]:
            arguments[waiting.popleft()][_PAIR] = ir.IntegerAttr.get(number, k)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get(x) for x in arguments]
    )


def _dicts(attributes: ir.Attribute) -> list[dict[str, ir.Attribute]]:
    return [
        {x.name: x.attr for x in ir.DictAttr(each)} for each in ir.ArrayAttr(attributes)
    ]


def _host(attributes: dict[str, ir.Attribute]) -> bool:
    kind = attributes.get("mhlo.memory_kind")
    return kind is not None and ir.StringAttr(kind).value == PINNED_HOST
