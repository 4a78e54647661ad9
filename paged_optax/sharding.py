"""Paging each device's own shard.

A moment is divided over a mesh as its parameter is. The page loop runs inside
`jax.shard_map`, on the shard alone: each device pages over its own link, pages are cut
from the shard, and no collective appears. Under automatic partitioning XLA would gather
every page (4 devices, H200: 96 MiB of scratch and 128 MiB of host scratch where
`shard_map` takes 8 and 0).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jaxtyping import UInt32

from paged_optax.codecs import Codec, Quantized, axis_of_blocks

#: The scope in which a leaf is paged of which no sharding is known. On one device that
#: is as it should be; a program of several is slow there, and `memory_report` says so.
UNSHARDED = "paged_optax_without_shardings"

_keystr = jax.tree_util.keystr
_Key = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Shards:
    """How one leaf is divided.

    Attributes:
      mesh: The devices.
      axes: For each dimension the mesh axes that divide it.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, sharding: Any, shape: tuple[int, ...]) -> "Shards | None":
        """Reads a sharding; None where there is nothing to divide over."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return None
        if AxisType.Manual in getattr(sharding.mesh, "axis_types", ()):
            return None  # inside a `shard_map` already: what is seen is the shard
        entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        axes = tuple(_names(entry) for entry in entries)
        found = cls(sharding.mesh, axes)
        whole = (n % d == 0 for n, d in zip(shape, found.divisions, strict=True))
        return found if all(whole) else None

    @classmethod
    def of_array(cls, x: Any) -> "Shards | None":
        """Those of an array, or of a `ShapeDtypeStruct`, that says where it is."""
        return cls.of(getattr(x, "sharding", None), x.shape)

    @property
    def divisions(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        sizes = dict(self.mesh.shape)
        return tuple(math.prod(sizes[name] for name in names) for names in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """The leaf's own."""
        return _spec(self.axes)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one shard."""
        return tuple(n // d for n, d in zip(shape, self.divisions, strict=True))

    def stored(self, codec: Codec, shape: tuple[int, ...]) -> Any:
        """The shapes and dtypes in which a codec stores the shards of a moment.

        Blocks never cross shards. Scales by rows are divided as the moment is; others
        have a row for each part that is not a range of the flattened moment, so
        that a state of another layout shows by its shape.
        """
        found = codec.stored(self.local(shape))
        grown = lambda x, divisions: jax.ShapeDtypeStruct(
            tuple(n * d for n, d in zip(x.shape, divisions, strict=True)), x.dtype
        )
        if not isinstance(found, Quantized):
            return grown(found, self.divisions)
        first, *others = self.divisions
        scales = found.scales
        if axis_of_blocks(codec) is not None:
            scales = grown(scales, self.divisions)
        elif self.has_rows:
            shape = (math.prod(others), first * scales.shape[0])
            scales = jax.ShapeDtypeStruct(shape, scales.dtype)
        else:
            scales = grown(scales, (first,))
        return Quantized(grown(found.codes, self.divisions), scales)

    def spec_of(self, codec: Codec | None, x: Any, local: tuple[int, ...]) -> Any:
        """The spec of one of a leaf's arrays, or of what a codec stores of it."""
        if not isinstance(x, Quantized):
            if codec is None and len(x.shape) == len(self.axes):
                return self.spec if self.local(x.shape) == local else PartitionSpec()
            return PartitionSpec() if codec is None else self.spec
        assert codec is not None
        first, *others = self.axes
        names = tuple(name for names in others for name in names)
        if axis_of_blocks(codec) is not None:
            scales = self.spec
        else:
            scales = _spec([names, first] if self.has_rows else [first])
        return Quantized(self.spec, scales)

    def typed(self, codec: Codec, stored: Any, local: tuple[int, ...]) -> Any:
        """What a codec stores of a leaf, and how it is divided."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            stored,
            self.spec_of(codec, stored, local),
        )

    @property
    def has_rows(self) -> bool:
        """Whether shards are no ranges of the flattened leaf."""
        return math.prod(self.divisions[1:]) > 1

    @property
    def mesh_here(self) -> Mesh | AbstractMesh:
        """The mesh, its axes automatic where `automatically` has made them so."""
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in self.mesh.axis_types or around.empty:
            return self.mesh
        return self.mesh if AxisType.Explicit in around.axis_types else around

    @property
    def sharding(self) -> NamedSharding:
        """The leaf's own."""
        return NamedSharding(self.mesh, self.spec)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a leaf this device's shard is, for what depends on positions.

    Attributes:
      start: The position in the flattened leaf of its first value, where shards are
        ranges; else 0.
      part: The number of its row of parts.
    """

    start: UInt32[Array, ""]
    part: UInt32[Array, ""]


def on_shards(
    function: Callable[..., Any],
    shards: Shards,
    arrays: tuple[Any, ...],
    codecs: Sequence[Codec | None],
    local: tuple[int, ...],
    results: Sequence[Any],
    scalars: Any = (),
) -> Any:
    """Calls a function on every device, with its shards of a leaf's arrays.

    Args:
      function: Of the place, the arrays and the scalars.
      shards: How the leaf is divided.
      arrays: Arrays of the leaf's shape, or of others, which are replicated.
      codecs: What stores each of the arrays, or None.
      local: The shape of a shard.
      results: For each result, what it is like: the position of an array, or the codec
        that stores it and its shapes.
      scalars: A pytree of further arguments, replicated.

    Returns:
      The results, whole.
    """
    specs = tuple(
        shards.spec_of(codec, x, local) for x, codec in zip(arrays, codecs, strict=True)
    )
    coded = [(codecs[x], arrays[x]) if isinstance(x, int) else x for x in results]
    flat = lambda codec, x: (
        x._replace(scales=x.scales.reshape(-1))
        if isinstance(x, Quantized) and axis_of_blocks(codec) is None
        else x
    )
    rows = lambda codec, x: (
        x._replace(scales=x.scales[None])
        if isinstance(x, Quantized)
        and axis_of_blocks(codec) is None
        and shards.has_rows
        else x
    )

    def run(arrays: tuple[Any, ...], scalars: Any) -> tuple[Any, ...]:
        first = _index(shards, shards.axes[0] if shards.axes else ())
        rest = tuple(name for names in shards.axes[1:] for name in names)
        start = first * np.uint32(math.prod(local) % 2**32)
        start = jnp.uint32(0) if shards.has_rows else start
        place = Place(start, _index(shards, rest))
        made = function(
            place,
            tuple(flat(c, x) for c, x in zip(codecs, arrays, strict=True)),
            scalars,
        )
        return tuple(rows(c, x) for (c, _), x in zip(coded, made, strict=True))

    return jax.shard_map(
        run,
        mesh=shards.mesh_here,
        in_specs=(specs, PartitionSpec()),
        out_specs=tuple(shards.spec_of(codec, like, local) for codec, like in coded),
        check_vma=False,
    )(arrays, scalars)


def automatically(
    function: Callable[..., Any], arguments: Sequence[Any], results: Any
) -> Any:
    """Calls a function on a mesh of explicit axes as if they were automatic.

    What is traced of a transformation knows no axes: its equations would make arrays of
    other types than those that they meet.

    Args:
      function: What to call.
      arguments: Its arguments, trees of arrays.
      results: A tree like its results: for each an array or a type that is divided as
        it is to be; None for what is on all devices.

    Returns:
      The results.
    """
    meshes = map(_explicit_mesh, jax.tree.leaves(arguments))
    mesh = next(filter(None, meshes), None)
    if mesh is None:
        return function(*arguments)
    spec = lambda x: jax.typeof(x).sharding.spec if _explicit_mesh(x) else None
    # The mesh is stated too: without one around, `auto_axes` would do nothing.
    like = lambda x: NamedSharding(mesh, spec(x) or PartitionSpec())
    shardings = jax.tree.map(like, results, is_leaf=lambda x: x is None)
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*arguments)


def without_explicit_axes() -> contextlib.AbstractContextManager[Any]:
    """Traces within as on one device, where the mesh around has explicit axes.

    What is traced then runs on such a mesh and on automatic axes alike.
    """
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _explicit_mesh(x: Any) -> Any:
    """The mesh of explicit axes that an array's type names, or None."""
    if not hasattr(x, "dtype"):
        return None
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    return sharding.mesh if AxisType.Explicit in _axis_types(sharding) else None


