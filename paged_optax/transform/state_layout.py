"""Layout of a state: the storage of each leaf, and the leaves that stay on the device.

With the default settings a state is Optax's own, leaf for leaf. A codec stores a moment
in other arrays. Optax counts steps in integer scalars; with `per_parameter_steps` each
count is a tree of the parameters' structure, so that bias corrections and schedules
follow a parameter's own updates.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.types import (
    ArrayOrShape,
    KeyPath,
    PyTreeDef,
    counts_steps,
    holds_moments,
    in_shard_map,
    is_traced,
    shape_dtype,
)
from paged_optax.codecs import Codec, Quantized, arranged
from paged_optax.codecs.identity import (
    codec_fields,
    codes_field,
    of_one_part,
    quantized_as,
)
from paged_optax.engine.shards import Shards
from paged_optax.transform.codec_rules import Rule, choose, coded_moments
from paged_optax.transform.context import current
from paged_optax.transform.trees import (
    Parameter,
    StoredOrShape,
    leaf_paths,
    parameter_of,
)


class OtherLayoutError(ValueError):
    """A moment of the state has another codec, or other shards."""


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """Storage of one leaf of a state."""

    aval: jax.ShapeDtypeStruct  # decoded
    param_index: int | None  # the parameter that it belongs to
    shards: Shards | None
    codec: Codec | None

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        shape = self.aval.shape
        return self.shards.local(shape) if self.shards else shape

    @functools.cached_property
    def stored(self) -> StoredOrShape:
        """Shapes and dtypes of the leaf as it is stored."""
        if self.codec is None:
            return self.aval
        if self.shards is None:
            return self.codec.stored(self.aval.shape)
        return self.shards.stored(self.codec, self.aval.shape)

    @property
    def size(self) -> int | None:
        """Stored bytes on a device; None if it is no moment."""
        if not self.aval.shape or not holds_moments(self.aval.dtype):
            return None
        parts = math.prod(self.shards.divisions) if self.shards else 1
        return nbytes(self.stored) // parts if nbytes(self.aval) else None

    def types(self, param: Parameter | None) -> StoredOrShape | None:
        """Returns arrays or types with the leaf's shardings; None: replicated."""
        if self.codec is None:
            alike = param is not None and param.shape == self.aval.shape
            return param if alike else None
        shards, stored = self.shards, self.stored
        if shards is None:
            return jax.tree.map(lambda _: None, stored)
        typed = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(shards.mesh, spec)
        )
        return jax.tree.map(
            typed, stored, shards.spec_of(self.codec, stored, self.local)
        )

    @property
    def codes_field(self) -> str:
        """The name of the field of its codes."""
        assert self.codec is not None
        return codes_field(
            self.codec, self.local, self.shards.divisions if self.shards else ()
        )

    def read(self, stored: PyTree) -> StoredOrShape:
        """Returns a coded moment, from any container that a restore made."""
        fields = codec_fields(stored) if isinstance(self.stored, Quantized) else ()
        # Before containers named the codec, the field was called `codes`.
        field = fields[0] if fields else "codes"
        if in_shard_map():
            field = of_one_part(field)
        alike = _layout_kinds(stored) == _layout_kinds(self.stored)
        if not alike or (field != "codes" and field != self.codes_field):
            coded = isinstance(self.stored, Quantized)
            place = f" in {self.codes_field!r}" if coded else ""
            unknown = ""
            if self.shards is None and field != of_one_part(field):
                unknown = (
                    " If that is so, nothing in this jax.jit says how they are divided:"
                    " compile by jit_step, or pass paged(..., shardings=...)."
                )
            raise OtherLayoutError(
                f"the state holds {jax.tree.map(jax.typeof, stored)} where codec"
                f" {self.codec!r} stores {self.stored}{place}: pass the codec that the"
                " state was made with, or make the state with this transformation's own"
                f" init, for parameters divided as these are.{unknown}"
            )
        shapes, structure = jax.tree.flatten(self.stored)
        return structure.unflatten(map(reshaped_like, jax.tree.leaves(stored), shapes))


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """A state's structure, and the storage of its leaves."""

    structure: PyTreeDef  # of the transformation's own state
    leaves: tuple[StoredLeaf, ...]
    counts: tuple[int, ...]  # positions of counts of which each parameter has its own
    parameters: PyTreeDef
    parameter_shards: tuple[Shards | None, ...]

    @classmethod
    def create(
        cls,
        shapes: PyTree[ArrayOrShape],
        state: PyTree,
        params: PyTree,
        parameter_shards: Sequence[Shards | None],
        rules: Mapping[str, Rule],
        per_parameter_steps: bool,
        param_indices: Sequence[int | None] | None = None,
    ) -> "StateLayout":
        """Returns the layout of `state`, given the shapes of the transformation's own.

        `param_indices` has the parameter of each of the shapes; None to compute them.
        Within a `jax.shard_map`, and in a layer of a stack, moments are parts of larger
        ones. Whether and how a part is coded depends on the whole moment: the arrays of
        the state show it.
        """
        avals, structure = jax.tree.flatten(shapes)
        parameters, parameter_structure = jax.tree.flatten(params)
        if param_indices is None:
            param_indices = parameter_of(leaf_paths(shapes)[0], leaf_paths(params)[0])
        parts = _encoded_parts(avals, structure, state) if rules else {}
        coded = coded_moments(rules, shapes, params, param_indices)
        codecs = choose(coded, parts)

        def leaf(
            index: int, x: StoredOrShape, param_index: int | None, codec: Codec | None
        ) -> StoredLeaf:
            shards = None
            # Moments of other shapes, such as factored ones, are undivided.
            if param_index is not None and x.shape == parameters[param_index].shape:
                shards = parameter_shards[param_index]
            if codec is not None:
                # XLA:TPU slices no bytes in host memory: codes share words of 32 bits.
                # Words and scales are arranged to shard as the moment does.
                local = shards.local(x.shape) if shards else x.shape
                codec, base = arranged(codec, local, x.shape), codec
                if index in parts:
                    codec = _arranged_like(parts[index], base, x.shape) or codec
            return StoredLeaf(shape_dtype(x), param_index, shards, codec)

        leaves = tuple(map(leaf, range(len(avals)), avals, param_indices, codecs))
        own_counts = per_parameter_steps and parameters
        is_own = lambda x: own_counts and not x.ndim and counts_steps(x.dtype)
        counts = tuple(i for i, x in enumerate(avals) if is_own(x))
        shards = tuple(parameter_shards)
        return cls(structure, leaves, counts, parameter_structure, shards)

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """Stored bytes of each leaf on a device; None if it is no moment."""
        return [leaf.size for leaf in self.leaves]

    @property
    def param_indices(self) -> list[int | None]:
        """For each leaf the parameter that it belongs to, or None."""
        return [leaf.param_index for leaf in self.leaves]

    def small(self, min_paged_size: int) -> list[bool]:
        """Returns for each leaf whether it is no moment, or too small to page."""
        stored = [leaf.stored for leaf in self.leaves]
        return too_small(self.sizes, stored, self.param_indices, min_paged_size)

    def build(self, arrays: Sequence[StoredOrShape]) -> PyTree:
        """Builds a new state of stored leaves, with copies of each count.

        A coded moment gets a container that names its codec.
        """
        arrays = [
            quantized_as(leaf.codes_field, *x) if isinstance(x, Quantized) else x
            for leaf, x in zip(self.leaves, arrays, strict=True)
        ]
        for index in self.counts:
            count = arrays[index]
            copy = lambda _, x=count: x if is_traced(x) else jnp.array(x, copy=True)
            copies = map(copy, range(self.parameters.num_leaves))
            arrays[index] = jax.tree.unflatten(self.parameters, copies)
        return jax.tree.unflatten(self.structure, arrays)

    def take_apart(self, state: PyTree) -> list[StoredOrShape]:
        """Returns a state's leaves as they are stored.

        A count of which each parameter has its own is a list. Raises `ValueError` if
        the state is of another layout.
        """
        arrays = self.structure.flatten_up_to(state)
        arrays = [
            x if leaf.codec is None else leaf.read(x)
            for leaf, x in zip(self.leaves, arrays, strict=True)
        ]
        for index in self.counts:
            counts, structure = jax.tree.flatten(arrays[index])
            if structure != self.parameters:
                raise ValueError(
                    f"per_parameter_steps=True, and the state has {structure} where one"
                    " step count for each parameter is called for: make the state with"
                    " this transformation's own init."
                )
            arrays[index] = counts
        return arrays

    def seen(self, arrays: Sequence[StoredOrShape]) -> PyTree[ArrayOrShape]:
        """Returns the transformation's own state, with shapes for coded leaves."""
        seen: list[PyTree] = [
            x if leaf.codec is None else shape_dtype(leaf.aval, x)
            for leaf, x in zip(self.leaves, arrays, strict=True)
        ]
        for index in self.counts:
            seen[index] = seen[index][0]
        return jax.tree.unflatten(self.structure, seen)

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the transformation's own state."""
        avals = [leaf.aval for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, avals)

    @functools.cached_property
    def parameter_paths(self) -> list[KeyPath]:
        """The paths of the parameters."""
        numbers = range(self.parameters.num_leaves)
        return leaf_paths(jax.tree.unflatten(self.parameters, numbers))[0]


