"""Pieces of a loss: comparison and matching of equations, and roles of arguments."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.splitting.numbered import Member

#: True if an operand of one piece may correspond to an operand of another piece.
Fits = Callable[[Operand, Operand], bool]


class Subprogram(NamedTuple):
    """Equations with renumbered values, so that equal programs compare equal."""

    equations: tuple[Equation, ...]
    arguments: tuple[Operand, ...]  # operands in the loss, with constants
    avals: tuple[Hashable, ...]  # the arguments' shapes and dtypes
    values: tuple[int, ...]  # numbers in the loss of the values after the arguments

    @classmethod
    def of(cls, flat: Flat, positions: Sequence[int]) -> "Subprogram":
        """Renumbers the equations at these positions."""
        chosen = [flat.equations[n] for n in positions]
        results = [x for e in chosen for x in e.outputs]
        inside, names = set(results), dict[int, int]()
        arguments: list[Operand] = []
        for equation in chosen:
            for x in equation.inputs:
                # Constants are arguments, so that layers may differ by a literal.
                if isinstance(x, Constant):
                    arguments.append(x)
                elif x not in inside and x not in names:
                    names[x] = len(arguments)
                    arguments.append(x)
        count = len(arguments)
        # Values are numbered by their places within the layer, not within the loss.
        names |= {x: count + k for k, x in enumerate(results)}
        constants = iter(k for k, x in enumerate(arguments) if isinstance(x, Constant))
        rename = lambda x: next(constants) if isinstance(x, Constant) else names[x]
        equations = tuple(
            e.of(map(rename, e.inputs), map(names.__getitem__, e.outputs))
            for e in chosen
        )
        avals = tuple(aval_of(flat, x) for x in arguments)
        return cls(equations, tuple(arguments), avals, tuple(results))

    @property
    def key(self) -> Hashable:
        """Equal for subprograms with the same computation."""
        return self.equations, self.avals


def aval_of(flat: Flat, x: Operand) -> Hashable:
    """An operand's shape and dtype."""
    if isinstance(x, Constant):
        return x.key[1:3]
    return flat.avals[x].shape, str(flat.avals[x].dtype)


class _Matching:
    """The equations of a template that are matched so far."""

    def __init__(self, flat: Flat, template: Sequence[int], fits: Fits):
        self.flat, self.fits = flat, fits
        self.inside = {x for n in template for x in flat.equations[n].outputs}
        self.values: dict[int, int] = {}

    def equal(self, n: int, m: int) -> bool:
        """True if two equations are equal, given the matches so far."""
        one, other = self.flat.equations[n], self.flat.equations[m]
        if one.primitive is not other.primitive or len(one.inputs) != len(other.inputs):
            return False
        shape = lambda e: [aval_of(self.flat, x) for x in (*e.inputs, *e.outputs)]
        # A constant and a value may match: the first layer may read a literal where
        # others read a value.
        if shape(one) != shape(other) or one.params != other.params:
            return False
        return all(map(self._may_be, one.inputs, other.inputs))

    def _may_be(self, x: Operand, y: Operand) -> bool:
        if isinstance(x, Constant):
            return isinstance(y, Constant)
        if isinstance(y, Constant):
            return x not in self.inside and self.fits(x, y)
        # A value keeps its counterpart. A value from outside may get any.
        if x in self.values:
            return self.values[x] == y
        return x not in self.inside and self.fits(x, y)

    def put(self, n: int, m: int) -> None:
        one, other = self.flat.equations[n], self.flat.equations[m]
        self.values.update(zip(one.outputs, other.outputs, strict=True))
        for x, y in zip(one.inputs, other.inputs, strict=True):
            if not isinstance(x, Constant) and not isinstance(y, Constant):
                self.values[x] = y


