"""One update of all leaves: grouped, streamed, and put together to trees again."""

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt32

from paged_optax.analysis.program import Analysis, Evaluation, LeafUpdate
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.types import PyTreeDef, varying, varying_axes
from paged_optax.backend.variables import unflatten_like
from paged_optax.codecs import Codec, draw
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.pages import Storage
from paged_optax.engine.shards import UNSHARDED, Shards, constrained
from paged_optax.engine.stream import stream
from paged_optax.transform.active_parameters import Gate, any_gate, choose_by
from paged_optax.transform.checks import refuse_derivatives, refuse_joined
from paged_optax.transform.context import current, without
from paged_optax.transform.paged_transformation import (
    PagedTransformation,
    divided_as,
    loop_key,
)
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import (
    Static,
    StoredOrShape,
    Traceable,
    Value,
    paths_of,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """An update as a value: two updates that compute the same are equal.

    Attributes:
      analysis: Its programs.
      structure: The structure of what it returns.
      gating: Its gates and its restart, without those that only the device knows.
      layout: How the state is stored.
      shards: For each parameter how it is divided, or None.
    """

    analysis: Analysis
    structure: PyTreeDef
    gating: Static
    layout: StateLayout
    shards: tuple[Shards | None, ...]


def stream_update(
    paged: PagedTransformation,
    traced: Traced,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extras: Sequence[Traceable],
    open_gates: Sequence[Traceable],
    constants: Mapping[int, ArrayLike],
) -> tuple[optax.Updates, optax.OptState]:
    """Computes the updates and the new state on a mesh of automatic axes.

    Args:
      paged: The transformation.
      traced: What the update computes.
      updates: The gradients.
      state: The state.
      params: The parameters, or None.
      extras: The arrays among the extra arguments.
      open_gates: The gates that only the device knows.
      constants: What the programs close over, by number.
    """
    layout, gradients = traced.layout, jax.tree.leaves(updates)
    first = len(gradients)
    leaves, counts = layout.take_apart(state)
    if not current().fetched and (moved := paged.moved(layout, leaves)):
        paged.tell(moved)
    arguments = [*gradients, *leaves, *jax.tree.leaves((params, extras))]
    if any(map(on_host, arguments)):
        check_backend()
    gating = traced.gating.merge(open_gates)
    gates = gating["gates"].each() if gating["gates"] else [True] * first
    # On a restart a moment starts again even if its parameter's update is skipped.
    moves = [any_gate([gate, gating["restart"]]) for gate in gates]
    counts = {first + position: each for position, each in counts.items()}
    any_moves = any_gate(moves) if moves else True
    streaming = _Streaming(paged, traced, arguments, counts, gates, moves, any_moves)
    evaluation = Evaluation(traced.analysis, arguments, constants, counts)
    of_leaves, groups = streaming.grouped(evaluation)
    for leaf, members in groups:
        new = streaming.streamed(leaf, list(members.values()))
        of_leaves.update(zip(members, new, strict=True))
    results = evaluation.results([of_leaves[i] for i in range(len(of_leaves))])
    results = [streaming.result(position, new) for position, new in enumerate(results)]
    new_updates, new_state = jax.tree.unflatten(traced.structure, results)
    # In containers that name the codecs.
    return new_updates, unflatten_like(state, new_state)


@dataclasses.dataclass(frozen=True, eq=False)
class _LeafArrays:
    """The inputs of a leaf's program, and further buffers for its results.

    Attributes:
      arrays: The arrays.
      overwrites: For each result the position of the array that it replaces.
      codecs: For each array the codec that stores it, or None.
      shapes: For each array the shape that the program sees of it.
    """

    arrays: list[Value]
    overwrites: list[int]
    codecs: list[Codec | None]
    shapes: list[tuple[int, ...]]

    @functools.cached_property
    def moving(self) -> list[Storage]:
        """How each array is kept that a codec or host memory holds."""
        return [
            Storage(4 if codec else x.dtype.itemsize, codec, on_host(x))
            for x, codec in zip(self.arrays, self.codecs, strict=True)
            if codec is not None or on_host(x)
        ]


#: The results of leaves' programs, by the leaves' numbers.
_ByLeaf = dict[int, Sequence[Value]]

#: Leaves that share a loop: the first of them, and the arrays of each by its number.
_Group = tuple[LeafUpdate, dict[int, _LeafArrays]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Streaming:
    """One update of all leaves.

    Attributes:
      paged: The paged transformation.
      traced: What the update computes.
      arguments: All arguments of the programs: gradients, the state's leaves as they
        are stored, parameters, extra arguments. Gradients and leaves are in the order
        of the results that take their places.
      counts: Counts of which each parameter has one: by the number of the argument, a
        list of one count for each parameter.
      gates: For each parameter whether its update is taken.
      moves: For each parameter whether its moments change.
      any_moves: Whether any parameter's moments change.
    """

    paged: PagedTransformation
    traced: Traced
    arguments: list[Value]
    counts: dict[int, list[ArrayLike]]
    gates: Sequence[Gate]
    moves: Sequence[Gate]
    any_moves: Gate

    @functools.cached_property
    def first(self) -> int:
        """The number of the state's first leaf, among arguments and results."""
        return len(self.gates)

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """The codecs of arguments, by the arguments' numbers."""
        return {i: x for i, x in enumerate(self.traced.layout.codecs, self.first) if x}

    @functools.cached_property
    def of_leaves(self) -> set[int]:
        """The positions of results that a leaf's program makes."""
        return {p for leaf in self.traced.analysis.leaves for p in leaf.outputs}

    def gate_of(self, owner: int | None) -> Gate:
        """The gate of what belongs to a parameter, or to all of them: None."""
        return self.any_moves if owner is None else self.moves[owner]

    def divided(self, leaf: LeafUpdate) -> Shards | None:
        """How a leaf is divided."""
        return divided_as(leaf, self.arguments[: self.first], self.traced.shards)

    def grouped(self, evaluation: Evaluation) -> tuple[_ByLeaf, list[_Group]]:
        """Skips or computes leaves on the device, and groups those that stream."""
        results: _ByLeaf = {}
        groups: dict[Hashable, _Group] = {}
        for number, leaf in enumerate(self.traced.analysis.leaves):
            inputs, gate = evaluation.inputs(leaf), self.gate_of(leaf.owner)
            if leaf.owner is None and len({id(gate) for gate in self.gates}) > 1:
                refuse_joined(leaf)
            olds = [None if p is None else self.arguments[p] for p in leaf.places]
            if gate is False:
                # A gate that is closed when traced costs nothing: no loop is there.
                results[number] = [
                    jnp.zeros(new.shape, new.dtype)
                    if p is None or p < self.first
                    else x
                    for p, x, new in zip(leaf.places, olds, leaf.avals, strict=True)
                ]
                continue
            buffers = self._buffers(leaf, inputs, olds)
            if buffers.moving:
                _, members = groups.setdefault(self._key(leaf, buffers), (leaf, {}))
                members[number] = buffers
            else:
                results[number] = self._resident(leaf, inputs, olds)
        return results, list(groups.values())

    def _resident(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> Sequence[Value]:
        """Updates a device-resident leaf that no codec stores."""
        return [
            new
            if p is None or p < self.first or p in self.counts or new is old
            else self._kept(p, new)
            for p, old, new in zip(leaf.places, olds, leaf.program(inputs), strict=True)
        ]

    def _key(self, leaf: LeafUpdate, buffers: _LeafArrays) -> Hashable:
        shared = [
            number
            for number, codec, x in zip(
                leaf.inputs, buffers.codecs, buffers.arrays, strict=False
            )
            if codec is None and jnp.shape(x) != leaf.shape
        ]
        # Of a layer that was fetched, each leaf is cut out of its stack by itself.
        singly = bool(self.counts) or current().fetched
        key = loop_key(
            self.traced.analysis,
            leaf,
            buffers.moving,
            self.divided(leaf),
            shared,
            singly=singly,
        )
        types = [jax.typeof(x) for x in jax.tree.leaves(buffers.arrays)]
        gate = id(self.gate_of(leaf.owner))
        return key, gate, *types, *buffers.overwrites, *buffers.codecs

    def _buffers(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> _LeafArrays:
        buffers, overwrites = list(inputs), list[int]()
        codecs = [self.codecs.get(number) for number in leaf.inputs]
        avals = self.traced.layout.avals
        shapes = [
            avals[number - self.first].shape if codec else jnp.shape(x)
            for number, codec, x in zip(leaf.inputs, codecs, inputs, strict=True)
        ]
        for p, old, new in zip(leaf.places, olds, leaf.avals, strict=True):
            codec = None if p is None else self.codecs.get(p)
            if codec is None and (
                old is None or (old.shape, old.dtype) != (new.shape, new.dtype)
            ):
                # An update of another dtype than its gradient cannot take its buffer.
                old = varying(jnp.zeros(new.shape, new.dtype), varying_axes(new))
            elif p in leaf.inputs:
                # By its number: one array may be passed for several moments.
                overwrites.append(leaf.inputs.index(p))
                continue
            overwrites.append(len(buffers))
            buffers.append(old)
            codecs.append(codec)
            shapes.append(new.shape)
        return _LeafArrays(buffers, overwrites, codecs, shapes)

    def streamed(
        self, leaf: LeafUpdate, members: Sequence[_LeafArrays]
    ) -> Sequence[Sequence[StoredOrShape]]:
        """Streams the pages of leaves that share a loop through the device."""
        divided, (one, *_) = self.divided(leaf), members
        gate, geometry = (
            self.gate_of(leaf.owner),
            self.paged.geometry(leaf, one.moving, divided, len(members)),
        )
        away, noise = any(map(on_host, one.arrays)), self._noise(leaf)
        undivided = divided is None and leaf.program.elementwise
        named = jax.named_scope(UNSHARDED) if undivided else contextlib.nullcontext()
        if undivided and away and leaf.owner is not None:
            gradients = self.arguments[: self.first]
            tree = jax.tree.unflatten(self.traced.layout.parameters, gradients)
            paths, gradients = paths_of(tree)
            self.paged.known.tell_of_unknown(paths[leaf.owner], gradients[leaf.owner])
        # No context changes what streams, so like leaves are traced once.
        with named, without():
            arrays = [x.arrays for x in members]
            return stream(
                tuple(refuse_derivatives(x) if away else tuple(x) for x in arrays),
                gate.astype(jnp.int32) if isinstance(gate, Array) else None,
                noise,
                program=leaf.program,
                overwrites=tuple(one.overwrites),
                geometry=geometry,
                codecs=tuple(one.codecs),
                shapes=tuple(one.shapes),
                shards=divided,
            )

    def _noise(self, leaf: LeafUpdate) -> tuple[UInt32[Array, "2"] | None, ...] | None:
        """Draws the random words by which results are rounded, anew at each step."""
        codecs = {p: self.codecs[p] for p in leaf.outputs if p in self.codecs}
        if not any(codec.draws for codec in codecs.values()):
            return None
        # The state's first leaf is the count of `precision.counted`.
        step, layer = self.arguments[self.first], current().layer

        def words(position: int, codec: Codec) -> UInt32[Array, "2"]:
            key = jax.random.key(getattr(codec, "seed", 0))
            if layer is not None:
                key = jax.random.fold_in(key, layer)
            for axis in sorted(varying_axes(self.arguments[position])):
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            return draw(jax.random.fold_in(key, position), step).words

        drawn = {p: words(p, codec) for p, codec in codecs.items() if codec.draws}
        return (*map(drawn.get, leaf.outputs), *[None] * len(leaf.between))

    def result(self, position: int, new: Value) -> Value:
        """An update, or a leaf of the new state, as its gate says."""
        if position < self.first:
            return choose_by(self.gates[position], new, None)
        if position in self.counts:
            # One value: shared by all, or that of a single parameter's leaf.
            each = new if isinstance(new, list) else [new] * len(self.gates)
            chosen = map(choose_by, self.moves, each, self.counts[position])
            return jax.tree.unflatten(self.traced.layout.parameters, chosen)
        if position in self.of_leaves or new is self.arguments[position]:
            return new
        return self._kept(position, new)

    def _kept(self, position: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, and keeps the old's place."""
        old = self.arguments[position]
        gate = self.gate_of(self.traced.analysis.owners[position])
        shards = self.traced.layout.shards[position - self.first]
        # XLA would replicate what it can compute anywhere, such as a constant.
        new = constrained(jnp.asarray(choose_by(gate, new, old)), shards)
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new