# A moment of less than this part of `min_paged_size` counts alone: its transfer remains
# separate, and costs its latency.
_LEAST_PART = 8


def too_small(
    sizes: Sequence[int | None],
    stored: Sequence[PyTree[ArrayOrShape]],
    param_indices: Sequence[Hashable],
    min_paged_size: int,
) -> list[bool]:
    """Returns for each leaf of a state whether it is too small to page.

    Moments of one shape and dtype share pages, and count as one: 64 adapters of 64 KiB
    each are 4 MiB. A moment of less than an eighth of `min_paged_size` counts alone. A
    leaf without a size is never paged.
    """
    # Moments of one kind have one shape and dtype, and the same position among the
    # moments of their parameters.
    kinds: list[Hashable] = []
    before = collections.Counter[Hashable]()
    total = collections.Counter[Hashable]()
    for size, arrays, param_index in zip(sizes, stored, param_indices, strict=True):
        kind = (
            *((x.shape, x.dtype) for x in jax.tree.leaves(arrays)),
            before[param_index],
        )
        before[param_index] += 1
        total[kind] += size or 0
        kinds.append(kind)
    return [
        size is None
        or (size if size * _LEAST_PART < min_paged_size else total[kind])
        < min_paged_size
        for size, kind in zip(sizes, kinds, strict=True)
    ]


