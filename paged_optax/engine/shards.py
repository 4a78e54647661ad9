"""Where numbers are computed on a mesh: each device pages its own shard.

A moment is divided over a mesh as its parameter is, or as Flax's metadata say. The page
loop runs inside `jax.shard_map`, on the shard alone: each device pages over its own
link, pages are cut from the shard, and no collective appears. Under automatic
partitioning XLA would gather every page (4 devices, H200: 96 MiB of scratch and 128 MiB
of host scratch where `shard_map` takes 8 and 0). How a parameter is divided,
`paged_optax.transform.parameter_shardings` finds out; which leaves are paged so,
`paged_optax.transform.leaf_groups.divided_as` says. Within a user's own `jax.shard_map`
it is `paged_optax.transform.moment_parts`.

The numbers are those of one device, bit for bit, but for what
`paged_optax.guides.many_devices` lists. Where one is wrong, look here first: JAX checks
nothing of what devices know alike (`check_vma=False` in `on_shards`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jaxtyping import PyTree, UInt32

from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec, Quantized, axis_of_blocks

#: The scope in which a leaf of unknown sharding is paged. On one device that is right.
#: On several devices the program is slow, and `memory_report` says so.
UNSHARDED = "paged_optax_without_shardings"


#: What a result is like: the position of an argument, or a codec and what it stores.
ResultLike: TypeAlias = int | tuple[Codec | None, PyTree[jax.ShapeDtypeStruct]]


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
    def of(cls, sharding: Sharding | None, shape: tuple[int, ...]) -> "Shards | None":
        """Reads a sharding; None where there is nothing to divide over."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return None
        if AxisType.Manual in getattr(sharding.mesh, "axis_types", ()):
            return None  # inside a `shard_map` already: what is seen is the shard
        entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        axes = tuple(
            () if entry is PartitionSpec.UNCONSTRAINED else _names(entry)
            for entry in entries
        )
        shards = cls(sharding.mesh, axes)
        even = (n % d == 0 for n, d in zip(shape, shards.divisions, strict=True))
        return shards if all(even) else None

    @classmethod
    def of_array(cls, x: ArrayOrShape) -> "Shards | None":
        """Those of an array, or of a `ShapeDtypeStruct`, that says where it is."""
        return cls.of(getattr(x, "sharding", None), x.shape)

    @property
    def divisions(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        sizes = dict(self.mesh.shape)
        return tuple(math.prod(sizes[name] for name in names) for names in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """The leaf's `PartitionSpec`."""
        return spec_of_axes(self.axes)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one shard."""
        return tuple(n // d for n, d in zip(shape, self.divisions, strict=True))

    def stored(
        self, codec: Codec, shape: tuple[int, ...]
    ) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes in which a codec stores the shards of a moment.

        Blocks never cross shards. Scales by rows are divided as the moment is. Others
        have one row for each shard that is not a range of the flattened moment. So the
        shape of the scales shows in which layout a state was made.
        """
        stored = codec.stored(self.local(shape))
        grown = lambda x, divisions: jax.ShapeDtypeStruct(
            tuple(n * d for n, d in zip(x.shape, divisions, strict=True)), x.dtype
        )
        if not isinstance(stored, Quantized):
            return grown(stored, self.divisions)
        first, *others = self.divisions
        scales = stored.scales
        if axis_of_blocks(codec) is not None:
            scales = grown(scales, self.divisions)
        elif self.has_rows:
            shape = (math.prod(others), first * scales.shape[0])
            scales = jax.ShapeDtypeStruct(shape, scales.dtype)
        else:
            scales = grown(scales, (first,))
        return Quantized(grown(stored.codes, self.divisions), scales)

    def spec_of(
        self,
        codec: Codec | None,
        x: PyTree[ArrayOrShape],
        local: tuple[int, ...],
    ) -> PyTree[PartitionSpec]:
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
            scales = spec_of_axes([names, first] if self.has_rows else [first])
        return Quantized(self.spec, scales)

    def typed(
        self,
        codec: Codec,
        stored: PyTree[jax.ShapeDtypeStruct],
        local: tuple[int, ...],
    ) -> PyTree[jax.ShapeDtypeStruct]:
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
    def current_mesh(self) -> Mesh | AbstractMesh:
        """The mesh, its axes automatic where `with_automatic_axes` has made them so."""
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in self.mesh.axis_types or around.empty:
            return self.mesh
        return self.mesh if AxisType.Explicit in around.axis_types else around

    @property
    def sharding(self) -> NamedSharding:
        """The leaf's `NamedSharding`."""
        return NamedSharding(self.mesh, self.spec)


@dataclasses.dataclass(frozen=True)
class ShardOffset:
    """Where in a leaf this device's shard is, for what depends on it.

    Attributes:
      start: The offset in the flattened leaf of its first value, where shards are
        ranges; else 0.
      part: The number of the shard, where shards are no ranges; else 0.
    """

    start: UInt32[Array, ""]
    part: UInt32[Array, ""]

    def random_words(self, words: PyTree[UInt32[Array, "2"]]) -> PyTree[Array]:
        """Random words of this shard: each one that is no range counts from 0."""
        return jax.tree.map(lambda x: x + self.part, words)


def on_shards(
    function: Callable[..., Sequence[PyTree[Array]]],
    shards: Shards,
    arrays: tuple[PyTree[Array], ...],
    codecs: Sequence[Codec | None],
    local: tuple[int, ...],
    results: Sequence[ResultLike],
    scalars: PyTree[Array] = (),
) -> tuple[PyTree[Array], ...]:
    """Calls a function on every device, with its shards of a leaf's arrays.

    Args:
      function: Of the shard's offset, the arrays and the scalars.
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
    stored_as = [(codecs[x], arrays[x]) if isinstance(x, int) else x for x in results]

    def with_scales(
        codec: Codec | None, x: PyTree[Array], reshape: Callable[[Array], Array]
    ) -> PyTree[Array]:
        # Scales by rows are divided as the leaf is, and need no other shape.
        if not isinstance(x, Quantized) or axis_of_blocks(codec) is not None:
            return x
        return x._replace(scales=reshape(x.scales))

    def run(
        arrays: tuple[PyTree[Array], ...], scalars: PyTree[Array]
    ) -> tuple[PyTree[Array], ...]:
        number = _index(shards, [name for names in shards.axes for name in names])
        # Offsets count modulo 2**32, as those within the shard do.
        start = number * np.uint32(math.prod(local) % 2**32)
        zero = jnp.uint32(0)
        by_row = ShardOffset(zero, number)
        offset = by_row if shards.has_rows else ShardOffset(start, zero)
        # A shard's scales are one vector, as those of a leaf on one device are. Outside
        # they may have a row for each part, see `Shards.stored`.
        arrays = tuple(
            with_scales(codec, x, lambda scales: scales.reshape(-1))
            for codec, x in zip(codecs, arrays, strict=True)
        )
        new = function(offset, arrays, scalars)
        if not shards.has_rows:
            return tuple(new)
        return tuple(
            with_scales(codec, x, lambda scales: scales[None])
            for (codec, _), x in zip(stored_as, new, strict=True)
        )

    return jax.shard_map(
        run,
        mesh=shards.current_mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=tuple(
            shards.spec_of(codec, like, local) for codec, like in stored_as
        ),
        # Else all that devices know alike, such as a step's number, must be cast before
        # it meets a shard's values (jax 0.12.0.1).
        check_vma=False,
    )(arrays, scalars)


def constrained(x: Array, shards: Shards | None) -> Array:
    """An array that is divided as a leaf is, if it has its dimensions.

    XLA would replicate what it can compute anywhere, such as a constant.
    """
    if shards is None or jnp.ndim(x) != len(shards.axes):
        return x
    sharding = NamedSharding(shards.current_mesh, shards.spec)
    return jax.lax.with_sharding_constraint(x, sharding)


def _index(shards: Shards, names: Sequence[str]) -> UInt32[Array, ""]:
    sizes, number = dict(shards.mesh.shape), jnp.uint32(0)
    for name in names:
        index = jax.lax.axis_index(name).astype(jnp.uint32)
        number = number * np.uint32(sizes[name]) + index
    return number


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_of_axes(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The spec of an array of which each axis is divided by the axes named."""
    entries = [names if len(names) > 1 else (names or (None,))[0] for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
