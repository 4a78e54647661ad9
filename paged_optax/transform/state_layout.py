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
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
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
from paged_optax.codecs import (
    Codec,
    Quantized,
    arranged,
    codes_field,
    fields_of,
    of_one_part,
    quantized_as,
)
from paged_optax.engine.shards import Shards
from paged_optax.transform.trees import Parameter, StoredOrShape, paths_of


class OtherLayoutError(ValueError):
    """A moment of the state has another codec, or other shards."""


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """A state's structure, and the storage of its leaves.

    Attributes:
      structure: The structure of the transformation's own state.
      avals: For each leaf its shape and dtype, decoded.
      codecs: For each leaf its codec, or None.
      counts: The positions of step counts of which each parameter has its own.
      parameters: The structure of the parameters.
      owners: For each leaf the parameter that it belongs to, or None.
      shards: For each leaf its division over a mesh, or None.
      parameter_shards: For each parameter its division, or None.
    """

    structure: PyTreeDef
    avals: tuple[jax.ShapeDtypeStruct, ...]
    codecs: tuple[Codec | None, ...]
    counts: tuple[int, ...]
    parameters: PyTreeDef
    owners: tuple[int | None, ...]
    shards: tuple[Shards | None, ...]
    parameter_shards: tuple[Shards | None, ...]

    @classmethod
    def of(
        cls,
        shapes: PyTree[ArrayOrShape],
        codecs: Sequence[Codec | None],
        params: PyTree,
        owners: Sequence[int | None],
        parameter_shards: Sequence[Shards | None],
        *,
        per_parameter_steps: bool,
    ) -> "StateLayout":
        """Returns the layout of a state, given the transformation's own.

        Args:
          shapes: The transformation's own state.
          codecs: For each of its leaves the codec, or None.
          params: The parameters.
          owners: For each of its leaves the parameter that it belongs to, or None.
          parameter_shards: For each parameter its division, or None.
          per_parameter_steps: True if each parameter has its own step counts.
        """
        avals, structure = jax.tree.flatten(shapes)
        parameters = jax.tree.structure(params)
        counts = [
            position
            for position, x in enumerate(avals)
            if per_parameter_steps
            and parameters.num_leaves
            and x.ndim == 0
            and counts_steps(x.dtype)
        ]
        leaves = jax.tree.leaves(params)
        # Moments of other shapes than their parameters, such as factored ones, are
        # undivided.
        shards = [
            None if i is None or x.shape != leaves[i].shape else parameter_shards[i]
            for i, x in zip(owners, avals, strict=True)
        ]
        # XLA:TPU slices no bytes in host memory: codes share words of 32 bits. Words
        # and scales are arranged to shard as the moment does.
        codecs = [
            codec and arranged(codec, part.local(x.shape) if part else x.shape, x.shape)
            for codec, x, part in zip(codecs, avals, shards, strict=True)
        ]
        return cls(
            structure,
            tuple(map(shape_dtype, avals)),
            tuple(codecs),
            tuple(counts),
            parameters,
            tuple(owners),
            tuple(shards),
            tuple(parameter_shards),
        )

    def stored(self, position: int) -> StoredOrShape:
        """Returns the shapes and dtypes of a leaf as it is stored."""
        codec, aval = self.codecs[position], self.avals[position]
        if codec is None:
            return aval
        shards = self.shards[position]
        return shards.stored(codec, aval.shape) if shards else codec.stored(aval.shape)

    def types(self, position: int, parameter: Parameter | None) -> StoredOrShape | None:
        """Returns arrays or types with a stored leaf's shardings; None: replicated."""
        codec, aval = self.codecs[position], self.avals[position]
        shards = self.shards[position]
        if codec is None:
            alike = parameter is not None and parameter.shape == aval.shape
            return parameter if alike else None
        stored = self.stored(position)
        if shards is None:
            return jax.tree.map(lambda _: None, stored)
        return shards.typed(codec, stored, shards.local(aval.shape))

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """Stored bytes of each leaf on a device; None if it is no moment."""
        return [
            nbytes(self.stored(position)) // (math.prod(part.divisions) if part else 1)
            if x.ndim and holds_moments(x.dtype) and nbytes(x)
            else None
            for position, (x, part) in enumerate(
                zip(self.avals, self.shards, strict=True)
            )
        ]

    def small(self, min_paged_size: int) -> list[bool]:
        """Returns for each leaf whether it is no moment, or too small to page."""
        stored = [self.stored(position) for position in range(len(self.avals))]
        return too_small(self.sizes, stored, self.owners, min_paged_size)

    def build(self, leaves: Sequence[StoredOrShape]) -> PyTree:
        """Builds a new state of stored leaves, with copies of each count.

        A coded moment gets a container that names its codec.
        """
        leaves = list(leaves)
        for position, x in enumerate(leaves):
            if isinstance(x, Quantized):
                leaves[position] = quantized_as(self._codes_field(position), *x)
        for position in self.counts:
            count = leaves[position]
            copies = [_copy(count) for _ in range(self.parameters.num_leaves)]
            leaves[position] = jax.tree.unflatten(self.parameters, copies)
        return jax.tree.unflatten(self.structure, leaves)

    def take_apart(self, state: PyTree) -> list[StoredOrShape]:
        """Returns a state's leaves as they are stored.

        A count of which each parameter has its own is a list.

        Raises:
          ValueError: If the state is of another layout.
        """
        leaves = self.structure.flatten_up_to(state)
        for position, codec in enumerate(self.codecs):
            if codec is not None:
                leaves[position] = self._read(leaves[position], position)
        for position in self.counts:
            counts = leaves[position]
            if jax.tree.structure(counts) != self.parameters:
                raise ValueError(
                    "per_parameter_steps=True, and the state has"
                    f" {jax.tree.structure(counts)} where one step count for each"
                    " parameter is called for: make the state with this"
                    " transformation's own init."
                )
            leaves[position] = jax.tree.leaves(counts)
        return leaves

    def _codes_field(self, position: int) -> str:
        codec, shape = self.codecs[position], self.avals[position].shape
        shards = self.shards[position]
        assert codec is not None
        if shards is None:
            return codes_field(codec, shape)
        return codes_field(codec, shards.local(shape), shards.divisions)

    def _read(self, stored: PyTree, position: int) -> StoredOrShape:
        """Returns a coded moment, from any container that a restore made.

        Before containers named the codec, the field was called `codes`.
        """
        expected = self.stored(position)
        describe = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        if isinstance(expected, Quantized) and (names := fields_of(stored)):
            field, name = self._codes_field(position), names[0]
            if in_shard_map():
                name = of_one_part(name)
            if name not in (field, "codes"):
                raise OtherLayoutError(
                    f"the state has a field {names[0]!r}, where codec"
                    f" {self.codecs[position]!r} stores a moment of shape"
                    f" {self.avals[position].shape} in {field!r}: pass the codec and"
                    " the parameters that the state was made with, divided as they"
                    " were, or make the state with this transformation's own init."
                )
        if describe(stored) != describe(expected):
            raise OtherLayoutError(
                f"the state holds {jax.tree.map(jax.typeof, stored)} where codec"
                f" {self.codecs[position]!r} stores {expected}: pass the codec that the"
                " state was made with, or make the state with this transformation's own"
                " init, for parameters divided as these are."
            )
        structure = jax.tree.structure(expected)
        return jax.tree.unflatten(structure, jax.tree.leaves(stored))

    def seen(self, leaves: Sequence[StoredOrShape]) -> PyTree[ArrayOrShape]:
        """Returns the transformation's own state, with shapes for coded leaves."""
        seen = list(leaves)
        for position, codec in enumerate(self.codecs):
            if codec is not None:
                seen[position] = shape_dtype(self.avals[position], seen[position])
        for position in self.counts:
            seen[position] = seen[position][0]
        return jax.tree.unflatten(self.structure, seen)

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the transformation's own state."""
        return jax.tree.unflatten(self.structure, self.avals)

    @functools.cached_property
    def parameter_paths(self) -> list[KeyPath]:
        """The paths of the parameters."""
        numbers = range(self.parameters.num_leaves)
        return paths_of(jax.tree.unflatten(self.parameters, numbers))[0]


