"""One update of all leaves, those that are away or coded page by page."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from paged_optax.analysis.program import Analysis, LeafUpdate
from paged_optax.backend.memory import (
    HOST,
    on_host,
)
from paged_optax.codecs import Codec, draw
from paged_optax.engine.geometry import Kept
from paged_optax.engine.shards import UNSHARDED, Shards
from paged_optax.engine.stream import stream
from paged_optax.transform.active import choose_by, either
from paged_optax.transform.checks import (
    refuse_joined,
    underived,
)
from paged_optax.transform.context import Gate, current
from paged_optax.transform.pager import Pager, divided_as
from paged_optax.transform.stored_state import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Streaming:
    """One update of all leaves.

    Attributes:
      pager: The paged transformation.
      layout: How its state is stored.
      shards: How each parameter is divided, or None.
      analysis: What is computed.
      arguments: All that it is computed of: gradients, the state's leaves as they are
        stored, parameters, extra arguments. Gradients and leaves are in the order of
        the results that take their places.
      gradients: The gradients.
      leaves: The state's leaves.
      own: Counts of which each parameter has its own: by the number of the argument,
        one for each parameter.
      gates: For each parameter whether its update is taken.
      moves: For each parameter whether its moments change.
    """

    pager: Pager
    layout: Layout
    shards: tuple[Shards | None, ...]
    analysis: Analysis
    arguments: list[Any]
    gradients: list[Any]
    leaves: list[Any]
    own: dict[int, list[Any]]
    gates: Sequence[Gate]
    moves: Sequence[Gate]

    @functools.cached_property
    def first(self) -> int:
        """The number of the state's first leaf, among arguments and results."""
        return len(self.gradients)

    @functools.cached_property
    def codecs(self) -> dict[int, Codec]:
        """What stores arguments, by their numbers."""
        return {i: x for i, x in enumerate(self.layout.codecs, self.first) if x}

    @functools.cached_property
    def of_leaves(self) -> set[int]:
        """Results that a leaf's program makes."""
        return {position for leaf in self.analysis.leaves for position in leaf.outputs}

    @functools.cached_property
    def _gate_of_all(self) -> Gate:
        return either(self.moves) if self.gradients else True

    def gate_of(self, owner: int | None) -> Gate:
        """Whether what belongs to a parameter changes; None: to all of them."""
        return self._gate_of_all if owner is None else self.moves[owner]

    def results(self) -> list[Any]:
        """The updates, then the state's new leaves."""
        _ = self._gate_of_all
        made = self.analysis.evaluate(self.arguments, self.run_leaf, self.own)
        return [self._result(position, new) for position, new in enumerate(made)]

    def _result(self, position: int, new: Any) -> Any:
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
        return self._kept(position, new, old)

    def _kept(self, position: int, new: Any, old: Any) -> Any:
        """What was not streamed, where its gate is open, and where the old value is."""
        new = choose_by(self.gate_of(self.analysis.owners[position]), new, old)
        # Handed through, or shared by all: where the old value lives.
        moved = on_host(old) and not on_host(new)
        return jax.device_put(new, HOST) if moved else new

    def run_leaf(self, leaf: LeafUpdate, inputs: list[Any]) -> Sequence[Any]:
        """Runs the program of one leaf, page by page where it is coded or away."""
        gate = self.gate_of(leaf.owner)
        if leaf.owner is None and len({id(gate) for gate in self.gates}) > 1:
            refuse_joined(leaf)
        olds = [self.arguments[p] if p >= 0 else None for p in leaf.outputs]
        if gate is False:
            return [
                jnp.zeros(new.shape, new.dtype) if p < self.first else old
                for p, old, new in zip(leaf.outputs, olds, leaf.avals, strict=True)
            ]
        found = self._buffers(leaf, inputs, olds)
        if found.moving:
            return self._paged(leaf, found, gate)
        return [
            new
            if p < self.first or p in self.own or new is old
            else self._kept(p, new, old)
            for p, old, new in zip(
                leaf.outputs, olds, leaf.program(inputs), strict=True
            )
        ]

    def _buffers(
        self, leaf: LeafUpdate, inputs: list[Any], olds: Sequence[Any]
    ) -> "_Buffers":
        buffers, numbers = list(inputs), list(leaf.inputs)
        overwrites: list[int] = []
        for p, old, new in zip(leaf.outputs, olds, leaf.avals, strict=True):
            if p not in self.codecs and (
                old is None or (old.shape, old.dtype) != (new.shape, new.dtype)
            ):
                # An update of another dtype than its gradient, say, cannot take over
                # its buffer.
                old = jnp.zeros(new.shape, new.dtype)
            elif p in leaf.inputs:
                # By its number: one array may be given for several moments.
                overwrites.append(leaf.inputs.index(p))
                continue
            overwrites.append(len(buffers))
            buffers.append(old)
            numbers.append(p)
        coded = [self.codecs.get(number) for number in numbers]
        return _Buffers(buffers, numbers, overwrites, coded)

    def _paged(self, leaf: LeafUpdate, found: "_Buffers", gate: Any) -> Sequence[Any]:
        """Streams a leaf's pages through the device."""
        divided = divided_as(leaf, self.gradients, self.shards)
        run = functools.partial(
            stream,
            program=leaf.program,
            overwrites=tuple(found.overwrites),
            geometry=self.pager.geometry(leaf, found.moving, divided),
            codecs=tuple(found.codecs),
            shapes=tuple(
                self.layout.avals[number - self.first].shape if codec else x.shape
                for number, codec, x in zip(
                    found.numbers, found.codecs, found.arrays, strict=True
                )
            ),
            shards=divided,
        )
        away = any(map(on_host, found.arrays))
        alone = divided is None and leaf.program.elementwise
        with jax.named_scope(UNSHARDED) if alone else contextlib.nullcontext():
            return run(
                underived(found.arrays) if away else tuple(found.arrays),
                None if gate is True else gate.astype(jnp.int32),
                _noise(
                    self.leaves,
                    leaf.outputs,
                    [found.codecs[i] for i in found.overwrites],
                ),
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffers:
    """What a leaf's program is given, and further buffers for its results.

    Attributes:
      arrays: The arrays.
      numbers: Their numbers among the arguments.
      overwrites: For each result the position of the array that it replaces.
      codecs: What stores each array, or None.
    """

    arrays: list[Any]
    numbers: list[int]
    overwrites: list[int]
    codecs: list[Codec | None]

    @functools.cached_property
    def moving(self) -> list[Kept]:
        """How those are kept that are coded or in host memory."""
        return [
            Kept(4 if codec else x.dtype.itemsize, codec, on_host(x))
            for x, codec in zip(self.arrays, self.codecs, strict=True)
            if codec is not None or on_host(x)
        ]


def _noise(
    leaves: Sequence[Any], outputs: Sequence[int], codecs: Sequence[Codec | None]
) -> tuple[Any, ...] | None:
    """The random words by which results are rounded: of this moment, at this step."""
    if not any(codec is not None and codec.draws for codec in codecs):
        return None
    step = leaves[0]  # the first field of the state of `precision.counted`
    layer = current().layer

    def words(position: int, codec: Codec) -> Array:
        key = jax.random.key(getattr(codec, "seed", 0))
        if layer is not None:
            key = jax.random.fold_in(key, layer)
        return draw(jax.random.fold_in(key, position), step).words

    return tuple(
        words(position, codec) if codec is not None and codec.draws else None
        for position, codec in zip(outputs, codecs, strict=True)
    )
