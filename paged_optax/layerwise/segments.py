"""Calls a function in segments, between which something else is computed."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, used_values

Values = TypeVar("Values", bound=PyTree)

#: `between(k, computed)` is called after segment k, and returns the computed values.
Between = Callable[[int, list[ArrayLike]], list[ArrayLike]]

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
    done = list(itertools.accumulate(work))
    # Each end is at the equation nearest to it.
    cuts = [
        min(range(len(done)), key=lambda index: abs(done[index] - end * done[-1]))
        for end in ends
    ]
    # The results, also before a change of shape or dtype, and products.
    bound = set(used_values(flat.outputs))
    for eqn in reversed(flat.eqns):
        if eqn.primitive.name in _SAME and not bound.isdisjoint(eqn.outputs):
            bound.update(eqn.numbers)
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
