"""Flat jaxprs: calls inlined, values numbered."""

import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.program import (
    FILLS,
    Constant,
    Equation,
    NumberedProgram,
    Opaque,
    Operand,
    Program,
    used_values,
)
from paged_optax.backend.types import shape_dtype, without_explicit_axes

#: Primitives that compute each element of their result from the same element of
#: their operands.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log
    log1p logistic lt max min mul ne neg nextafter not or pair_donated
    population_count pow pvary real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta""".split()
)

#: Primitives that only call a jaxpr, and the name of its parameter.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}

#: Primitives among them with custom derivatives.
_DERIVATIVES = frozenset(["custom_jvp_call", "custom_vjp_call"])


def _called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    called = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    return called and closed_of(called)


def closed_of(called: core.ClosedJaxpr | core.Jaxpr) -> core.ClosedJaxpr:
    """Returns a jaxpr with its constants; a checkpoint's has none."""
    closed = isinstance(called, core.ClosedJaxpr)
    return called if closed else core.ClosedJaxpr(called, ())


def _comparable(value: object) -> Hashable:
    """Returns a parameter that compares by content, as far as it has a hash."""
    if isinstance(value, core.ClosedJaxpr) or (
        isinstance(value, core.Jaxpr) and not value.constvars
    ):
        return Opaque(value, Flat(closed_of(value)).key)
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_comparable, value))
        if any(isinstance(x, Opaque) for x in parts):
            return Opaque(value, parts)
    if isinstance(value, types.FunctionType):
        # A function that it closes over compares by identity.
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        cells = [id(x) if isinstance(x, types.FunctionType) else x for x in cells]
        retained = value.__defaults__ or (), tuple(cells)
        return Opaque(value, (value.__code__, *map(_comparable, retained)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, x.name, None) for x in dataclasses.fields(value))
        return Opaque(value, (type(value), *map(_comparable, fields)))
    try:
        hash(value)
    except TypeError:
        return Opaque(value, id(value))
    return value


def _differentiated(eqn: core.JaxprEqn) -> Hashable:
    """Returns a key of an equation's computation and of its own derivative."""
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    shape = lambda x: jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
    avals = list(map(shape, eqn.invars))

    def run(*values: ArrayLike) -> list[Array]:
        params = eqn.primitive.get_bind_params(eqn.params)
        return list(filter(inexact, eqn.primitive.bind(*values, **params)))

    def pulled(values: Sequence[ArrayLike], by: Sequence[ArrayLike]) -> list[Array]:
        return list(filter(inexact, jax.vjp(run, *values)[1](list(by))))

    results = list(filter(inexact, map(shape, eqn.outvars)))
    called, closed = _called(eqn), jax.make_jaxpr(pulled)(avals, results)
    assert called is not None
    return Flat(called).key, Flat(closed).key


def _params(eqn: core.JaxprEqn) -> tuple[tuple[str, Hashable], ...]:
    if eqn.primitive.name not in _DERIVATIVES:
        return tuple([(k, _comparable(v)) for k, v in eqn.params.items()])
    # Every call creates new functions for its derivatives.
    params = [(k, Opaque(v, k)) for k, v in eqn.params.items()]
    return (*params, ("", Opaque(None, _differentiated(eqn))))


def _skips(eqn: core.JaxprEqn) -> bool:
    """Returns whether a branch returns an argument, as in wrappers that skip steps.

    These wrappers belong around paging, where a skipped step moves no byte.
    """
    return any(
        result is argument
        for branch in eqn.params["branches"]
        for result in branch.jaxpr.outvars
        for argument in branch.jaxpr.invars
    )


