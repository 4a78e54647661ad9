"""Layout of a state: the storage of each leaf, and the leaves that stay on the device.

With the default settings a state is Optax's own, leaf for leaf. A codec stores a moment
in other arrays. Optax counts steps in integer scalars; with `per_parameter_steps` each
count is a tree of the parameters' structure, so that bias corrections and schedules
follow a parameter's own updates.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.types import (
    ArrayOrShape,
    PyTreeDef,
    counts_steps,
    holds_moments,
    in_shard_map,
    is_traced,
    shape_dtype,
)
from paged_optax.codecs import Arranged, Codec, Quantized, arranged
from paged_optax.codecs.identity import (
    codec_fields,
    codes_field,
    of_one_part,
    quantized_as,
)
from paged_optax.engine.shards import Shards
from paged_optax.transform.codec_rules import Rule, choose
from paged_optax.transform.context import current
from paged_optax.transform.trees import (
    Parameter,
    StoredOrShape,
)


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

    def types(self, parameters: Sequence[Parameter]) -> StoredOrShape | None:
        """Returns arrays or types with the leaf's shardings; None: replicated."""
        if self.codec is None:
            like = None if self.param_index is None else parameters[self.param_index]
            return like if like is not None and like.shape == self.aval.shape else None
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
        field = fields[0] if fields else "codes"
        if in_shard_map():
            field = of_one_part(field)
        alike = _layout_kinds(stored) == _layout_kinds(self.stored)
        # A layer's slice is a plain `Quantized`, and a list has no names.
        if not alike or field not in ("codes", self.codes_field):
            coded = isinstance(self.stored, Quantized)
            place = f" in {self.codes_field!r}" if coded else ""
            unknown = ""
            if self.shards is None and field != of_one_part(field):
                unknown = (
                    " If that is so, nothing in this jax.jit says how they are divided:"
                    " compile by jit_step, or pass paged(..., shardings=...)."
                )
            raise ValueError(
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
    uncoded: frozenset[int]  # positions of moments too small for their rule's codec
    counts: tuple[int, ...]  # positions of counts of which each parameter has its own
    parameters: PyTreeDef
    parameter_shards: tuple[Shards | None, ...]

    @classmethod
    def create(
        cls,
        shapes: PyTree[ArrayOrShape],
        params: PyTree,
        parameter_shards: Sequence[Shards | None],
        rules: Mapping[str, Rule],
        per_parameter_steps: bool,
        param_indices: Sequence[int | None],
        arrays: Sequence[PyTree] = (),
    ) -> "StateLayout":
        """Returns the layout of a state, given the shapes of the transformation's own.

        `param_indices` has the parameter of each of the shapes. Within a
        `jax.shard_map`, and in a layer of a stack, moments are parts of larger ones.
        Whether and how a part is coded depends on the whole moment: the state's
        `arrays` show it.
        """
        avals, structure = jax.tree.flatten(shapes)
        parameters, parameter_structure = jax.tree.flatten(params)
        parts: dict[int, StoredOrShape] = {}
        if rules and (in_shard_map() or current().layer is not None):
            # A part without a codec has the moment's dtype.
            pairs = enumerate(zip(arrays, avals, strict=False))
            parts = {
                i: x for i, (x, y) in pairs if getattr(x, "dtype", None) != y.dtype
            }
        codecs, small = [None] * len(avals), frozenset[int]()
        if rules:
            codecs, small = choose(rules, shapes, params, param_indices, parts)
        leaves, counts = list[StoredLeaf](), list[int]()
        for i, (x, owner) in enumerate(zip(avals, param_indices, strict=True)):
            shards, codec = None, codecs[i]
            # Moments of other shapes, such as factored ones, are undivided.
            if owner is not None and x.shape == parameters[owner].shape:
                shards = parameter_shards[owner]
            if codec is not None:
                # XLA:TPU slices no bytes in host memory: codes share words of 32 bits.
                # Words and scales are arranged to shard as the moment does.
                local = shards.local(x.shape) if shards else x.shape
                codec, base = arranged(codec, local, x.shape), codec
                if i in parts:
                    codec = _arranged_like(parts[i], base, x.shape) or codec
            leaves.append(StoredLeaf(shape_dtype(x), owner, shards, codec))
            if per_parameter_steps and parameters and not x.ndim:
                counts += [i] * counts_steps(x.dtype)
        divided = tuple(leaves), small, tuple(counts)
        return cls(structure, *divided, parameter_structure, tuple(parameter_shards))

    @property
    def param_indices(self) -> list[int | None]:
        """For each leaf the parameter that it belongs to, or None."""
        return [leaf.param_index for leaf in self.leaves]

    def small(self, min_paged_size: int) -> list[bool]:
        """Returns for each leaf whether it is no moment, or too small to page."""
        sizes, stored = [x.size for x in self.leaves], [x.stored for x in self.leaves]
        return too_small(sizes, stored, self.param_indices, min_paged_size)

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

    def take_apart(self, arrays: Sequence[PyTree]) -> list[StoredOrShape]:
        """Returns a state's leaves as they are stored, from any containers.

        A count of which each parameter has its own is a list. Raises `ValueError` if
        the state is of another layout.
        """
        stored = [
            x if leaf.codec is None else leaf.read(x)
            for leaf, x in zip(self.leaves, arrays, strict=True)
        ]
        for index in self.counts:
            counts, structure = jax.tree.flatten(stored[index])
            if structure != self.parameters:
                raise ValueError(
                    f"per_parameter_steps=True, and the state has {structure} where one"
                    " step count for each parameter is called for: make the state with"
                    " this transformation's own init."
                )
            stored[index] = counts
        return stored

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


def _arranged_like(
    part: StoredOrShape, codec: Codec, shape: tuple[int, ...]
) -> Codec | None:
    """Returns a codec as it stores an encoded part; None: in no known arrangement.

    The part is arranged as it would be alone, or as the whole moment is.
    """
    attributes = codec.block, codec.signed, codec.draws, getattr(codec, "seed", 0)
    axes = (-2, -1, None) if len(shape) > 1 else ()
    wholes = (Arranged(codec, x, y, *attributes) for x in axes for y in axes)
    like = lambda x: _layout_kinds(x.stored(shape)) == _layout_kinds(part)
    return next(filter(like, (arranged(codec, shape), *wholes)), None)


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
