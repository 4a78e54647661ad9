"""What a page of a transformation may be, read off its jaxpr.

`inner.update` is traced once, for the whole tree. The flattened computation falls
apart into one program a parameter, and a few scalars that all of them share (step
counts, learning rates, bias corrections):

| dependence between leaves | a page is |
| --- | --- |
| element by element | a block of rows |
| within one leaf (a norm, a factored moment, a matrix product) | the whole leaf |
| across leaves (a global norm) | refused: `CrossLeafError` |

What is computed is what a page's results need. A transformation with an effect besides
its results (a print, a callback, a check) is refused.

Programs are values: two leaves of equal shape have equal programs, so that JAX
traces and lowers the streaming loop once for both.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from paged_optax.sharding import without_explicit_axes

#: Primitives that compute each element of their result from the same element of
#: their operands.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pair_donated population_count pow real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta""".split()
)

#: Primitives that fill an array of the leaf's shape where their operand is a scalar. Of
#: any other operand they may move the values, so that no page is made of its own alone.
_FILLS = frozenset(["broadcast_in_dim", "reshape"])

#: Primitives that only call a jaxpr, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}

#: Values of at most this many elements that no gradient enters are computed once
#: and shared; larger ones (noise, masks) are made anew by each leaf that needs
#: them, so that they never exist for the whole tree.
_SHARED_ELEMENTS = 1024


#: Owner of what is made of all parameters laid end to end, as `optax.flatten` does.
_JOINED = -1

#: Primitives that cut a joined leaf apart again.
_CUTS = frozenset("convert_element_type reshape slice split squeeze".split())


class CrossLeafError(ValueError):
    """The transformation mixes several parameters, so no page can be updated alone."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal of the computation, compared by value, dtype and weak type."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, literal: Any) -> "Constant":
        """Wraps a jaxpr's literal."""
        aval = literal.aval
        array = np.asarray(literal.val)
        weak = getattr(aval, "weak_type", False)
        return cls((array.tobytes(), array.shape, str(aval.dtype), weak), literal.val)


@dataclasses.dataclass(frozen=True)
class _Opaque:
    """A parameter that is compared by another key: a jaxpr, or what has no hash."""

    value: Any = dataclasses.field(compare=False)
    key: Any

    @classmethod
    def wrap(cls, value: Any) -> Any:
        """A jaxpr is what it computes; what has no hash is equal to itself alone."""
        if isinstance(value, core.Jaxpr) and not value.constvars:
            return cls(value, _Flat(core.ClosedJaxpr(value, ())).key)
        if isinstance(value, core.ClosedJaxpr):
            return cls(value, _Flat(value).key)
        if isinstance(value, (tuple, list)):
            parts = tuple(map(cls.wrap, value))
            if any(isinstance(x, cls) for x in parts):
                return cls(value, parts)
        try:
            hash(value)
        except TypeError:
            return cls(value, id(value))
        return value


#: An operand: the number of a value, or a constant.
Operand = int | Constant


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive applied to numbered values."""

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]

    def bind(self, operands: Sequence[Any], shape: tuple[int, ...] | None) -> list[Any]:
        """Applies the primitive; `shape` is the page's, or None for whole leaves."""
        if shape is not None and self.primitive.name in _FILLS:
            # Traced with the shape of the whole leaf.
            return [jax.lax.broadcast(operands[0], shape)]
        params = {
            name: value.value if isinstance(value, _Opaque) else value
            for name, value in self.params
        }
        params = self.primitive.get_bind_params(params)
        result = self.primitive.bind(*operands, **params)
        return list(result) if self.primitive.multiple_results else [result]


@dataclasses.dataclass(frozen=True)
class Program:
    """A straight line of equations; values `0 .. inputs-1` are its arguments."""

    inputs: int
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...]
    elementwise: bool

    def __call__(
        self, arguments: Sequence[Any], shape: tuple[int, ...] | None = None
    ) -> list[Any]:
        """Runs the equations.

        Args:
          arguments: One array for each input.
          shape: The shape of a page, where the arguments are pages of a leaf
            (element-wise programs only); None where they are whole leaves.

        Returns:
          One array for each output.
        """
        values: dict[int, Any] = dict(enumerate(arguments))
        read = lambda operand: (
            operand.value if isinstance(operand, Constant) else values[operand]
        )
        for equation in self.equations:
            results = equation.bind([read(x) for x in equation.inputs], shape)
            values.update(zip(equation.outputs, results, strict=True))
        results = [read(x) for x in self.outputs]
        if shape is None:
            return results
        # A constant result has no page to take its shape from.
        return [x if np.ndim(x) else jax.lax.broadcast(x, shape) for x in results]