class Flat:
    """A jaxpr with its calls inlined and its values numbered.

    Args:
      closed: The jaxpr.
      both: True if a conditional that skips nothing is inlined too: both its branches,
        and a choice between their results.
      checkpoints: True if checkpoints are inlined too. XLA then reuses the values that
        they would recompute.
      derivatives: True if functions with custom derivatives are inlined too, which
        drops these derivatives.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        *,
        both: bool = False,
        checkpoints: bool = True,
        derivatives: bool = True,
    ):
        self.both, self.checkpoints, self.derivatives = both, checkpoints, derivatives
        self.avals: list[ShapedArray] = []
        self.eqns: list[Equation] = []
        self.source: dict[int, int] = {}  # position of each value's equation
        self.constants: dict[int, ArrayLike] = {}
        args = [self._number(aval) for aval in closed.in_avals]
        self.inputs = len(args)
        self.outputs = self._inline(closed, args)

    @property
    def key(self) -> Hashable:
        """Equal for two jaxprs of the same computation."""
        closed_over = [(index, id(x)) for index, x in self.constants.items()]
        parts = self.avals, self.eqns, self.outputs, closed_over
        return tuple(map(tuple, parts))

    def _number(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _append(self, eqn: Equation) -> None:
        self.source.update(dict.fromkeys(eqn.outputs, len(self.eqns)))
        self.eqns.append(eqn)

    def _inline(
        self, called: core.ClosedJaxpr, operands: Sequence[Operand]
    ) -> list[Operand]:
        jaxpr = called.jaxpr
        scope = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, called.consts, strict=True):
            scope[var] = index = self._number(var.aval)
            self.constants[index] = value
        read = lambda atom: (
            Constant.create(atom) if isinstance(atom, core.Literal) else scope[atom]
        )
        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            if self._inlines(eqn, operands) and (body := _called(eqn)) is not None:
                outputs = self._inline(body, operands)
            elif self.both and eqn.primitive.name == "cond" and not _skips(eqn):
                which, *remaining = operands
                branches = map(closed_of, eqn.params["branches"])
                results = [self._inline(x, remaining) for x in branches]
                outputs = [self._number(var.aval) for var in eqn.outvars]
                for output, *cases in zip(outputs, *results, strict=True):
                    values = (which, *cases), (output,)
                    self._append(Equation(lax.select_n_p, (), *values))
            else:
                outputs = [self._number(var.aval) for var in eqn.outvars]
                values = tuple(operands), tuple(outputs)
                self._append(Equation(eqn.primitive, _params(eqn), *values, eqn))
            scope.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _inlines(self, eqn: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
        """Returns whether a call is inlined; `operands` are for subclasses."""
        if eqn.primitive.name == "remat2":
            return self.checkpoints
        # Once inlined, a function has the derivative of its equations.
        return self.derivatives or eqn.primitive.name not in _DERIVATIVES

    def size(self, value: int) -> int:
        """Returns the number of elements of a value."""
        return math.prod(getattr(self.avals[value], "shape", ()))

    def shape(self, value: Operand) -> tuple[int, ...]:
        """Returns the shape of an operand."""
        if isinstance(value, Constant):
            return np.shape(value.value)
        return self.avals[value].shape

    def aval(self, value: Operand) -> tuple[tuple[int, ...], str]:
        """Returns the shape and dtype of an operand."""
        if isinstance(value, Constant):
            return self.shape(value), str(value.key[2])
        return self.shape(value), str(self.avals[value].dtype)

    def fit(self, operands: Iterable[Operand], shape: tuple[int, ...]) -> bool:
        """Returns whether all are of a leaf's shape, or scalars."""
        return all(self.shape(x) in (shape, ()) for x in operands)

    def is_elementwise(self, eqn: Equation, shape: tuple[int, ...]) -> bool:
        """Returns whether an equation is element-wise on a leaf of this shape."""
        if eqn.primitive.name in FILLS:
            (operand,), (output,) = eqn.inputs, eqn.outputs
            return self.shape(operand) == () and self.shape(output) == shape
        known = eqn.primitive.name in ELEMENTWISE
        return known and self.fit((*eqn.inputs, *eqn.outputs), shape)

    def needed(
        self, results: Sequence[Operand], within: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Returns the positions of the equations `within` that results depend on."""
        needed: set[int] = set()
        stack = used_values(results)
        while stack:
            index = self.source.get(value := stack.pop())
            if index is None or index in needed or (within and not within(value)):
                continue
            needed.add(index)
            stack += self.eqns[index].numbers
        return sorted(needed)

    def program(
        self,
        results: Sequence[Operand],
        within: Callable[[int], bool] | None = None,
        shape: tuple[int, ...] = (),
    ) -> NumberedProgram:
        """Extracts the equations `within` that results depend on."""
        eqns = [self.eqns[i] for i in self.needed(results, within)]
        program, args = Program.create(eqns, results)
        elementwise = (
            self.fit(args, shape)
            and all(self.is_elementwise(e, shape) for e in eqns)
            # A constant result takes the shape of a page.
            and all(self.shape(x) == shape for x in used_values(results))
        )
        program = dataclasses.replace(program, elementwise=elementwise)
        return NumberedProgram(program, args, tuple(results))


def effectful(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the innermost equations that have effects besides their results."""
    for eqn in jaxpr.eqns:
        # The effect of a collective names its axis, which is in its results.
        if {type(x).__name__ for x in eqn.effects} - {"NamedAxisEffect"}:
            inner = map(effectful, core.jaxprs_in_params(eqn.params))
            yield from list(itertools.chain(*inner)) or [eqn]


def check_effects(closed: core.ClosedJaxpr) -> None:
    """Raises if a traced function has effects other than its results.

    Programs compute results alone, and run once a page, or not at all.

    Raises:
      ValueError: If the function prints, calls back, checks, or writes to a reference.
    """
    for eqn in effectful(closed.jaxpr):
        raise ValueError(
            f"this transformation cannot be paged: `{eqn.primitive.name}` has an effect"
            " besides its results (a print, a callback, a check, a write to a"
            " reference), and pages are computed for their results alone. Chain the"
            " part that has it outside, as in optax.chain(optax.stateless(...),"
            " paged(...))."
        )


def trace(
    function: Callable[..., PyTree], *args: PyTree
) -> tuple[core.ClosedJaxpr, PyTree[jax.ShapeDtypeStruct]]:
    """Traces a function of pytrees as if every array lived whole on the device.

    Returns:
      The closed jaxpr, and the shapes and dtypes that it returns.
    """
    # A new function each time: state that it reads besides its arguments may change.
    anew = lambda *args: function(*args)
    with without_explicit_axes():
        return jax.make_jaxpr(anew, return_shape=True)(*jax.tree.map(shape_dtype, args))
