"""Splits a computation into segments that transfers overlap.

XLA starts a transfer when its operand is ready, and waits for it where its result is
used. Optimization barriers bind the transfers of a segment to its start and its end: a
barrier has the values computed so far, and the transferred arrays. A layer's leaves are
in as many groups as there are segments.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation

#: `between(k, computed)` is called after segment k, and returns the computed values.
Between = Callable[[int, list[ArrayLike]], list[ArrayLike]]

Result = TypeVar("Result", bound=PyTree[Array])

# Multiplications of an H200 in the time in which it writes one entry to its memory.
_AN_ENTRY = 300

# Barriers have the results of equations with at least this part of a segment's work.
# Barriers on all live values would break XLA's fusions.
_PRODUCT = 1 / 32

# Primitives that only change shape or dtype.
_SAME = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})


def in_segments(
    function: Callable[..., Result],
    args: Sequence[PyTree[ArrayLike]],
    ends: Sequence[float],
    between: Between,
) -> Result:
    """Calls a function in segments.

    Args:
      function: The function.
      args: Its arguments.
      ends: The end of each segment except the last, as a part of the work.
      between: Is called at these ends.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = Flat(closed, checkpoints=False)
    work = [0.0 if x.traced is None else _operations(x.traced) for x in flat.eqns]
    cuts = _cuts(work, ends)
    bound = _results(flat)
    for eqn, size in zip(flat.eqns, work, strict=True):
        if size > _PRODUCT * sum(work) / (len(ends) + 1):
            bound.update(eqn.outputs)
    last_use = {
        x: index
        for index, operands in enumerate(
            [*(eqn.inputs for eqn in flat.eqns), flat.outputs]
        )
        for x in operands
        if not isinstance(x, Constant)
    }
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
    results = {x for x in flat.outputs if not isinstance(x, Constant)}
    for eqn in reversed(flat.eqns):
        if eqn.primitive.name in _SAME and not results.isdisjoint(eqn.outputs):
            results.update(x for x in eqn.inputs if not isinstance(x, Constant))
    return results


def _operations(eqn: core.JaxprEqn) -> float:
    """Counts the operations of an equation."""
    shape = lambda x: getattr(x.aval, "shape", ())
    operands = list(map(shape, eqn.invars))
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


# More groups hold fewer bytes on the device. With four, a group is about one large
# matrix of a transformer's layer.
_GROUPS = 4


class Group(NamedTuple):
    """Leaves of a layer with a common update.

    Attributes:
      positions: Their positions among the layer's leaves.
      slot_positions: The positions of their moments among the state's stacks.
    """

    positions: tuple[int, ...]
    slot_positions: tuple[int, ...]


def grouped(
    travel: Mapping[int, int],
    param_indices: Sequence[int] = (),
    maximum: int | None = None,
) -> list[Group]:
    """Divides a layer's leaves into groups of about equal travel.

    Args:
      travel: The bytes of each leaf that travel, by its position.
      param_indices: For each of the state's stacks, the position of its leaf.
      maximum: The largest number of groups; None uses the default.

    Returns:
      The groups.
    """
    count = min(maximum or _GROUPS, sum(map(bool, travel.values())))
    groups: list[list[int]] = [[] for _ in range(max(1, count))]
    sizes = [0] * len(groups)
    for size, index in sorted(((x, n) for n, x in travel.items()), reverse=True):
        minimum = sizes.index(min(sizes))
        groups[minimum].append(index)
        sizes[minimum] += size
    # The smallest comes first. It is fetched during the last segment, where XLA:GPU
    # starts transfers late (jax 0.12.0.1).
    return [
        Group(
            tuple(sorted(group)),
            tuple(
                n for n, param_index in enumerate(param_indices) if param_index in group
            ),
        )
        for _, group in sorted(zip(sizes, groups, strict=True))
    ]


def ends_of(
    leaving: Sequence[int], coming: Sequence[int], shares: Sequence[int]
) -> list[float]:
    """Returns the ends of segments as parts of the work, in proportion to transfers.

    During segment k group k is written back, and group k + 1 and portion k are fetched.

    Args:
      leaving: The bytes of each group that travel to the host.
      coming: The bytes of each group that travel to the device.
      shares: The bytes of each frozen portion.

    Returns:
      The ends. Segments have equal lengths if none of these arrays travels.
    """
    after = map(sum, zip([*coming[1:], *coming[:1]], shares, strict=True))
    done = list(itertools.accumulate(map(max, zip(leaving, after, strict=True))))
    if not done[-1]:
        return [k / len(done) for k in range(1, len(done))]
    return [x / done[-1] for x in done[:-1]]