def resident(
    sizes: Sequence[int | None],
    owners: Sequence[Hashable],
    budget: int | None,
    on_device: Sequence[bool],
) -> list[bool]:
    """Chooses the state leaves that stay on the device.

    A step reads every page once, in one order, so the best choice (Belady's) is a fixed
    set: the leaves that `on_device` names, then the moments of parameters in order
    until the budget is spent; None: all. Moments of one owner, a parameter or a stack,
    stay or go as one.
    """
    if budget is None:
        return [True] * len(sizes)
    on_device = list(on_device)
    groups: dict[Hashable, list[int]] = {}
    for leaf, owner in enumerate(owners):
        if not on_device[leaf]:
            key = ("leaf", leaf) if owner is None else owner
            groups.setdefault(key, []).append(leaf)
    for group in groups.values():
        size = sum(sizes[leaf] or 0 for leaf in group)
        if size <= budget:
            budget -= size
            for leaf in group:
                on_device[leaf] = True
    return on_device


def _encoded_parts(
    avals: Sequence[ArrayOrShape], structure: PyTreeDef, state: PyTree
) -> dict[int, StoredOrShape]:
    """Returns the encoded parts of moments in a state, by the leaf's position."""
    if not in_shard_map() and current().layer is None:
        return {}
    try:
        pairs = enumerate(zip(structure.flatten_up_to(state), avals, strict=True))
    except ValueError:
        return {}  # of another structure, which `StateLayout.take_apart` refuses
    # A part without a codec has the moment's dtype.
    return {i: x for i, (x, y) in pairs if getattr(x, "dtype", None) != y.dtype}


def _arranged_like(
    part: StoredOrShape, codec: Codec, shape: tuple[int, ...]
) -> Codec | None:
    """Returns a codec as it stores an encoded part; None: in no known arrangement."""
    for full in _wholes(shape):
        candidate = arranged(codec, shape, full)
        if _layout_kinds(candidate.stored(shape)) == _layout_kinds(part):
            return candidate
    return None


def _wholes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of which this may be a part, itself first."""
    if current().layer is not None and len(shape) > 2 and shape[0] == 1:
        yield shape
        shape = 2, *shape[1:]  # all stacks of several layers have one arrangement
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = [size for size, kind in sizes if kind is AxisType.Manual]
    for places in itertools.product(range(len(shape) + 1), repeat=len(manual)):
        full = [1, *shape]
        for place, size in zip(places, manual, strict=True):
            full[place] *= size  # at 0: divided along no axis of the moment
        yield tuple(full[1:])


def _layout_kinds(stored: StoredOrShape) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Returns the shapes and dtypes of codes and scales; a row of scales is a vector.

    If shards are no ranges of the flattened moment, its scales have a row for each.
    """
    flat = lambda shape: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
    return [
        (flat(x.shape) if index else x.shape, x.dtype)
        for index, x in enumerate(jax.tree.leaves(stored))
    ]


def reshaped_like(x: ArrayOrShape, like: ArrayOrShape) -> ArrayOrShape:
    """Returns an array in the shape of another: scales with or without a row."""
    if x.shape == like.shape or isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x.reshape(like.shape)