@dataclasses.dataclass(frozen=True)
class LeafUpdate:
    """One parameter's part of the update, or one moment's that no gradient enters.

    Attributes:
      program: What to compute.
      inputs: Numbers of the values that are the program's arguments.
      outputs: Positions of its results among the traced function's outputs; `~n` for
        a result that is the value numbered `n`, on its way to some of them.
      avals: The results' shapes and dtypes.
      shape: The leaf's shape, that of every array an element-wise program touches.
      owner: The number of the parameter it belongs to, by its gradient or else by its
        place; None if to no single one.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    avals: tuple[Any, ...]
    shape: tuple[int, ...]
    owner: int | None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A traced function, taken apart.

    Attributes:
      constants: Values closed over, by number.
      shared: The program of the scalars shared by all leaves.
      shared_inputs: Numbers of the values that are its arguments.
      shared_outputs: Numbers its results get.
      leaves: One program a leaf.
      tail: What cuts results of joined leaves apart again; empty otherwise.
      tail_inputs: Numbers of the values that are its arguments.
      tail_outputs: Positions of its results among the outputs.
      direct: Outputs that are a numbered value or a constant: position to operand.
      owners: For each output the parameter it belongs to, or None.
    """

    constants: Mapping[int, Any] = dataclasses.field(compare=False)
    shared: Program
    shared_inputs: tuple[int, ...]
    shared_outputs: tuple[int, ...]
    leaves: tuple[LeafUpdate, ...]
    tail: Program
    tail_inputs: tuple[int, ...]
    tail_outputs: tuple[int, ...]
    direct: tuple[tuple[int, Operand], ...]
    owners: tuple[int | None, ...]

    def evaluate(
        self,
        arguments: Sequence[Any],
        run_leaf: Callable[[LeafUpdate, list[Any]], Iterable[Any]],
        own: Mapping[int, Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Computes every output.

        Args:
          arguments: The traced function's arguments.
          run_leaf: Says how a leaf's program is run.
          own: Scalars of which each parameter has one of its own: by the number of the
            argument, one value for each parameter. What the shared program makes of
            them is then made for each.

        Returns:
          The outputs; one that depends on such scalars and belongs to no leaf is a list
          with one value for each parameter.
        """
        values = dict(enumerate(arguments)) | dict(self.constants)

        def share(values: dict[int, Any]) -> dict[int, Any]:
            shared = self.shared([values[i] for i in self.shared_inputs])
            return values | dict(zip(self.shared_outputs, shared, strict=True))

        values = share(values)
        scopes: list[dict[int, Any]] = []
        if own:
            scopes = [
                share(values | {number: each[owner] for number, each in own.items()})
                for owner in range(len(next(iter(own.values()))))
            ]
        made_of_own = self.reached_from(own or ())
        results: dict[int, Any] = {}
        for position, x in self.direct:
            if isinstance(x, Constant):
                results[position] = x.value
            elif x in made_of_own:
                results[position] = [scope[x] for scope in scopes]
            else:
                results[position] = values[x]
        for leaf in self.leaves:
            scope = scopes[leaf.owner] if scopes and leaf.owner is not None else values
            made = run_leaf(leaf, [scope[i] for i in leaf.inputs])
            for position, value in zip(leaf.outputs, made, strict=True):
                if position < 0:
                    values[~position] = value
                else:
                    results[position] = value
        tail = self.tail([values[i] for i in self.tail_inputs])
        results.update(zip(self.tail_outputs, tail, strict=True))
        return [results[position] for position in range(len(results))]

    def reached_from(self, numbers: Iterable[int]) -> set[int]:
        """The shared values that depend on the arguments of these numbers."""
        reached = set(numbers)
        if not reached:
            return reached
        inside = {i for i, x in enumerate(self.shared_inputs) if x in reached}
        for equation in self.shared.equations:
            if inside.intersection(
                x for x in equation.inputs if not isinstance(x, Constant)
            ):
                inside.update(equation.outputs)
        return reached | {
            number
            for number, x in zip(self.shared_outputs, self.shared.outputs, strict=True)
            if x in inside
        }


def _called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | core.Jaxpr | None:
    """The jaxpr that an equation only calls, or None."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def _skips(eqn: core.JaxprEqn) -> bool:
    """Whether a branch hands an argument on, as wrappers do that skip steps.

    Those belong around paging, where a skipped step moves no byte.
    """
    return any(
        result is argument
        for branch in eqn.params["branches"]
        for result in branch.jaxpr.outvars
        for argument in branch.jaxpr.invars
    )


class _Flat:
    """A jaxpr with its calls inlined and its values numbered.

    Args:
      closed: The jaxpr.
      both: Whether a conditional that skips nothing is inlined too: both its branches,
        and a choice between their results.
    """

    def __init__(self, closed: core.ClosedJaxpr, *, both: bool = False):
        self.both = both
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        arguments = [self._number(aval) for aval in closed.in_avals]
        self.outputs = self._inline(closed, arguments)

    @property
    def key(self) -> Any:
        """What two jaxprs have in common that compute the same."""
        closed_over = [(number, id(x)) for number, x in self.constants.items()]
        parts = self.avals, self.equations, self.outputs, closed_over
        return tuple(map(tuple, parts))

    def _number(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _inline(
        self, called: core.ClosedJaxpr | core.Jaxpr, operands: Sequence[Operand]
    ) -> list[Operand]:
        """Adds a jaxpr's equations and constants; returns its outputs."""
        if not isinstance(called, core.ClosedJaxpr):
            called = core.ClosedJaxpr(called, ())  # a checkpoint's, without constants
        jaxpr = called.jaxpr
        scope = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, called.consts, strict=True):
            scope[var] = number = self._number(var.aval)
            self.constants[number] = value
        read = lambda atom: (
            Constant.of(atom) if isinstance(atom, core.Literal) else scope[atom]
        )
        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            if (body := _called(eqn)) is not None:
                outputs = self._inline(body, operands)
            elif self.both and eqn.primitive.name == "cond" and not _skips(eqn):
                which, *given = operands
                results = [self._inline(x, given) for x in eqn.params["branches"]]
                outputs = [self._number(var.aval) for var in eqn.outvars]
                for output, *cases in zip(outputs, *results, strict=True):
                    choice = Equation(lax.select_n_p, (), (which, *cases), (output,))
                    self.equations.append(choice)
            else:
                outputs = [self._number(var.aval) for var in eqn.outvars]
                params = tuple((k, _Opaque.wrap(v)) for k, v in eqn.params.items())
                self.equations.append(
                    Equation(eqn.primitive, params, tuple(operands), tuple(outputs))
                )
            scope.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def size(self, value: int) -> int:
        return math.prod(getattr(self.avals[value], "shape", ()))

    def shape(self, value: Operand) -> tuple[int, ...]:
        if isinstance(value, Constant):
            return np.shape(value.value)
        return self.avals[value].shape

    def made_of(self, values: Iterable[int]) -> set[int]:
        """These values, and all that depend on them."""
        found = set(values)
        for equation in self.equations:
            if not found.isdisjoint(
                x for x in equation.inputs if not isinstance(x, Constant)
            ):
                found.update(equation.outputs)
        return found

    def fit(self, operands: Iterable[Operand], shape: tuple[int, ...]) -> bool:
        """Whether all are of a leaf's shape, or scalars."""
        return all(self.shape(x) in (shape, ()) for x in operands)

    def is_elementwise(self, equation: Equation, shape: tuple[int, ...]) -> bool:
        """Whether it makes each value of a leaf of the same value of its operands."""
        if equation.primitive.name in _FILLS:
            (operand,), (output,) = equation.inputs, equation.outputs
            return self.shape(operand) == () and self.shape(output) == shape
        known = equation.primitive.name in ELEMENTWISE
        return known and self.fit((*equation.inputs, *equation.outputs), shape)

    def program(
        self,
        wanted: Sequence[Operand],
        within: Callable[[int], bool],
        producer: dict[int, int],
        shape: tuple[int, ...],
    ) -> tuple[Program, tuple[int, ...]]:
        """The equations that `wanted` needs, stopping at values not `within`."""
        needed: set[int] = set()
        stack = [x for x in wanted if not isinstance(x, Constant)]
        while stack:
            index = producer.get(value := stack.pop())
            if index is None or index in needed or not within(value):
                continue
            needed.add(index)
            stack += [
                x for x in self.equations[index].inputs if not isinstance(x, Constant)
            ]
        equations = [self.equations[i] for i in sorted(needed)]
        made = {x for equation in equations for x in equation.outputs}
        arguments: dict[int, int] = {}
        for operand in (*(x for e in equations for x in e.inputs), *wanted):
            if not isinstance(operand, Constant) and operand not in made:
                arguments.setdefault(operand, len(arguments))
        names = dict(arguments)
        for equation in equations:
            for value in equation.outputs:
                names[value] = len(names)
        rename = lambda x: x if isinstance(x, Constant) else names[x]
        program = Program(
            inputs=len(arguments),
            equations=tuple(
                Equation(
                    e.primitive,
                    e.params,
                    tuple(map(rename, e.inputs)),
                    tuple(names[x] for x in e.outputs),
                )
                for e in equations
            ),
            outputs=tuple(map(rename, wanted)),
            elementwise=self._elementwise(equations, arguments, wanted, shape),
        )
        return program, tuple(arguments)

    def _elementwise(
        self,
        equations: Sequence[Equation],
        arguments: Iterable[int],
        wanted: Sequence[Operand],
        shape: tuple[int, ...],
    ) -> bool:
        return (
            all(self.shape(x) == shape for x in wanted if not isinstance(x, Constant))
            and self.fit(arguments, shape)
            and all(self.is_elementwise(e, shape) for e in equations)
        )


def _owned(
    flat: _Flat,
    owners: Sequence[int | None],
    of_moments: set[int],
    name: Callable[[int], str],
) -> tuple[list[int | None], dict[int, int], dict[int, None]]:
    """Follows each parameter's gradient through the computation.

    Returns:
      For each value the parameter it depends on; for each value made the position of
      its equation; and the values that are all parameters laid end to end.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if what is laid end to
        end is made of moments.
    """
    owner: list[int | None] = [*owners, *[None] * (len(flat.avals) - len(owners))]
    producer: dict[int, int] = {}
    joined: dict[int, None] = {}
    for index, equation in enumerate(flat.equations):
        whose = {
            o
            for x in equation.inputs
            if not isinstance(x, Constant) and (o := owner[x]) is not None
        }
        primitive = equation.primitive.name
        if _JOINED in whose:
            full = flat.shape(next(iter(joined)))
            alone = whose == {_JOINED} and (
                primitive in _CUTS or flat.is_elementwise(equation, full)
            )
        else:
            alone = len(whose) < 2
        # Laid end to end, what is made of moments would all be on the device at once.
        joins = _JOINED not in whose and of_moments.isdisjoint(equation.outputs)
        if not alone and joins and primitive == "concatenate":
            joined.update((x, None) for x in equation.outputs)
            whose = {_JOINED}
        elif not alone:
            first, second = (sorted(whose - {_JOINED}) + [None, None])[:2]
            raise CrossLeafError(
                f"this transformation cannot be paged: `{primitive}` combines values of"
                f" {'all parameters' if first is None else name(first)}"
                f"{'' if second is None else ' and ' + name(second)}, so no page can be"
                " updated without the others. Chain the part that looks across"
                " parameters outside, as in"
                " optax.chain(optax.clip_by_global_norm(1.0), paged(...)); put wrappers"
                " such as optax.MultiSteps around paged(...)."
            )
        for value in equation.outputs:
            producer[value] = index
            owner[value] = next(iter(whose), None)
    return owner, producer, joined


def analyse(
    closed: core.ClosedJaxpr,
    owners: Sequence[int | None],
    output_owners: Sequence[int | None],
    name: Callable[[int], str],
    replaced: Sequence[int] = (),
) -> Analysis:
    """Takes a traced update apart into one program a leaf.

    Args:
      closed: The traced function.
      owners: For each argument the number of the parameter it belongs to: its
        gradient and the parameter itself. None for state and extra arguments:
        whose they are shows in the computation.
      output_owners: For each output the parameter it belongs to by its place, which
        counts where no gradient enters it; None: no single one.
      name: A readable name of a parameter's number, for messages.
      replaced: For each output the number of the argument in whose place it goes; empty
        where all are new.

    Returns:
      The programs.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if what is laid end to
        end is made of moments.
    """
    # What is made of moments may be on the host, and pages with them.
    moments = [
        value
        for value, (whose, aval) in enumerate(zip(owners, closed.in_avals, strict=True))
        if whose is None and aval.shape and jnp.issubdtype(aval.dtype, jnp.inexact)
    ]

    def followed(flat: _Flat) -> Any:
        of_moments = flat.made_of(moments)
        return flat, of_moments, *_owned(flat, owners, of_moments, name)

    try:
        flat, of_moments, owner, producer, joined = followed(_Flat(closed))
    except CrossLeafError as error:
        # A conditional on all leaves, such as novograd's, may be one on each.
        try:
            flat, of_moments, owner, producer, joined = followed(
                _Flat(closed, both=True)
            )
        except CrossLeafError:
            raise error from None
    is_given = lambda value: value not in producer

    def is_shared(value: int) -> bool:
        small = owner[value] is None and flat.size(value) <= _SHARED_ELEMENTS
        small = small and value not in of_moments
        return small or value in joined

    def is_direct(value: Operand, place: int | None) -> bool:
        if isinstance(value, Constant) or is_shared(value):
            return True
        # What goes elsewhere is copied as any other result: a codec may store it.
        return is_given(value) and (value == place or not flat.shape(value))

    groups: dict[Any, list[int]] = {}
    direct: list[tuple[int, Operand]] = []
    belongs: list[int | None] = []
    for position, value in enumerate(flat.outputs):
        place = replaced[position] if replaced else None
        by_place = output_owners[position]
        whose = None if isinstance(value, Constant) else owner[value]
        if whose is None and place is not None:
            whose = owners[place]  # an update, of the same leaf as its gradient
        belongs.append(by_place if whose in (None, _JOINED) else whose)
        if is_direct(value, place):
            direct.append((position, value))
            continue
        alone = (None, position) if by_place is None else (by_place, flat.shape(value))
        groups.setdefault(alone if whose is None else whose, []).append(position)

    shared: dict[int, None] = dict.fromkeys(
        x for _, x in direct if isinstance(x, int) and not is_given(x)
    )
    share = lambda inputs: shared.update(
        (x, None) for x in inputs if not is_given(x) and is_shared(x)
    )
    # Leaves laid end to end are one leaf to what follows element by element; where
    # the result is cut apart again, that leaf ends and the tail begins.
    full = flat.shape(next(iter(joined))) if joined else ()
    cut_apart = [
        position
        for position in groups.get(_JOINED, ())
        if flat.shape(flat.outputs[position]) != full
    ]

    def in_tail(value: int) -> bool:
        if owner[value] != _JOINED or value in joined:
            return False
        return not flat.is_elementwise(flat.equations[producer[value]], full)

    tail, tail_inputs = flat.program(
        [flat.outputs[p] for p in cut_apart], in_tail, producer, ()
    )
    share(tail_inputs)
    between = [x for x in tail_inputs if not is_given(x) and not is_shared(x)]

    leaves = []
    for key, positions in groups.items():
        outputs = [p for p in positions if p not in cut_apart]
        wanted = [flat.outputs[p] for p in outputs]
        if key == _JOINED:
            wanted += between
            outputs += [~x for x in between]
        shape = flat.shape(wanted[0])
        program, inputs = flat.program(
            wanted, lambda x: not is_shared(x), producer, shape
        )
        share(inputs)
        avals = tuple(
            closed.out_avals[p] if p >= 0 else flat.avals[~p] for p in outputs
        )
        own = None if key == _JOINED else belongs[positions[0]]
        leaves.append(LeafUpdate(program, inputs, tuple(outputs), avals, shape, own))
    program, inputs = flat.program(tuple(shared), lambda _: True, producer, ())
    return Analysis(
        constants=flat.constants,
        shared=program,
        shared_inputs=inputs,
        shared_outputs=tuple(shared),
        leaves=tuple(leaves),
        tail=tail,
        tail_inputs=tail_inputs,
        tail_outputs=tuple(cut_apart),
        direct=tuple(direct),
        owners=tuple(belongs),
    )


def refuse_effects(closed: core.ClosedJaxpr | core.Jaxpr) -> None:
    """Refuses what a traced function does besides returning values.

    Programs hold what their results need, and run once a page, or not at all.

    Raises:
      ValueError: If the function prints, calls back, checks, or writes to a reference.
    """
    for eqn in closed.eqns:
        if (body := _called(eqn)) is not None:
            refuse_effects(body)
        # A collective's effect says along which axis it is: it is in its results.
        elif {type(x).__name__ for x in eqn.effects} - {"NamedAxisEffect"}:
            raise ValueError(
                f"this transformation cannot be paged: `{eqn.primitive.name}` has an"
                " effect besides its results (a print, a callback, a check, a write to"
                " a reference), and pages are computed for their results alone. Chain"
                " the part that has it outside, as in"
                " optax.chain(optax.stateless(...), paged(...))."
            )


def trace(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Traces a function of pytrees as if every array lived whole on the device.

    Returns:
      The closed jaxpr, and the pytree of `ShapeDtypeStruct` it returns.
    """
    # A new function each time: what it reads besides its arguments may have changed.
    anew = lambda *arguments: function(*arguments)
    with without_explicit_axes():
        return jax.make_jaxpr(anew, return_shape=True)(
            *jax.tree.map(abstract, arguments)
        )


def abstract(x: Array | Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, wherever it lives."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
    )
