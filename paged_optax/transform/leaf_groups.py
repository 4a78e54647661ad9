"""One update of all leaves: grouped, streamed, and put together again.

Leaves with equal programs form a group, whose pages `paged_optax.engine.stream` sends
through the device in one loop.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree, UInt32

from paged_optax.analysis.program import Analysis, Evaluation, LeafUpdate
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.types import (
    ArrayOrShape,
    explicit_mesh,
    varying,
    varying_axes,
    with_automatic_axes,
)
from paged_optax.codecs import Codec, draw
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import UNSHARDED, Shards, constrained
from paged_optax.engine.stream import PageProgram, stream
from paged_optax.transform.checks import refuse_derivatives, refuse_joined
from paged_optax.transform.context import current, without
from paged_optax.transform.gates import Gate, any_gate, choose_by
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import Static, StoredOrShape, Traceable, Value


@dataclasses.dataclass(frozen=True)
class Traced:
    """An update as a value: two updates that compute the same are equal.

    Attributes:
      analysis: Its programs.
      gating: Its gates and its restart, without those that only the device knows.
      layout: How the state is stored.
    """

    analysis: Analysis
    gating: Static
    layout: StateLayout


def stream_update(
    paged: PagedTransformation,
    buffers: list[StoredOrShape],
    params: optax.Params | None,
    extras: Sequence[Traceable],
    traced_gates: Sequence[Traceable],
    constants: Mapping[int, ArrayLike],
    *,
    traced: Traced,
) -> list[Array]:
    """Computes the updates and the new state's arrays.

    Args:
      paged: The transformation.
      buffers: The gradients, and the state's leaves as they are stored: what the
        results overwrite, in their order.
      params: The parameters, or None.
      extras: The arrays among the extra arguments.
      traced_gates: The gates that only the device knows.
      constants: What the programs close over, by number.
      traced: What the update computes.
    """
    layout, first = traced.layout, traced.layout.parameters.num_leaves
    trees = buffers, params, extras, traced_gates, constants
    if explicit_mesh(trees) is not None:
        # What is traced of a transformation knows no axes: on explicit ones, its
        # equations would make arrays of other types than those that they meet.
        updates = buffers[:first] if params is None else params
        like = jax.tree.leaves((updates, buffers[first:]))
        run = functools.partial(stream_update, paged, traced=traced)
        return with_automatic_axes(run, trees, like)
    if not current().fetched and (moved := paged.moved(layout, buffers[first:])):
        paged.tell(moved)
    arguments = [*buffers, *jax.tree.leaves((params, extras))]
    # A count that each parameter has is traced as one; see `Evaluation`.
    counts = {first + position: buffers[first + position] for position in layout.counts}
    arguments = [counts[i][0] if i in counts else x for i, x in enumerate(arguments)]
    if any(map(on_host, arguments)):
        # Some versions of XLA:GPU read other pages than they should, and say nothing.
        check_backend()
    gating = traced.gating.merge(traced_gates)
    gates = gating["gates"].each() if gating["gates"] else [True] * first
    # On a restart a moment starts again even if its parameter's update is skipped.
    moves = [any_gate([gate, gating["restart"]]) for gate in gates]
    moves_of = {None: any_gate(moves) if moves else True, **dict(enumerate(moves))}
    loops = _Loops(paged, traced, arguments, counts, gates, moves_of)
    evaluation = Evaluation(traced.analysis, arguments, constants, counts)
    of_leaves, groups = loops.grouped(evaluation)
    for leaf, members in groups:
        one, *_ = members.values()
        gate = loops.moves[leaf.owner]
        random_words = loops.random_words(leaf)
        geometry = paged.geometry(leaf, one.moving, one.shards, len(members))
        # No context changes what streams, so like leaves are traced once.
        with loops.scope(leaf, one), without():
            arrays = [x.arrays for x in members.values()]
            new = stream(
                tuple(
                    [refuse_derivatives(x) if one.on_host else tuple(x) for x in arrays]
                ),
                # A gate is the trip count of the loop around the pages.
                gate.astype(jnp.int32) if isinstance(gate, Array) else None,
                random_words,
                program=PageProgram(
                    leaf.program,
                    tuple(one.overwrites),
                    tuple(one.codecs),
                    tuple(one.shapes),
                ),
                geometry=geometry,
                shards=one.shards,
            )
        of_leaves.update(zip(members, new, strict=True))
    results = evaluation.results([of_leaves[i] for i in range(len(of_leaves))])
    return jax.tree.leaves(list(map(loops.result, range(len(results)), results)))


def divided_as(
    leaf: LeafUpdate, like: Sequence[ArrayOrShape], shards: Sequence[Shards | None]
) -> Shards | None:
    """How a leaf is divided: as its parameter, if it is updated value by value."""
    if leaf.owner is None or not leaf.program.elementwise:
        return None
    return shards[leaf.owner] if leaf.shape == like[leaf.owner].shape else None


def loop_key(
    analysis: Analysis,
    leaf: LeafUpdate,
    moments: Sequence[MomentFormat],
    divided: Shards | None,
    shared: Sequence[int],
    *,
    singly: bool,
) -> Hashable:
    """Grouping key: leaves with equal keys may share one loop, and its pages.

    Args:
      analysis: What the update computes.
      leaf: The leaf.
      moments: Its moments that travel or are coded.
      divided: How it is divided.
      shared: Numbers of its inputs that are not of its shape.
      singly: Whether no two parameters share a loop, as if each counts its own steps.
    """
    # A loop has one set of random words, and one of each scalar: leaves that round by
    # words, or that count their own steps, have each their own.
    drawn = any(x.codec is not None and x.codec.draws for x in moments)
    owner = leaf.owner if drawn or singly else None
    same = [analysis.same.get(number, number) for number in shared]
    return leaf.program, leaf.shape, tuple(moments), divided, owner, *same


@dataclasses.dataclass(frozen=True)
class _LeafArrays:
    """The inputs of a leaf's program, and further buffers for its results.

    Attributes:
      arrays: The arrays.
      overwrites: For each result the position of the array that it replaces.
      codecs: For each array the codec that stores it, or None.
      shapes: For each array the shape that the program sees of it.
      moving: How each array is kept that a codec or host memory holds.
      on_host: Whether any of the arrays is in host memory.
      shards: How the leaf is divided, or None.
    """

    arrays: list[Value]
    overwrites: list[int]
    codecs: list[Codec | None]
    shapes: list[tuple[int, ...]]
    moving: list[MomentFormat]
    on_host: bool
    shards: Shards | None


#: The results of leaves' programs, by the leaves' numbers.
_ByLeaf = dict[int, Sequence[Value]]

#: Leaves that share a loop: the first of them, and the arrays of each by its number.
_Group = tuple[LeafUpdate, dict[int, _LeafArrays]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Loops:
    """The leaves of one update, to be streamed in loops.

    Attributes:
      paged: The paged transformation.
      traced: What the update computes.
      arguments: All arguments of the programs: gradients, the state's leaves as they
        are stored, parameters, extra arguments. Gradients and leaves are in the order
        of the results that take their places.
      counts: Counts of which each parameter has one: by the number of the argument, a
        list of one count for each parameter.
      gates: For each parameter whether its update is taken.
      moves: For each parameter whether its moments change; under None whether any
        parameter's do, for what belongs to all of them.
    """

    paged: PagedTransformation
    traced: Traced
    arguments: list[Value]
    counts: dict[int, list[ArrayLike]]
    gates: Sequence[Gate]
    moves: Mapping[int | None, Gate]

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """The codecs of arguments, by the arguments' numbers."""
        codecs = enumerate(self.traced.layout.codecs, len(self.gates))
        return {number: codec for number, codec in codecs if codec}

    def grouped(self, evaluation: Evaluation) -> tuple[_ByLeaf, list[_Group]]:
        """Skips or computes leaves on the device, and groups those that stream."""
        first, analysis = len(self.gates), self.traced.analysis
        # Of a layer that was fetched, each leaf is cut out of its stack by itself.
        singly = bool(self.counts) or current().fetched
        results: _ByLeaf = {}
        groups: dict[Hashable, _Group] = {}
        for number, leaf in enumerate(analysis.leaf_updates):
            inputs, gate = evaluation.inputs(leaf), self.moves[leaf.owner]
            if leaf.owner is None and len({id(gate) for gate in self.gates}) > 1:
                refuse_joined(leaf)
            olds = [None if p is None else self.arguments[p] for p in leaf.places]
            if gate is False:
                # A gate that is closed when traced costs nothing: no loop is there.
                results[number] = [
                    jnp.zeros(new.shape, new.dtype) if p is None or p < first else x
                    for p, x, new in zip(leaf.places, olds, leaf.avals, strict=True)
                ]
                continue
            arrays = self._arrays(leaf, inputs, olds)
            if not arrays.moving:
                pairs = zip(leaf.places, olds, leaf.program(inputs), strict=True)
                results[number] = [
                    new
                    if p is None or p < first or p in self.counts or new is old
                    else self._gated(p, new)
                    for p, old, new in pairs
                ]
                continue
            # What is only overwritten follows the inputs, and has no number.
            triples = zip(leaf.inputs, arrays.codecs, arrays.arrays, strict=False)
            shared = [
                argument
                for argument, codec, x in triples
                if codec is None and jnp.shape(x) != leaf.shape
            ]
            moving, shards = arrays.moving, arrays.shards
            # One loop has one gate, and its buffers keep their types from page to page.
            # Identical leaves must not be compiled one by one: one of eight-bit moments
            # takes XLA 0.9 CPU-seconds.
            key = (
                loop_key(analysis, leaf, moving, shards, shared, singly=singly),
                id(gate),
                *map(jax.typeof, jax.tree.leaves(arrays.arrays)),
                *arrays.overwrites,
                *arrays.codecs,
            )
            _, members = groups.setdefault(key, (leaf, {}))
            members[number] = arrays
        return results, list(groups.values())

    def _arrays(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> _LeafArrays:
        first, layout = len(self.gates), self.traced.layout
        arrays, overwrites = list(inputs), list[int]()
        codecs = [self.codecs.get(number) for number in leaf.inputs]
        shapes = [
            layout.avals[number - first].shape if codec else jnp.shape(x)
            for number, codec, x in zip(leaf.inputs, codecs, inputs, strict=True)
        ]
        for p, old, new in zip(leaf.places, olds, leaf.avals, strict=True):
            # Updates overwrite the gradient's buffer, and moments their own, so that
            # an update allocates pages and nothing else.
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
            overwrites.append(len(arrays))
            arrays.append(old)
            codecs.append(codec)
            shapes.append(new.shape)
        moving = [
            MomentFormat(4 if codec else x.dtype.itemsize, codec, on_host(x))
            for x, codec in zip(arrays, codecs, strict=True)
            if codec is not None or on_host(x)
        ]
        gradients = self.arguments[:first]
        shards = divided_as(leaf, gradients, layout.parameter_shards)
        hosted = any(x.on_host for x in moving)
        return _LeafArrays(arrays, overwrites, codecs, shapes, moving, hosted, shards)

    def scope(
        self, leaf: LeafUpdate, arrays: _LeafArrays
    ) -> contextlib.AbstractContextManager[object]:
        """Around the loop of a leaf: names it if it is divided in a way not known."""
        if arrays.shards is not None or not leaf.program.elementwise:
            return contextlib.nullcontext()
        if leaf.owner is not None and arrays.on_host:
            path = self.traced.layout.parameter_paths[leaf.owner]
            self.paged.known.warn_of_unknown(path, self.arguments[leaf.owner])
        return jax.named_scope(UNSHARDED)

    def random_words(
        self, leaf: LeafUpdate
    ) -> tuple[UInt32[Array, "2"] | None, ...] | None:
        """Draws the random words by which results are rounded, anew at each step."""
        codecs = {p: self.codecs[p] for p in leaf.outputs if p in self.codecs}
        if not any(codec.draws for codec in codecs.values()):
            return None
        # The state's first leaf is the count of `precision.counted`.
        step, layer = self.arguments[len(self.gates)], current().layer

        def words(position: int, codec: Codec) -> UInt32[Array, "2"]:
            key = jax.random.key(getattr(codec, "seed", 0))
            if layer is not None:
                key = jax.random.fold_in(key, layer)
            for axis in sorted(varying_axes(self.arguments[position])):
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            return draw(jax.random.fold_in(key, position), step).words

        drawn = {p: words(p, codec) for p, codec in codecs.items() if codec.draws}
        return (*map(drawn.get, leaf.outputs), *[None] * len(leaf.between))

    def result(self, position: int, new: Value) -> PyTree:
        """An update, or a leaf of the new state, as its gate says."""
        if position < len(self.gates):
            return choose_by(self.gates[position], new, None)
        if position in self.counts:
            # One value: shared by all, or that of a single parameter's leaf.
            each = new if isinstance(new, list) else [new] * len(self.gates)
            moves = [self.moves[owner] for owner in range(len(self.gates))]
            return list(map(choose_by, moves, each, self.counts[position]))
        if position in self._of_leaves or new is self.arguments[position]:
            return new
        return self._gated(position, new)

    @functools.cached_property
    def _of_leaves(self) -> set[int]:
        """The positions of results that a leaf's program makes."""
        return {p for leaf in self.traced.analysis.leaf_updates for p in leaf.outputs}

    def _gated(self, position: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, and keeps the old's place."""
        old = self.arguments[position]
        gate = self.moves[self.traced.analysis.owners[position]]
        shards = self.traced.layout.shards[position - len(self.gates)]
        # XLA would replicate what it can compute anywhere, such as a constant.
        new = constrained(jnp.asarray(choose_by(gate, new, old)), shards)
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new
