"""Leaves divided over a mesh: each device pages its own shard.

A moment is divided over a mesh as its parameter is, or by Flax's metadata. The page
loop runs inside `jax.shard_map`, on the shard alone: each device pages over its own
link, pages are cut from the shard, and no collective appears. Under automatic
partitioning XLA would gather every page (4 devices, H200: 96 MiB of scratch and 128 MiB
of host scratch; `shard_map` takes 8 and 0).

The numbers equal one device's, bit for bit, with the exceptions in
`docs/many_devices.md`. If one is wrong, look here first: JAX does not check
that replicated values are equal (`check_vma=False` in `on_shards`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

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
from jaxtyping import Int, PyTree, UInt32

from paged_optax.backend.types import ArrayOrShape, Shape
from paged_optax.codecs import Codec, Quantized, axis_of_blocks

#: The scope of a leaf of unknown sharding. On one device it is exact and fast. On
#: several devices the program is slow, and `memory_report` reports it.
UNSHARDED = "paged_optax_without_shardings"


@dataclasses.dataclass(frozen=True)
class Shards:
    """Division of one leaf over a mesh."""

    mesh: Mesh | AbstractMesh
    axes: tuple[tuple[str, ...], ...]  # for each dimension the mesh axes that divide it

    @classmethod
    def create(cls, sharding: Sharding | None, shape: Shape) -> "Shards | None":
        """Reads a sharding; None if it divides nothing."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return None
        if len(sharding.spec) > len(shape):
            return None
        if sharding.mesh.manual_axes:
            return None  # inside a `shard_map`, whose arrays are shards
        entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        undivided = None, PartitionSpec.UNCONSTRAINED
        names = lambda entry: entry if isinstance(entry, tuple) else (entry,)
        axes = tuple(() if entry in undivided else names(entry) for entry in entries)
        shards = cls(sharding.mesh, axes)
        even = (n % d == 0 for n, d in zip(shape, shards.divisions, strict=True))
        return shards if all(even) else None

    @classmethod
    def of_array(cls, x: ArrayOrShape) -> "Shards | None":
        """Reads the sharding of an array, or of a `ShapeDtypeStruct`."""
        return cls.create(getattr(x, "sharding", None), x.shape)

    @property
    def divisions(self) -> tuple[int, ...]:
        """Number of parts of each dimension."""
        return self._parts_of(self.axes)

    def _parts_of(self, axes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
        sizes = dict(self.mesh.shape)
        return tuple(math.prod(sizes[name] for name in names) for names in axes)

    @property
    def spec(self) -> PartitionSpec:
        """The leaf's `PartitionSpec`."""
        return spec_of_axes(self.axes)

    @property
    def sharding(self) -> NamedSharding:
        """The leaf's `NamedSharding`."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def has_rows(self) -> bool:
        """True if shards are no ranges of the flattened leaf."""
        return math.prod(self.divisions[1:]) > 1

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """The mesh, with automatic axes inside `with_automatic_axes`."""
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in self.mesh.axis_types or around.empty:
            return self.mesh
        return self.mesh if AxisType.Explicit in around.axis_types else around

    def local(self, shape: Shape) -> Shape:
        """Returns the shape of one shard."""
        return tuple(n // d for n, d in zip(shape, self.divisions, strict=True))

    def stored(self, codec: Codec, shape: Shape) -> PyTree[jax.ShapeDtypeStruct]:
        """Returns the encoded shapes and dtypes of a moment's shards.

        Blocks never cross shards. Scales by rows are divided as the moment is. Other
        scales have one row for each shard that is not a range of the flattened moment,
        so that the shape of the scales identifies the layout of a state.
        """

        def grown(
            x: jax.ShapeDtypeStruct, axes: Sequence[tuple[str, ...]]
        ) -> jax.ShapeDtypeStruct:
            part = (*(1,) * (len(axes) - len(x.shape)), *x.shape)
            pairs = zip(part, self._parts_of(axes), strict=True)
            return jax.ShapeDtypeStruct(tuple(n * d for n, d in pairs), x.dtype)

        stored = codec.stored(self.local(shape))
        if not isinstance(stored, Quantized):
            return grown(stored, self.axes)
        scales = grown(stored.scales, self._axes_of_scales(codec))
        return Quantized(grown(stored.codes, self.axes), scales)

    def _axes_of_scales(self, codec: Codec | None) -> Sequence[tuple[str, ...]]:
        if axis_of_blocks(codec) is not None:
            return self.axes
        first, *remaining = self.axes
        return [(*itertools.chain(*remaining),), first] if self.has_rows else [first]

    def spec_of(
        self, codec: Codec | None, x: PyTree[ArrayOrShape], local: Shape
    ) -> PyTree[PartitionSpec]:
        """Returns the partition spec of a leaf's array, or of its encoded form."""
        if not isinstance(x, Quantized):
            if codec is None and len(x.shape) == len(self.axes):
                return self.spec if self.local(x.shape) == local else PartitionSpec()
            return PartitionSpec() if codec is None else self.spec
        return Quantized(self.spec, spec_of_axes(self._axes_of_scales(codec)))


def on_shards(
    function: Callable[..., Sequence[tuple[PyTree[Array], ...]]],
    shards: Shards,
    leaves: tuple[tuple[PyTree[Array], ...], ...],
    codecs: Sequence[Codec | None],
    local: Shape,
    results: Sequence[tuple[Codec | None, PyTree[ArrayOrShape]]],
    trip_count: Int[Array, ""] | None = None,
    random_bits: PyTree[UInt32[Array, "2"]] = None,
) -> list[tuple[PyTree[Array], ...]]:
    """Calls a function on every device, with its shards of leaves.

    It gets the leaves, the trip count, the shard's random words, and the offset in the
    flattened leaf of its first value. A shard that is no range of the flattened leaf
    has offset 0, and random words of its own. Arrays of other shapes than the leaf's
    are replicated. `local` is the shape of a shard, `codecs` has the codec of each
    array of a leaf, and `results` of each result its codec and an array of its kind.
    """
    spec = lambda x, codec: shards.spec_of(codec, x, local)
    result_codecs = [codec for codec, _ in results]
    # A shard's scales are one vector, as on one device. Outside they may have a row for
    # each part, see `Shards.stored`. Scales by rows keep their shape.
    by_rows = lambda x, codec: (
        not isinstance(x, Quantized) or axis_of_blocks(codec) is not None
    )
    flat = lambda x, codec: (
        x if by_rows(x, codec) else x._replace(scales=x.scales.reshape(-1))
    )
    row = lambda x, codec: x if by_rows(x, codec) else x._replace(scales=x.scales[None])

    def run(
        leaves: tuple[tuple[PyTree[Array], ...], ...],
        scalars: tuple[Int[Array, ""] | None, PyTree[UInt32[Array, "2"]]],
    ) -> list[tuple[PyTree[Array], ...]]:
        sizes, number = dict(shards.mesh.shape), jnp.uint32(0)
        for name in itertools.chain(*shards.axes):
            index = jax.lax.axis_index(name).astype(jnp.uint32)
            number = number * np.uint32(sizes[name]) + index
        # Offsets count modulo 2**32, as offsets within the shard do.
        start = number * np.uint32(math.prod(local) % 2**32)
        part = jnp.uint32(0)
        if shards.has_rows:
            start, part = part, number
        leaves = tuple(tuple(map(flat, leaf, codecs)) for leaf in leaves)
        trip_count, random_bits = scalars
        words = jax.tree.map(lambda x: x + part, random_bits)
        new = function(leaves, trip_count, words, start)
        if not shards.has_rows:
            return [*new]
        return [tuple(map(row, leaf, result_codecs)) for leaf in new]

    return jax.shard_map(
        run,
        mesh=shards.current_mesh,
        in_specs=(
            tuple(tuple(map(spec, leaf, codecs)) for leaf in leaves),
            PartitionSpec(),
        ),
        out_specs=[tuple(spec(x, codec) for codec, x in results)] * len(leaves),
        # With the check, replicated values, such as a step's number, must be cast
        # before they meet a shard's values (jax 0.12.0.1).
        check_vma=False,
    )(leaves, (trip_count, random_bits))


def constrained(x: Array, shards: Shards | None) -> Array:
    """Constrains an array to a leaf's sharding, if it has its dimensions.

    XLA would replicate values that it can compute anywhere, such as constants.
    """
    if shards is None or jnp.ndim(x) != len(shards.axes):
        return x
    sharding = NamedSharding(shards.current_mesh, shards.spec)
    return jax.lax.with_sharding_constraint(x, sharding)


def spec_of_axes(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec of an array whose axes are divided by the mesh axes named."""
    entries = [names if len(names) > 1 else (names or (None,))[0] for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
