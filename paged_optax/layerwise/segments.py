"""A computation in segments, between which something else happens.

What travels between host and device travels while something is computed. XLA begins a
transfer where its operand is there, and waits for it where its result is used. So what
is to travel beside a segment is bound to the segment's ends: what has been computed
there passes an optimization barrier together with what has been transferred.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
from jax import Array, lax
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Opaque

#: What happens between two segments: `between(k, computed)` is called after segment k
#: and returns what has been computed.
Between = Callable[[int, list[ArrayLike]], list[ArrayLike]]

Result = TypeVar("Result", bound=PyTree[Array])

# Products that an H200 computes in the time in which it writes an entry to its memory.
_AN_ENTRY = 300

# An equation of this part of a segment's work has results that segments are bound to.
# To bind whatever lives there would tear apart what XLA fuses.
_PRODUCT = 1 / 32

# The result of these is their operand, in another shape or dtype.
_SAME = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})


def in_segments(
    function: Callable[..., Result],
    arguments: Sequence[PyTree[ArrayLike]],
    ends: Sequence[float],
    between: Between,
) -> Result:
    """Calls a function in segments.

    Args:
      function: The function.
      arguments: Its arguments.
      ends: Where each segment but the last one ends, as a part of the work.
      between: What happens there.

    Returns:
      What the function returns.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = Flat(closed, checkpoints=False)
    work = [_work(flat, equation) for equation in flat.equations]
    cuts = _cuts(work, ends)
    bound = _leading_to_results(flat)
    for equation, size in zip(flat.equations, work, strict=True):
        if size > _PRODUCT * sum(work) / (len(ends) + 1):
            bound.update(equation.outputs)
    last_use = {
        x: index
        for index, operands in enumerate(
            [*(equation.inputs for equation in flat.equations), flat.outputs]
        )
        for x in operands
        if not isinstance(x, Constant)
    }
    values = dict(flat.constants) | dict(enumerate(jax.tree.leaves(arguments)))
    read = lambda x: x.value if isinstance(x, Constant) else values[x]
    for index, equation in enumerate(flat.equations):
        with _on_its_axes(equation):
            made = equation.bind([read(x) for x in equation.inputs], None)
        values.update(zip(equation.outputs, made, strict=True))
        for k in (k for k, cut in enumerate(cuts) if cut == index):
            computed = [x for x in values if x in bound and last_use.get(x, -1) > index]
            new = between(k, [values[x] for x in computed])
            values.update(zip(computed, new, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), map(read, flat.outputs))


def _on_its_axes(equation: Equation) -> contextlib.AbstractContextManager[None]:
    """Around an equation: the mesh that it was traced on, of explicit axes or not."""
    mesh = equation.traced and equation.traced.ctx.cur_abstract_mesh
    if not mesh or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def _cuts(work: Sequence[float], ends: Sequence[float]) -> list[int]:
    """The equations after which segments end: those that end nearest."""
    done = list(itertools.accumulate(work))
    nearest = lambda end: min(
        range(len(done)), key=lambda index: abs(done[index] - end * done[-1])
    )
    return [nearest(end) for end in ends]


def _leading_to_results(flat: Flat) -> set[int]:
    """The results, and what is a result in another shape or dtype."""
    found = {x for x in flat.outputs if not isinstance(x, Constant)}
    for equation in reversed(flat.equations):
        if equation.primitive.name in _SAME and not found.isdisjoint(equation.outputs):
            found.update(x for x in equation.inputs if not isinstance(x, Constant))
    return found


def _work(flat: Flat, equation: Equation) -> float:
    """Operations of an equation of a flat jaxpr."""
    return _operations(
        equation.primitive.name,
        {k: x.value if isinstance(x, Opaque) else x for k, x in equation.params},
        [tuple(flat.shape(x)) for x in equation.inputs],
        [tuple(flat.shape(x)) for x in equation.outputs],
    )


def _operations(
    primitive: str,
    params: Mapping[str, object],
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
) -> float:
    """Operations of a primitive, given the shapes of its operands and results."""
    entries = sum(map(math.prod, results))
    match primitive, params:
        case "dot_general", {"dimension_numbers": (((*summed,), _), _)}:
            return 2.0 * entries * math.prod(operands[0][i] for i in summed)
        case _, {"dimension_numbers": lax.ConvDimensionNumbers() as numbers}:
            made = operands[1][numbers.rhs_spec[0]]
            return 2.0 * entries * math.prod(operands[1]) / made
        case _:
            pass
    inside = sum(
        _operations(
            eqn.primitive.name,
            eqn.params,
            [getattr(x.aval, "shape", ()) for x in eqn.invars],
            [getattr(x.aval, "shape", ()) for x in eqn.outvars],
        )
        for jaxpr in core.jaxprs_in_params(dict(params))
        for eqn in jaxpr.eqns
    )
    turns = params.get("length", 1)
    return (turns if isinstance(turns, int) else 1) * inside + _AN_ENTRY * entries
