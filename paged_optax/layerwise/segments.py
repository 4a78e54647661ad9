"""Groups of a layer's leaves, updated while their neighbours travel.

A layer's leaves are in groups. Another layer's computation, its backward or its forward
pass, runs in as many segments. During each segment the new moments of one group travel
to the host, and the next group's travel to the device. No stack is then read and
written at the same time, which would make XLA copy it. Between two segments a group is
updated. The backward pass of layer 6, with two groups:

    computes   update 0 of 7   half of layer 6   update 1 of 7   rest of layer 6
    to host                    moments 0 of 7                    moments 1 of 7
    to device                  moments 1 of 7                    moments 0 of 6
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, used_values
from paged_optax.backend.memory import nbytes, on_host
from paged_optax.engine.paged_array import Stored
from paged_optax.engine.shards import Shards
from paged_optax.layerwise.layer_optimizer import LayerLeaves, LayerOptimizer
from paged_optax.layerwise.layered_state import group_leaves
from paged_optax.layerwise.slices import (
    LayerIndex,
    read_moment,
    write_moment,
    write_slice,
)
from paged_optax.layerwise.weights import Prefetched, Vectors, Weights

Values = TypeVar("Values", bound=PyTree)


#: `between(k, computed)` is called after segment k, and returns the computed values.
Between = Callable[[int, list[ArrayLike]], list[ArrayLike]]


def after_all(values: Values) -> Values:
    """Orders all uses of these values after all of them."""
    return lax.optimization_barrier(values)


class GroupInputs(NamedTuple):
    """Host arrays that a group's update fetches.

    Attributes:
      moments: The group's moments.
      gradients: Its gradients, if they are on the host.
      weights: Its parameters that are fetched for the update, by position.
    """

    moments: list[Stored]
    gradients: list[Array]
    weights: dict[int, Array]


class InFlight(NamedTuple):
    """Buffers in flight between host and device.

    Attributes:
      moments: The moments of all layers, stacked.
      stacks: The parameters of the layers, and the chunked parameters.
      inputs: The inputs of the next group's update; None after the last group.
      weights: The parameters of the layer that is computed next.
    """

    moments: list[Stored]
    stacks: list[Array]
    inputs: GroupInputs | None
    weights: Prefetched


#: `update(k, state, values)` updates group k before other computations use `values`.
UpdateGroup = Callable[[int, InFlight, Values], tuple[InFlight, Values]]


@dataclasses.dataclass(frozen=True)
class GroupTransfers:
    """Updates groups of leaves, and orders their transfers.

    Attributes:
      fetches_weights: If true, trained `InFlight.weights` come from the host. In a
        forward pass they are the parameters that were just updated.
    """

    optimizer: LayerOptimizer
    weights: Weights
    fetches_weights: bool

    @functools.cached_property
    def shards(self) -> list[Shards | None]:
        """The division of each of the layers' parameters, and of the chunked ones."""
        trained = self.weights.shards[: len(self.weights.stacks)]
        return [*trained, *[None] * len(self.optimizer.layered.chunked)]

    @functools.cached_property
    def portions(self) -> list[dict[int, Array]]:
        """Frozen stacks in host memory, in as many portions as there are groups."""
        first = len(self.weights.stacks)
        frozen = enumerate(self.weights.frozen, first)
        offloaded = {n: x for n, x in frozen if on_host(x)}
        travel = {n: nbytes(x) for n, x in offloaded.items()}
        groups = group_leaves(travel, maximum=len(self.optimizer.groups))
        groups = [{n: offloaded[n] for n in group.positions} for group in groups]
        return groups + [{}] * (len(self.optimizer.groups) - len(groups))

    @property
    def moment_bytes(self) -> list[int]:
        """The bytes of each group's moments in host memory."""
        moments = self.optimizer.layered.moments
        return [
            sum(nbytes(x) for n in group.moment_positions if on_host(x := moments[n]))
            for group in self.optimizer.groups
        ]

    def fetch_frozen(self, k: int, i: LayerIndex) -> Prefetched:
        """Begins to fetch portion k of the frozen parameters of layer i."""
        return {n: self.weights.read(n, x, i) for n, x in self.portions[k].items()}

    def fetch_moments(
        self, moments: Sequence[Stored], k: int, i: LayerIndex
    ) -> list[Stored]:
        """Begins to fetch group k's moments of layer i."""
        shards = self.optimizer.layered.sliced_shards
        return [
            read_moment(moments[n], i, self.optimizer.layered.length, shards[n])
            for n in self.optimizer.groups[k].moment_positions
        ]

    def read(
        self, state: InFlight, i: LayerIndex, vectors: Vectors
    ) -> tuple[InFlight, list[Array]]:
        """Reads layer i before the next layer's parameters are written."""
        count = len(self.weights.stacks)
        layers = state.stacks[:count]
        slices = self.weights.slices(layers, i, state.weights, vectors)
        read = {n: x for n, x in enumerate(layers) if n not in state.weights}
        # XLA would copy a stack that is written before it is read.
        slices[:count], read = after_all((slices[:count], read))
        stacks = [read.get(n, x) for n, x in enumerate(state.stacks)]
        trained = {n: x for n, x in state.weights.items() if n < count}
        return state._replace(stacks=stacks, weights=trained), slices

    def overlapping(
        self,
        function: Callable[..., Values],
        args: Sequence[PyTree[ArrayLike]],
        state: InFlight,
        update: UpdateGroup[PyTree],
        coming: Sequence[int],
    ) -> tuple[InFlight, Values]:
        """Calls a function in segments, and updates a group before each.

        `coming` has the bytes of each group that travel to the device.
        """

        def between(k: int, computed: list[ArrayLike]) -> list[ArrayLike]:
            nonlocal state
            state, computed = self.wait(k, state, computed)
            state, computed = update(k + 1, state, computed)
            return computed

        state, args = update(0, state, args)
        portions = [nbytes(list(x.values())) for x in self.portions]
        ends = ends_of(self.moment_bytes, coming, portions)
        results = in_segments(function, args, ends, between)
        return self.wait(-1, state, results)

    def update_all(self, state: InFlight, update: UpdateGroup[PyTree]) -> InFlight:
        """Updates all groups while nothing else is computed."""
        for k in range(len(self.optimizer.groups)):
            state, _ = update(k, state, ())
            state, _ = self.wait(k, state, ())
        return state

    def update(
        self,
        k: int,
        state: InFlight,
        weights: LayerLeaves,
        gradients: LayerLeaves,
        i: LayerIndex,
        computed: Values,
    ) -> tuple[InFlight, list[Array], Values]:
        """Updates group k of layer i, and begins to write it back.

        Returns:
          The transfers, the group's parameters, and `computed`.
        """
        assert state.inputs is not None  # every turn fetches for the next update
        group, fetched = self.optimizer.groups[k], state.inputs.moments
        new = self.optimizer.update_group(group, fetched, weights, gradients, i)
        # The other computation continues after the update, during the transfers.
        (updated, leaves), computed = after_all((new, computed))
        moments, stacks = list(state.moments), list(state.stacks)
        for n, moment in zip(group.moment_positions, updated, strict=True):
            shards = self.optimizer.layered.sliced_shards[n]
            moments[n] = write_moment(
                moments[n], moment, i, self.optimizer.layered.length, shards
            )
        for n, leaf in zip(group.positions, leaves, strict=True):
            stacks[n] = write_slice(stacks[n], leaf, i, shards=self.shards[n])
        return state._replace(moments=moments, stacks=stacks), leaves, computed

    def wait(
        self, k: int, state: InFlight, computed: Values
    ) -> tuple[InFlight, Values]:
        """Waits for segment k, and for the transfers during it."""
        groups = (
            self.optimizer.groups[k],
            self.optimizer.groups[(k + 1) % len(self.optimizer.groups)],
        )
        # The barrier has the buffers of these transfers alone. Others may move.
        moments = {
            n: state.moments[n] for group in groups for n in group.moment_positions
        }
        positions = [n for group in groups for n in group.positions]
        stacks = {n: x for n in positions if on_host(x := state.stacks[n])}
        first = 0 if self.fetches_weights else len(self.weights.stacks)
        weights = {n: x for n, x in state.weights.items() if n >= first}
        moving = moments, stacks, state.inputs, weights
        (moments, stacks, inputs, weights), computed = after_all((moving, computed))
        replace = lambda values, new: [new.get(n, x) for n, x in enumerate(values)]
        moments, stacks = replace(state.moments, moments), replace(state.stacks, stacks)
        return InFlight(moments, stacks, inputs, state.weights | weights), computed