def _copy(count: Array) -> Array:
    return count if is_traced(count) else jnp.array(count, copy=True)


# A moment of less than this part of `min_paged_size` counts alone: its transfer remains
# separate, and costs its latency.
_LEAST_PART = 8


def too_small(
    sizes: Sequence[int | None],
    stored: Sequence[PyTree[ArrayOrShape]],
    owners: Sequence[Hashable],
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
    for arrays, owner in zip(stored, owners, strict=True):
        like = *((x.shape, x.dtype) for x in jax.tree.leaves(arrays)), before[owner]
        before[owner] += 1
        kinds.append(like)
    total = collections.Counter[Hashable]()
    for size, kind in zip(sizes, kinds, strict=True):
        total[kind] += size or 0
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
    stays: Sequence[bool],
) -> list[bool]:
    """Chooses the state leaves that stay on the device.

    A step reads every page once, in one order, so the best choice (Belady's) is a fixed
    set: small leaves, step counts and keys always, then the moments of parameters in
    order until the budget is spent.

    Args:
      sizes: For each leaf of the state its bytes; None if it is never paged.
      owners: For each leaf the parameter that it belongs to, or its stack; or None.
      budget: Bytes of moments that may stay; None: all.
      stays: For each leaf whether it always stays, outside of the budget.

    Returns:
      For each state leaf whether it stays.
    """
    if budget is None:
        return [True] * len(sizes)
    stays = list(stays)
    # Moments of a parameter stay or go as one.
    groups: dict[Hashable, list[int]] = {}
    for leaf, owner in enumerate(owners):
        if not stays[leaf]:
            key = ("leaf", leaf) if owner is None else owner
            groups.setdefault(key, []).append(leaf)
    for group in groups.values():
        size = sum(sizes[leaf] or 0 for leaf in group)
        if size <= budget:
            budget -= size
            for leaf in group:
                stays[leaf] = True
    return stays