def _axis_types(sharding: Any) -> set[AxisType]:
    return set(getattr(getattr(sharding, "mesh", None), "axis_types", ()))


def _index(shards: Shards, names: tuple[str, ...]) -> UInt32[Array, ""]:
    sizes, number = dict(shards.mesh.shape), jnp.uint32(0)
    for name in names:
        place = jax.lax.axis_index(name).astype(jnp.uint32)
        number = number * np.uint32(sizes[name]) + place
    return number


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    entries = [names if len(names) > 1 else (names or (None,))[0] for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def typed_by_memory(sharding: Any) -> Any:
    """The same placement as a sharding from which JAX takes an array's memory type.

    An array made with a `SingleDeviceSharding`, as by a restore, has the type of device
    memory whatever its memory kind (jax 0.10.2 to 0.12.0.1); no update would page it.
    """
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    (device,) = sharding.device_set
    mesh = Mesh(np.array([device]), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def refuse_uneven(params: Any) -> None:
    """Refuses parameters that could not be made as they are described.

    Raises:
      ValueError: If the sharding of one does not divide it evenly.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        try:
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise _uneven("params", sharding, path, x.shape) from error


def _uneven(argument: str, sharding: NamedSharding, path: Any, shape: Any) -> Exception:
    return ValueError(
        f"{argument} has {sharding.spec} over the mesh {dict(sharding.mesh.shape)} for"
        f" parameter {_keystr(path)} of shape {shape}, which it does not divide evenly:"
        " leave that axis whole."
    )


def fully_sharded(params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Divides every parameter over all devices of a mesh, as ZeRO and FSDP do.

    One axis of the mesh after the other cuts the longest dimension of what is left of
    a parameter, of those that it divides evenly; where there is none it replicates.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      mesh: The devices.

    Returns:
      A `NamedSharding` for each parameter.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> params = {"w": jnp.ones((512, 2048)), "b": jnp.ones(3)}
      >>> found = po.fully_sharded(params, mesh)
      >>> found["w"].spec, found["b"].spec
      (P(None, 'data'), P())

    References:
      Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    """

    def divide(x: Any) -> NamedSharding:
        axes: list[tuple[str, ...]] = [()] * len(x.shape)
        left = list(x.shape)
        for name, size in mesh.shape.items():
            longest = max(
                ((n, -i) for i, n in enumerate(left) if n % size == 0), default=None
            )
            if longest is not None:
                i = -longest[1]
                axes[i], left[i] = (*axes[i], name), left[i] // size
        return NamedSharding(mesh, _spec(axes))

    return jax.tree.map(divide, params)


class Known:
    """What a paged transformation knows of its parameters' shardings.

    In this order: the type of an array on a mesh of explicit axes; the `shardings`
    that were asked for; a concrete array's own; what `init` saw of a parameter of this
    path and shape. In a `jit` over automatic axes only the second and last remain.

    Args:
      asked: A pytree of `NamedSharding` or `PartitionSpec` of the parameters'
        structure, or a prefix of it; None for nothing.
    """

    def __init__(self, asked: Any = None):
        is_leaf = lambda x: isinstance(x, (NamedSharding, PartitionSpec)) or x is None
        flat = jax.tree_util.tree_flatten_with_path(asked, is_leaf=is_leaf)[0]
        self.asked = {tuple(path): x for path, x in flat if x is not None}
        for path, x in self.asked.items():
            if not isinstance(x, (NamedSharding, PartitionSpec)):
                raise ValueError(
                    f"shardings{_keystr(path)}={x!r} is neither a NamedSharding nor a"
                    " PartitionSpec."
                )
        self.seen: dict[_Key, Shards | None] = {}

    def said_by(
        self, paths: Sequence[Any], leaves: Sequence[Any]
    ) -> dict[_Key, Shards | None]:
        """What concrete parameters say of themselves, for `init` to remember.

        Raises:
          ValueError: If an `init` before was told otherwise.
        """
        said: dict[_Key, Shards | None] = {}
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, Tracer) or self.asked:
                continue  # this says nothing, or what counts is said elsewhere
            if _axis_types(x.sharding) == {AxisType.Explicit}:
                continue  # its type says so to every update
            key = _keystr(path), x.shape
            here = said[key] = Shards.of_array(x)
            before = self.seen.get(key, here)
            if here != before:
                divided = lambda x: f"divided by {x.spec}" if x else "undivided"
                raise ValueError(
                    f"parameter {key[0]} of shape {x.shape} is {divided(here)}, and was"
                    f" {divided(before)} at an earlier init of this transformation: in"
                    " a jax.jit one could not be told from the other. Build one"
                    " transformation for each, or say which it is, by"
                    " paged(..., shardings=...)."
                )
        return said

    def find(
        self, paths: Sequence[Any], *trees: Sequence[Any] | None
    ) -> tuple[Shards | None, ...]:
        """The shards of each parameter, given arrays of its shape: gradients, say.

        Raises:
          ValueError: If a sharding that was asked for does not fit its parameter.
        """
        given = [tree for tree in trees if tree]
        return tuple(
            self._of(path, [tree[i] for tree in given]) for i, path in enumerate(paths)
        )

    def _of(self, path: Any, arrays: Sequence[Any]) -> Shards | None:
        shape = arrays[0].shape
        for x in arrays:
            sharding: Any = getattr(jax.typeof(x), "sharding", None)
            types = _axis_types(sharding)
            if types == {AxisType.Explicit}:  # what a mix does not say, others may
                mesh = getattr(getattr(x, "sharding", None), "mesh", sharding.mesh)
                return Shards.of(NamedSharding(mesh, sharding.spec), shape)
            if AxisType.Manual in types:
                return None
        if self.asked:
            return self._asked(path, shape)
        concrete = [x for x in arrays if not isinstance(x, Tracer)]
        own = map(Shards.of_array, concrete)
        found = next((shards for shards in own if shards is not None), None)
        return found if concrete else self.seen.get((_keystr(path), shape))

    def _asked(self, path: Any, shape: tuple[int, ...]) -> Shards | None:
        ends = (tuple(path[:n]) for n in range(len(path), -1, -1))
        asked = next((self.asked[end] for end in ends if end in self.asked), None)
        if asked is None:
            raise ValueError(
                f"shardings has nothing for parameter {_keystr(path)}: give it the"
                " parameters' structure, or a prefix of it; PartitionSpec() where a"
                " parameter is replicated."
            )
        if isinstance(asked, PartitionSpec):
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise ValueError(
                    f"shardings has {asked} for parameter {_keystr(path)}, and there is"
                    " no mesh around: pass NamedSharding(mesh, spec), or enter"
                    " jax.set_mesh(mesh)."
                )
            asked = NamedSharding(mesh, asked)
        found = Shards.of(asked, shape) if len(asked.spec) <= len(shape) else None
        if found is None and asked.mesh.size > 1:
            raise _uneven("shardings", asked, path, shape)
        return found


@contextlib.contextmanager
def explicitly_typed(params: Any) -> Iterator[Any]:
    """Shapes of the parameters, of which a trace says how everything is divided."""
    meshes = []

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        shards = Shards.of_array(x)
        if shards is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        names = shards.mesh.axis_names
        types = (AxisType.Explicit,) * len(names)
        meshes.append(AbstractMesh(shards.mesh.axis_sizes, names, axis_types=types))
        sharding = NamedSharding(meshes[-1], shards.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = jax.tree.map(typed, params)
    if not meshes:
        yield shapes
        return
    with jax.sharding.use_abstract_mesh(meshes[0]):
        yield shapes