def match_backward(
    flat: Flat,
    producer: Mapping[int, int],
    template: Sequence[int],
    results: Sequence[tuple[int, int]],
    fits: Fits,
) -> Sequence[int] | None:
    """Matches equations with a template from its results backward.

    `results` pairs the template's results with the corresponding values.
    """
    # Equations are paired by the places of their results among operands. They are
    # compared afterwards, in the order of the trace.
    inside = {x: n for n in template for x in flat.equations[n].outputs}
    pairs: dict[int, int] = {}
    stack = list(results)
    while stack:
        x, y = stack.pop()
        n = inside.get(x)
        if n is None or n in pairs:
            continue
        m = producer.get(y)
        one = flat.equations[n]
        if m is None or len(one.inputs) != len(flat.equations[m].inputs):
            return None
        pairs[n] = m
        both = zip(one.inputs, flat.equations[m].inputs, strict=True)
        for a, b in both:
            if not isinstance(a, Constant) and not isinstance(b, Constant):
                stack.append((a, b))
    matched = _Matching(flat, sorted(pairs), fits)
    for n in sorted(pairs):
        if not matched.equal(n, pairs[n]):
            return None
        matched.put(n, pairs[n])
    # Another operand may have matched a result with another value.
    if any(matched.values.get(x, y) != y for x, y in results):
        return None
    return list(pairs.values())


def match_forward(
    flat: Flat, template: Sequence[int], candidates: Sequence[int], fits: Fits
) -> Sequence[int] | None:
    """Matches equations with a template from its inputs forward.

    The template and the candidates are in topological order.
    """
    matched = _Matching(flat, template, fits)
    rest, equations = list(candidates), list[int]()
    for n in template:
        m = next((m for m in rest if matched.equal(n, m)), None)
        if m is None:
            return None
        matched.put(n, m)
        rest.remove(m)
        equations.append(m)
    return equations


class Weight(NamedTuple):
    """A parameter of the layer."""

    member: Member


class Carried(NamedTuple):
    """A value of the carry."""

    slot: int


class Seen(NamedTuple):
    """A value from before the layers, the same for all layers."""

    value: int


class FromTable(NamedTuple):
    """A layer's row of a table."""

    table: int


class Fixed(NamedTuple):
    """A constant of the program."""

    value: ArrayLike


#: The role of a layer's argument.
Role = Weight | Carried | Seen | FromTable | Fixed


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """The program of equal layers."""

    program: Callable[[Sequence[ArrayLike]], Sequence[ArrayLike]]
    roles: tuple[Role, ...]
    # For each slot, the index of the result with its next value; None if the slot keeps
    # its value.
    carried: tuple[int | None, ...]
    # For each kept value, the index of its result; None if layers of this kind do not
    # compute it.
    kept: tuple[int | None, ...]


class FromCarry(NamedTuple):
    """A value that the epilogue reads from the last layer's carry."""

    slot: int


class FromKept(NamedTuple):
    """A value that the epilogue reads from a layer's kept values; None: all layers'."""

    number: int
    layer: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A loss split into prologue, kinds of layers, and epilogue."""

    flat: Flat
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]  # of each layer
    # First value of each slot of the carry; None for zeros.
    initial: tuple[Operand | None, ...]
    carried: tuple[ShapedArray, ...]  # the slots' shapes and dtypes
    # Arguments that differ between layers: an operand for each layer (None if the layer
    # needs none), or one operand with layers on its leading axis.
    tables: tuple[Sequence[Operand | None] | Operand, ...]
    # Shapes and dtypes of the values that each layer keeps.
    kept: tuple[ShapedArray, ...]
    # Values of layers that the epilogue reads.
    after: Mapping[int, FromCarry | FromKept]
    inside: frozenset[int]  # values that layers compute

    @property
    def seen(self) -> tuple[int, ...]:
        """The values that all layers read, without the constants of the loss."""
        roles = (role for kind in self.kinds for role in kind.roles)
        values = dict.fromkeys(role.value for role in roles if isinstance(role, Seen))
        return tuple(x for x in values if x not in self.flat.constants)