# Multiplications of an H200 in the time in which it writes one entry to its memory.
_AN_ENTRY = 300

# Barriers have the results of equations with at least this part of a segment's work.
# Barriers on all live values would break XLA's fusions.
_PRODUCT = 1 / 32

# Primitives that only change shape or dtype.
_SAME = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})


def in_segments(
    function: Callable[..., Values],
    args: Sequence[PyTree[ArrayLike]],
    ends: Sequence[float],
    between: Between,
) -> Values:
    """Calls a function in segments.

    Each segment except the last ends at a part of the work, in `ends`, where `between`
    is called.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = Flat(closed, checkpoints=False)
    work = [0.0 if x.traced is None else _operations(x.traced) for x in flat.eqns]
    cuts = _cuts(work, ends)
    bound = _results(flat)
    for eqn, size in zip(flat.eqns, work, strict=True):
        if size > _PRODUCT * sum(work) / (len(ends) + 1):
            bound.update(eqn.outputs)
    operands = [*(eqn.numbers for eqn in flat.eqns), used_values(flat.outputs)]
    last_use = {x: index for index, values in enumerate(operands) for x in values}
    values = dict(flat.constants) | dict(enumerate(jax.tree.leaves(args)))
    read = lambda x: x.value if isinstance(x, Constant) else values[x]
    for index, eqn in enumerate(flat.eqns):
        with _traced_mesh(eqn):
            outputs = eqn.bind([read(x) for x in eqn.inputs], None)
        values.update(zip(eqn.outputs, outputs, strict=True))
        for k in (k for k, cut in enumerate(cuts) if cut == index):
            computed = [x for x in values if x in bound and last_use.get(x, -1) > index]
            new = between(k, [values[x] for x in computed])
            values.update(zip(computed, new, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), map(read, flat.outputs))


def _traced_mesh(eqn: Equation) -> contextlib.AbstractContextManager[None]:
    """Around an equation: the mesh that it was traced on, of explicit axes or not."""
    mesh = eqn.traced and eqn.traced.ctx.cur_abstract_mesh
    if not mesh or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def _cuts(work: Sequence[float], ends: Sequence[float]) -> list[int]:
    """The equations nearest to the ends of segments."""
    done = list(itertools.accumulate(work))
    nearest = lambda end: min(
        range(len(done)), key=lambda index: abs(done[index] - end * done[-1])
    )
    return [nearest(end) for end in ends]


def _results(flat: Flat) -> set[int]:
    """The results, and results before a change of shape or dtype."""
    results = set(used_values(flat.outputs))
    for eqn in reversed(flat.eqns):
        if eqn.primitive.name in _SAME and not results.isdisjoint(eqn.outputs):
            results.update(eqn.numbers)
    return results


def _operations(eqn: core.JaxprEqn) -> float:
    """Counts the operations of an equation."""
    shape = lambda x: getattr(x.aval, "shape", ())
    operands: list[tuple[int, ...]] = list(map(shape, eqn.invars))
    entries = sum(math.prod(shape(x)) for x in eqn.outvars)
    match eqn.primitive.name, eqn.params.get("dimension_numbers"):
        case "dot_general", (((*summed,), _), _):
            return 2.0 * entries * math.prod(operands[0][i] for i in summed)
        case _, lax.ConvDimensionNumbers() as numbers:
            features = operands[1][numbers.rhs_spec[0]]
            return 2.0 * entries * math.prod(operands[1]) / features
        case _:
            pass
    inner = sum(
        _operations(x)
        for jaxpr in core.jaxprs_in_params(eqn.params)
        for x in jaxpr.eqns
    )
    length = eqn.params.get("length", 1)
    return (length if isinstance(length, int) else 1) * inner + _AN_ENTRY * entries


def ends_of(
    leaving: Sequence[int], coming: Sequence[int], shares: Sequence[int]
) -> list[float]:
    """Returns the ends of segments as parts of the work, in proportion to transfers.

    During segment k group k is written back, and group k + 1 and portion k are fetched.

    The bytes of each group that travel to the host are `leaving`, those to the device
    `coming`, and the bytes of each frozen portion `shares`. Segments have equal lengths
    if nothing travels.
    """
    after = map(sum, zip([*coming[1:], *coming[:1]], shares, strict=True))
    done = list(itertools.accumulate(map(max, zip(leaving, after, strict=True))))
    if not done[-1]:
        return [k / len(done) for k in range(1, len(done))]
    return [x / done[-1] for x in done[:-1]]
