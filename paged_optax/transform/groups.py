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
from paged_optax.backend.types import varying, varying_axes
from paged_optax.codecs import Codec, draw
from paged_optax.engine.loop import LeafProgram
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import Shards, constrained
from paged_optax.transform.context import Gate, choose_by, current
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import Value


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """The arrays of a leaf, and their loop's program."""

    arrays: list[Value]  # inputs of the program, then further buffers for its results
    program: LeafProgram
    moments: list[MomentFormat]  # of the arrays that are coded or in host memory
    shards: Shards | None

    @property
    def on_host(self) -> bool:
        """True if any of the arrays is in host memory."""
        return any(x.on_host for x in self.moments)


#: The results of leaves' programs, by the leaves' numbers.
_ByLeaf = dict[int, Sequence[Value]]

#: Leaves that share a loop: the first leaf, and the arrays of each by its number.
Group = tuple[LeafUpdate, dict[int, StreamedLeaf]]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStreams:
    """The leaves of one update, to be streamed in groups.

    The arguments of the programs are the gradients, the state's leaves as they are
    stored, the parameters, and extra arguments. Gradients and leaves are in the order
    of the results that replace them.
    """

    analysis: Analysis
    layout: StateLayout
    arguments: list[Value]
    counts: dict[int, list[ArrayLike]]  # step counts by parameter, by argument
    gates: Sequence[Gate]  # for each parameter whether its update is taken
    # For each parameter whether its moments change; under None whether any does.
    moves: Mapping[int | None, Gate]

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """The codecs of arguments, by the arguments' numbers."""
        leaves = enumerate(self.layout.leaves, len(self.gates))
        return {index: leaf.codec for index, leaf in leaves if leaf.codec}

    def grouped(self, evaluation: Evaluation) -> tuple[_ByLeaf, list[Group]]:
        """Skips or computes leaves on the device, and groups the others."""
        first = len(self.gates)
        gates_differ = len({id(gate) for gate in self.gates}) > 1
        results: _ByLeaf = {}
        groups: dict[Hashable, Group] = {}
        for index, leaf in enumerate(self.analysis.leaf_updates):
            inputs, gate = evaluation.inputs(leaf), self.moves[leaf.param_index]
            if gates_differ and leaf.param_index is None and leaf.between:
                raise ValueError(
                    "active=... differs between parameters that inner lays end to end:"
                    " pass one bool for all, or leave optax.flatten out of paged(...)."
                )
            olds = [None if p is None else self.arguments[p] for p in leaf.places]
            if gate is False:
                # A gate that is closed when traced costs nothing: it has no loop.
                results[index] = [
                    jnp.zeros(new.shape, new.dtype) if p is None or p < first else x
                    for p, x, new in zip(leaf.places, olds, leaf.avals, strict=True)
                ]
                continue
            streamed = self._streamed(leaf, inputs, olds)
            if streamed.moments:
                key = self._loop_key(leaf, streamed, gate)
                groups.setdefault(key, (leaf, {}))[1][index] = streamed
                continue
            pairs = zip(leaf.places, olds, leaf.program(inputs), strict=True)
            results[index] = [
                new
                if p is None or p < first or p in self.counts or new is old
                else self._gated(p, new)
                for p, old, new in pairs
            ]
        return results, list(groups.values())

    def _loop_key(
        self, leaf: LeafUpdate, streamed: StreamedLeaf, gate: Gate
    ) -> Hashable:
        """Returns a key; leaves with equal keys share one loop, and its pages."""
        # A loop has one gate, one set of random words, and one of each scalar: leaves
        # with stochastic rounding, or with step counts of their own, have a loop each,
        # and so do a layer's in a layerwise step: their stacks are sliced separately.
        drawn = any(x.codec is not None and x.codec.draws for x in streamed.moments)
        singly = drawn or bool(self.counts) or current().layerwise
        # Buffers that are only overwritten follow the inputs, and have no number.
        program, arrays = streamed.program, streamed.arrays
        triples = zip(leaf.inputs, program.codecs, arrays, strict=False)
        shared = [
            self.analysis.same.get(argument, argument)
            for argument, codec, x in triples
            if codec is None and jnp.shape(x) != leaf.shape
        ]
        # The buffers of a loop keep their types from page to page. Equal leaves must
        # not be compiled one by one: a leaf of eight-bit moments takes XLA 0.9
        # CPU-seconds.
        return (
            program,
            leaf.shape,
            tuple(streamed.moments),
            streamed.shards,
            leaf.param_index if singly else None,
            id(gate),
            *shared,
            *map(jax.typeof, jax.tree.leaves(arrays)),
        )

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
        # An element-wise leaf is divided as its parameter.
        shards, owner = None, leaf.param_index
        if owner is not None and leaf.program.elementwise:
            same_shape = leaf.shape == self.arguments[owner].shape
            shards = layout.parameter_shards[owner] if same_shape else None
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
        if new is self.arguments[index]:
            return new
        if any(index in x.outputs for x in self.analysis.leaf_updates):
            return self._undivided(index, new)  # chosen already
        return self._gated(index, new)

    def _undivided(self, index: int, new: PyTree[Array]) -> PyTree[Array]:
        """Replicates a moment of another shape than its parameter, as `init` does.

        XLA would divide a factor as the parameter is, and not reuse its buffer.
        """
        leaf = self.layout.leaves[index - len(self.gates)]
        owner = leaf.param_index
        shards = None if owner is None else self.layout.parameter_shards[owner]
        if shards is None or leaf.shards is not None:
            return new
        replicated = lambda x: dataclasses.replace(shards, axes=((),) * jnp.ndim(x))
        return jax.tree.map(lambda x: constrained(x, replicated(x)), new)

    def _gated(self, index: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, in the old value's place."""
        old = self.arguments[index]
        gate = self.moves[self.analysis.param_indices[index]]
        shards = self.layout.leaves[index - len(self.gates)].shards
        # XLA would replicate what it can compute anywhere, such as a constant.
        new = constrained(jnp.asarray(choose_by(gate, new, old)), shards)
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new
