"""Groups of leaves that share one loop.

Leaves with equal programs form a group, whose pages `paged_optax.engine.stream` updates
in one loop.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree, UInt32

from paged_optax.analysis.program import Analysis, Evaluation, LeafUpdate
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.types import ArrayOrShape, varying, varying_axes
from paged_optax.codecs import Codec, draw
from paged_optax.engine.loop import LeafProgram
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import Shards, constrained
from paged_optax.transform.checks import check_not_merged
from paged_optax.transform.context import current
from paged_optax.transform.gates import Gate, choose_by
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import Value


def divided_as(
    leaf: LeafUpdate, like: Sequence[ArrayOrShape], shards: Sequence[Shards | None]
) -> Shards | None:
    """Returns the shards of an element-wise leaf's parameter, or None."""
    if leaf.param_index is None or not leaf.program.elementwise:
        return None
    return (
        shards[leaf.param_index] if leaf.shape == like[leaf.param_index].shape else None
    )


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
      analysis: The update.
      leaf: The leaf.
      moments: Its moments that travel or are coded.
      divided: Its shards, or None.
      shared: Numbers of its inputs of other shapes.
      singly: True if no two parameters share a loop, as with step counts of their own.
    """
    # A loop has one set of random words, and one of each scalar: leaves with stochastic
    # rounding, or with step counts of their own, have a loop each.
    drawn = any(x.codec is not None and x.codec.draws for x in moments)
    param_index = leaf.param_index if drawn or singly else None
    same = [analysis.same.get(index, index) for index in shared]
    return leaf.program, leaf.shape, tuple(moments), divided, param_index, *same


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """The arrays of a leaf, and their loop's program.

    Attributes:
      arrays: The inputs of its program, and further buffers for its results.
      program: The program, and the storage of the arrays.
      moments: Formats of the arrays that are coded or in host memory.
      shards: Its division over a mesh, or None.
    """

    arrays: list[Value]
    program: LeafProgram
    moments: list[MomentFormat]
    shards: Shards | None

    @property
    def on_host(self) -> bool:
        """True if any of the arrays is in host memory."""
        return any(x.on_host for x in self.moments)


#: The results of leaves' programs, by the leaves' numbers.
_ByLeaf = dict[int, Sequence[Value]]

#: Leaves that share a loop: the first leaf, and the arrays of each by its number.
_Group = tuple[LeafUpdate, dict[int, StreamedLeaf]]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStreams:
    """The leaves of one update, to be streamed in groups.

    Attributes:
      paged: The paged transformation.
      analysis: The update.
      layout: The state's layout.
      arguments: All arguments of the programs: gradients, the state's leaves as they
        are stored, parameters, extra arguments. Gradients and leaves are in the order
        of the results that replace them.
      counts: Step counts of each parameter, by the number of the argument.
      gates: For each parameter whether its update is taken.
      moves: For each parameter whether its moments change; under None whether any
        parameter's do.
    """

    paged: PagedTransformation
    analysis: Analysis
    layout: StateLayout
    arguments: list[Value]
    counts: dict[int, list[ArrayLike]]
    gates: Sequence[Gate]
    moves: Mapping[int | None, Gate]

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """The codecs of arguments, by the arguments' numbers."""
        leaves = enumerate(self.layout.leaves, len(self.gates))
        return {index: leaf.codec for index, leaf in leaves if leaf.codec}

    def grouped(self, evaluation: Evaluation) -> tuple[_ByLeaf, list[_Group]]:
        """Skips or computes leaves on the device, and groups the others."""
        first = len(self.gates)
        # A fetched layer's leaves are sliced from their stacks separately.
        singly = bool(self.counts) or current().fetched
        results: _ByLeaf = {}
        groups: dict[Hashable, _Group] = {}
        for index, leaf in enumerate(self.analysis.leaf_updates):
            inputs, gate = evaluation.inputs(leaf), self.moves[leaf.param_index]
            if leaf.param_index is None and len({id(gate) for gate in self.gates}) > 1:
                check_not_merged(leaf)
            olds = [None if p is None else self.arguments[p] for p in leaf.places]
            if gate is False:
                # A gate that is closed when traced costs nothing: it has no loop.
                results[index] = [
                    jnp.zeros(new.shape, new.dtype) if p is None or p < first else x
                    for p, x, new in zip(leaf.places, olds, leaf.avals, strict=True)
                ]
                continue
            streamed = self._streamed(leaf, inputs, olds)
            if not streamed.moments:
                pairs = zip(leaf.places, olds, leaf.program(inputs), strict=True)
                results[index] = [
                    new
                    if p is None or p < first or p in self.counts or new is old
                    else self._gated(p, new)
                    for p, old, new in pairs
                ]
                continue
            # Buffers that are only overwritten follow the inputs, and have no number.
            program, arrays = streamed.program, streamed.arrays
            triples = zip(leaf.inputs, program.codecs, arrays, strict=False)
            shared = [
                argument
                for argument, codec, x in triples
                if codec is None and jnp.shape(x) != leaf.shape
            ]
            moments, shards = streamed.moments, streamed.shards
            # A loop has one gate, and its buffers keep their types from page to page.
            # Equal leaves must not be compiled one by one: a leaf of eight-bit moments
            # takes XLA 0.9 CPU-seconds.
            key = (
                loop_key(self.analysis, leaf, moments, shards, shared, singly=singly),
                id(gate),
                *map(jax.typeof, jax.tree.leaves(arrays)),
                *program.overwrites,
                *program.codecs,
            )
            _, members = groups.setdefault(key, (leaf, {}))
            members[index] = streamed
        return results, list(groups.values())

    def _streamed(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> StreamedLeaf:
        first, layout = len(self.gates), self.layout
        arrays, overwrites = list(inputs), list[int]()
        codecs = [self.codecs.get(index) for index in leaf.inputs]
        shapes = [
            layout.leaves[index - first].aval.shape if codec else jnp.shape(x)
            for index, codec, x in zip(leaf.inputs, codecs, inputs, strict=True)
        ]
        for p, old, new in zip(leaf.places, olds, leaf.avals, strict=True):
            # Updates overwrite the gradient's buffer, and moments their own, so that
            # an update allocates pages and nothing else.
            codec = None if p is None else self.codecs.get(p)
            if codec is None and (
                old is None or (old.shape, old.dtype) != (new.shape, new.dtype)
            ):
                # An update of another dtype than its gradient cannot reuse its buffer.
                old = varying(jnp.zeros(new.shape, new.dtype), varying_axes(new))
            elif p in leaf.inputs:
                # By its number: one array may be passed for several moments.
                overwrites.append(leaf.inputs.index(p))
                continue
            overwrites.append(len(arrays))
            arrays.append(old)
            codecs.append(codec)
            shapes.append(new.shape)
        moments = [
            MomentFormat(4 if codec else x.dtype.itemsize, codec, on_host(x))
            for x, codec in zip(arrays, codecs, strict=True)
            if codec is not None or on_host(x)
        ]
        shards = divided_as(leaf, self.arguments[:first], layout.parameter_shards)
        storage = tuple(overwrites), tuple(codecs), tuple(shapes)
        program = LeafProgram(leaf.program, *storage)
        return StreamedLeaf(arrays, program, moments, shards)

    def random_bits(
        self, leaf: LeafUpdate
    ) -> tuple[UInt32[Array, "2"] | None, ...] | None:
        """Draws the random words of stochastic rounding, new ones at each step."""
        codecs = {p: self.codecs[p] for p in leaf.outputs if p in self.codecs}
        if not any(codec.draws for codec in codecs.values()):
            return None
        # The state's first leaf is the count of `precision.counted`.
        step, layer = self.arguments[len(self.gates)], current().layer

        def words(index: int, codec: Codec) -> UInt32[Array, "2"]:
            key = jax.random.key(getattr(codec, "seed", 0))
            if layer is not None:
                key = jax.random.fold_in(key, layer)
            for axis in sorted(varying_axes(self.arguments[index])):
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            return draw(jax.random.fold_in(key, index), step).words

        drawn = {p: words(p, codec) for p, codec in codecs.items() if codec.draws}
        return (*map(drawn.get, leaf.outputs), *[None] * len(leaf.between))

    def result(self, index: int, new: Value) -> PyTree:
        """Returns an update, or a leaf of the new state, by its gate."""
        if index < len(self.gates):
            return choose_by(self.gates[index], new, None)
        if index in self.counts:
            # One value: shared by all, or of a single parameter's leaf.
            values = new if isinstance(new, list) else [new] * len(self.gates)
            moves = [self.moves[param_index] for param_index in range(len(self.gates))]
            return list(map(choose_by, moves, values, self.counts[index]))
        # Results of a leaf's program are chosen already.
        is_output = any(index in x.outputs for x in self.analysis.leaf_updates)
        if is_output or new is self.arguments[index]:
            return new
        return self._gated(index, new)

    def _gated(self, index: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, in the old value's place."""
        old = self.arguments[index]
        gate = self.moves[self.analysis.param_indices[index]]
        shards = self.layout.leaves[index - len(self.gates)].shards
        # XLA would replicate what it can compute anywhere, such as a constant.
        new = constrained(jnp.asarray(choose_by(gate, new, old)), shards)
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new
