"""One update of all leaves, page by page if a codec or host memory holds them."""

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt32

from paged_optax.analysis.program import Analysis, LeafUpdate
from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.meshes import varying, varying_axes
from paged_optax.codecs import Codec, draw
from paged_optax.engine.pages import Storage
from paged_optax.engine.shards import UNSHARDED, Shards, constrained
from paged_optax.engine.stream import stream
from paged_optax.transform.checks import refuse_derivatives, refuse_joined
from paged_optax.transform.context import Gate, current, without
from paged_optax.transform.gates import choose_by
from paged_optax.transform.paged_transformation import Pager, divided_as
from paged_optax.transform.state_layout import Layout
from paged_optax.transform.trees import Stored, Value, paths_of


@dataclasses.dataclass(frozen=True, eq=False)
class Streaming:
    """One update of all leaves.

    Attributes:
      pager: The paged transformation.
      layout: How its state is stored.
      shards: For each parameter how it is divided, or None.
      analysis: The programs that compute the update.
      arguments: All arguments of the programs: gradients, the state's leaves as they
        are stored, parameters, extra arguments. Gradients and leaves are in the order
        of the results that take their places.
      own: Counts of which each parameter has its own: by the number of the argument,
        a list of one count for each parameter.
      gates: For each parameter whether its update is taken.
      moves: For each parameter whether its moments change.
      any_moves: Whether any parameter's moments change.
    """

    pager: Pager
    layout: Layout
    shards: tuple[Shards | None, ...]
    analysis: Analysis
    arguments: list[Value]
    own: dict[int, list[ArrayLike]]
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
        return {i: x for i, x in enumerate(self.layout.codecs, self.first) if x}

    @functools.cached_property
    def of_leaves(self) -> set[int]:
        """The positions of results that a leaf's program makes."""
        return {position for leaf in self.analysis.leaves for position in leaf.outputs}

    def gate_of(self, owner: int | None) -> Gate:
        """The gate of what belongs to a parameter, or to all of them: None."""
        return self.any_moves if owner is None else self.moves[owner]

    def results(self) -> list[Value]:
        """Computes the updates, then the state's new leaves."""
        made = self.analysis.evaluate(self.arguments, self.run_leaves, self.own)
        return [self._result(position, new) for position, new in enumerate(made)]

    def _result(self, position: int, new: Value) -> Value:
        if position < self.first:
            return choose_by(self.gates[position], new, None)
        if position in self.own:
            # One value: shared by all, or that of a single parameter's leaf.
            each = new if isinstance(new, list) else [new] * len(self.gates)
            chosen = map(choose_by, self.moves, each, self.own[position])
            return jax.tree.unflatten(self.layout.parameters, chosen)
        old = self.arguments[position]
        if position in self.of_leaves or new is old:
            return new
        return self._kept(position, new)

    def _kept(self, position: int, new: ArrayLike) -> ArrayLike:
        """Chooses the new value or the old by the gate, and keeps the old's place."""
        old = self.arguments[position]
        new = choose_by(self.gate_of(self.analysis.owners[position]), new, old)
        new = constrained(jnp.asarray(new), self.layout.shards[position - self.first])
        return jax.device_put(new, HOST) if on_host(old) and not on_host(new) else new

    def run_leaves(
        self, leaves: Sequence[tuple[LeafUpdate, list[Value]]]
    ) -> list[Sequence[Value]]:
        """Runs the programs of all leaves, of like ones together."""
        made: dict[int, Sequence[Value]] = {}
        alike: dict[Hashable, dict[int, _LeafArrays]] = {}
        for number, (leaf, inputs) in enumerate(leaves):
            gate = self.gate_of(leaf.owner)
            if leaf.owner is None and len({id(gate) for gate in self.gates}) > 1:
                refuse_joined(leaf)
            olds = [None if p is None else self.arguments[p] for p in leaf.places]
            if gate is False:
                made[number] = _skipped(leaf, olds, self.first)
                continue
            found = self._buffers(leaf, inputs, olds)
            if found.moving:
                alike.setdefault(self._kind(leaf, found), {})[number] = found
            else:
                made[number] = self._whole(leaf, inputs, olds)
        for group in alike.values():
            first = leaves[next(iter(group))][0]
            new = self._paged(first, list(group.values()))
            made.update(zip(group, new, strict=True))
        return [made[number] for number in range(len(leaves))]

    def _whole(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> Sequence[Value]:
        """Runs the program of a leaf that no codec and no host memory holds."""
        return [
            new
            if p is None or p < self.first or p in self.own or new is old
            else self._kept(p, new)
            for p, old, new in zip(leaf.places, olds, leaf.program(inputs), strict=True)
        ]

    def _kind(self, leaf: LeafUpdate, found: "_LeafArrays") -> Hashable:
        """What like leaves have in common: those of equal keys may share pages."""
        gate = self.gate_of(leaf.owner)
        draws = any(codec is not None and codec.draws for codec in found.codecs)
        # Of a layer that was fetched, each leaf is cut out of its stack by itself.
        alone = draws or self.own or current().fetched
        own = leaf.owner if alone else None
        same = self.analysis.same
        shared = [
            same.get(number, number)
            for number, codec, x in zip(
                leaf.inputs, found.codecs, found.arrays, strict=False
            )
            if codec is None and jnp.shape(x) != leaf.shape
        ]
        types = [jax.typeof(x) for x in jax.tree.leaves(found.arrays)]
        divided = divided_as(leaf, self.arguments[: self.first], self.shards)
        how = *shared, *types, *found.overwrites, *found.codecs
        return leaf.program, leaf.shape, divided, id(gate), own, how

    def _buffers(
        self, leaf: LeafUpdate, inputs: list[Value], olds: Sequence[Value | None]
    ) -> "_LeafArrays":
        buffers, overwrites = list(inputs), list[int]()
        codecs = [self.codecs.get(number) for number in leaf.inputs]
        shapes = [
            self.layout.avals[number - self.first].shape if codec else jnp.shape(x)
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
                # Found by its number: one array may be given for several moments.
                overwrites.append(leaf.inputs.index(p))
                continue
            overwrites.append(len(buffers))
            buffers.append(old)
            codecs.append(codec)
            shapes.append(new.shape)
        return _LeafArrays(buffers, overwrites, codecs, shapes)

    def _paged(
        self, leaf: LeafUpdate, found: Sequence["_LeafArrays"]
    ) -> Sequence[Sequence[Stored]]:
        """Streams the pages of like leaves through the device."""
        divided = divided_as(leaf, self.arguments[: self.first], self.shards)
        gate, (first, *_) = self.gate_of(leaf.owner), found
        run = functools.partial(
            stream,
            program=leaf.program,
            overwrites=tuple(first.overwrites),
            geometry=self.pager.geometry(leaf, first.moving, divided, len(found)),
            codecs=tuple(first.codecs),
            shapes=tuple(first.shapes),
            shards=divided,
        )
        away, noise = any(map(on_host, first.arrays)), self._noise(leaf)
        alone = divided is None and leaf.program.elementwise
        named = jax.named_scope(UNSHARDED) if alone else contextlib.nullcontext()
        if alone and away and leaf.owner is not None:
            paths, gradients = paths_of(
                jax.tree.unflatten(self.layout.parameters, self.arguments[: self.first])
            )
            self.pager.known.tell_of_unknown(paths[leaf.owner], gradients[leaf.owner])
        # No context changes what streams, so like leaves are traced once.
        with named, without():
            arrays = [x.arrays for x in found]
            return run(
                tuple(refuse_derivatives(x) if away else tuple(x) for x in arrays),
                gate.astype(jnp.int32) if isinstance(gate, Array) else None,
                noise,
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


def _skipped(
    leaf: LeafUpdate, olds: Sequence[Value | None], first: int
) -> Sequence[Value]:
    """The results of a leaf that is not updated: no update, and its old moments."""
    return [
        jnp.zeros(new.shape, new.dtype) if p is None or p < first else old
        for p, old, new in zip(leaf.places, olds, leaf.avals, strict=True)
    ]


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
