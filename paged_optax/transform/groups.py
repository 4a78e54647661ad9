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
from paged_optax.transform.context import Gate, any_gate, choose_by, current
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import Value


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """The arrays of a leaf, and their loop's program."""

    arrays: list[Value]  # inputs of the program, then further buffers for its results
    program: LeafProgram
    moments: list[MomentFormat]  # of the arrays that are coded or in host memory
    shards: Shards | None


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

    layout: StateLayout
    evaluation: Evaluation  # of the programs, for these arguments
    gates: Sequence[Gate]  # for each parameter whether its update is taken
    # For each parameter whether its moments change; under None whether any does.
    moves: Mapping[int | None, Gate]

    @classmethod
    def create(
        cls,
        analysis: Analysis,
        layout: StateLayout,
        arguments: list[Value],
        constants: Mapping[int, ArrayLike],
        gates: Sequence[Gate],
        restart: Gate = False,
    ) -> "LeafStreams":
        """Evaluates what all leaves share; each parameter may have a step count."""
        # A count of each parameter is traced as one; see `Evaluation`.
        counts = {len(gates) + i: arguments[len(gates) + i] for i in layout.counts}
        args = [counts[i][0] if i in counts else x for i, x in enumerate(arguments)]
        # On a restart a moment starts again even if its parameter's update is skipped.
        moves = [any_gate([gate, restart]) for gate in gates]
        every = {None: any_gate(moves) if moves else True, **dict(enumerate(moves))}
        return cls(layout, Evaluation(analysis, args, constants, counts), gates, every)

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """The codecs of arguments, by the arguments' numbers."""
        leaves = enumerate(self.layout.leaves, len(self.gates))
        return {index: leaf.codec for index, leaf in leaves if leaf.codec}

    def grouped(self) -> tuple[_ByLeaf, list[Group]]:
        """Skips or computes leaves on the device, and groups the others."""
        gradient_count = len(self.gates)
        gates_differ = len({id(gate) for gate in self.gates}) > 1
        results: _ByLeaf = {}
        groups: dict[Hashable, Group] = {}
        for index, leaf in enumerate(self.evaluation.analysis.leaf_updates):
            gate = self.moves[leaf.param_index]
            if gates_differ and leaf.param_index is None and leaf.between:
                raise ValueError(
                    "active=... differs between parameters that inner lays end to end:"
                    " pass one bool for all, or leave optax.flatten out of paged(...)."
                )
            if gate is False:
                # A gate that is closed when traced costs nothing: it has no loop.
                results[index] = [
                    jnp.zeros(new.shape, new.dtype)
                    if p is None or p < gradient_count
                    else self.evaluation.values[p]
                    for p, new in zip(leaf.places, leaf.avals, strict=True)
                ]
                continue
            streamed = self._streamed(leaf)
            if streamed.moments:
                key = self._loop_key(leaf, streamed, gate)
                groups.setdefault(key, (leaf, {}))[1][index] = streamed
                continue
            new = leaf.program(self.evaluation.inputs(leaf))
            results[index] = [
                x if p is None or p < gradient_count else self._chosen(p, x)
                for p, x in zip(leaf.places, new, strict=True)
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
        singly = drawn or bool(self.layout.counts) or current().layerwise
        # Buffers that are only overwritten follow the inputs, and have no number.
        program, arrays = streamed.program, streamed.arrays
        triples = zip(leaf.inputs, program.codecs, arrays, strict=False)
        shared = [
            self.evaluation.analysis.same.get(argument, argument)
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

    def _streamed(self, leaf: LeafUpdate) -> StreamedLeaf:
        gradient_count, layout = len(self.gates), self.layout
        arrays, overwrites = self.evaluation.inputs(leaf), list[int]()
        codecs = [self.codecs.get(index) for index in leaf.inputs]
        shapes = [
            layout.leaves[index - gradient_count].aval.shape if codec else jnp.shape(x)
            for index, codec, x in zip(leaf.inputs, codecs, arrays, strict=True)
        ]
        for p, new in zip(leaf.places, leaf.avals, strict=True):
            old = None if p is None else self.evaluation.values[p]
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
            same_shape = leaf.shape == self.evaluation.values[owner].shape
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
        step, layer = self.evaluation.values[len(self.gates)], current().layer

        def words(index: int, codec: Codec) -> UInt32[Array, "2"]:
            key = jax.random.key(getattr(codec, "seed", 0))
            if layer is not None:
                key = jax.random.fold_in(key, layer)
            for axis in sorted(varying_axes(self.evaluation.values[index])):
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            return draw(jax.random.fold_in(key, index), step).words

        drawn = {p: words(p, codec) for p, codec in codecs.items() if codec.draws}
        return (*map(drawn.get, leaf.outputs), *[None] * len(leaf.between))

    def results(self, by_leaf: _ByLeaf) -> list[Array]:
        """Returns the updates and the new state's arrays, chosen by their gates."""
        gradient_count, leaves = len(self.gates), self.evaluation.analysis.leaf_updates
        chosen = {p for leaf in leaves for p in leaf.outputs}
        results = self.evaluation.results([by_leaf[i] for i in range(len(leaves))])
        for index, new in enumerate(results):
            if index < gradient_count:
                results[index] = choose_by(self.gates[index], new, None)
            elif index in self.evaluation.counts:
                # One value: shared by all, or of a single parameter's leaf.
                values = new if isinstance(new, list) else [new] * gradient_count
                olds = enumerate(self.evaluation.counts[index])
                results[index] = [
                    choose_by(self.moves[i], values[i], old) for i, old in olds
                ]
            else:
                new = new if index in chosen else self._chosen(index, new)
                results[index] = self._undivided(index, new)
        return jax.tree.leaves(results)

    def _undivided(self, index: int, new: PyTree[Array]) -> PyTree[Array]:
        """Replicates a moment of another shape than its parameter, as `init` does.

        XLA would divide a factor as the parameter is, and not reuse its buffer.
        """
        leaf = self.layout.leaves[index - len(self.gates)]
        owner = leaf.param_index
        shards = None if owner is None else self.layout.parameter_shards[owner]
        if shards is None or leaf.shards or new is self.evaluation.values[index]:
            return new
        whole = lambda x: dataclasses.replace(shards, axes=((),) * jnp.ndim(x))
        return jax.tree.map(lambda x: constrained(x, whole(x)), new)

    def _chosen(self, index: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, in the old value's place."""
        old = self.evaluation.values[index]
        if new is old or index in self.evaluation.counts:
            return new
        gate = self.moves[self.evaluation.analysis.param_indices[index]]
        shards = self.layout.leaves[index - len(self.gates)].shards
        # XLA would replicate what it can compute anywhere, such as a constant.
        new = constrained(jnp.asarray(choose_by(gate, new, old)), shards)
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new
