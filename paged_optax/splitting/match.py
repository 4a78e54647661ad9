"""Whether pieces are alike: what one of them computes, found again elsewhere."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand

#: Whether one operand may stand where another one stands: of what is given to a piece.
Fits = Callable[[Operand, Operand], bool]


class Straight(NamedTuple):
    """Equations whose values are numbered anew, so that alike ones are equal.

    Attributes:
      equations: The equations. Constants are arguments too.
      arguments: What the arguments are in the loss.
      avals: Their shapes and dtypes.
      values: What the values after the arguments are in the loss.
    """

    equations: tuple[Equation, ...]
    arguments: tuple[Operand, ...]
    avals: tuple[Hashable, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, flat: Flat, positions: Sequence[int]) -> "Straight":
        """The equations at these positions."""
        chosen = [flat.equations[n] for n in positions]
        made = [x for e in chosen for x in e.outputs]
        inside, names = set(made), dict[int, int]()
        arguments: list[Operand] = []
        for equation in chosen:
            for x in equation.inputs:
                if isinstance(x, Constant):
                    arguments.append(x)
                elif x not in inside and x not in names:
                    names[x] = len(arguments)
                    arguments.append(x)
        count = len(arguments)
        names |= {x: count + k for k, x in enumerate(made)}
        constants = iter(k for k, x in enumerate(arguments) if isinstance(x, Constant))
        rename = lambda x: next(constants) if isinstance(x, Constant) else names[x]
        equations = tuple(
            e.of(map(rename, e.inputs), map(names.__getitem__, e.outputs))
            for e in chosen
        )
        avals = tuple(aval_of(flat, x) for x in arguments)
        return cls(equations, tuple(arguments), avals, tuple(made))

    @property
    def key(self) -> Hashable:
        """Equal for pieces that compute the same."""
        return self.equations, self.avals


def aval_of(flat: Flat, x: Operand) -> Hashable:
    """An operand's shape and dtype."""
    if isinstance(x, Constant):
        return x.key[1:3]
    return flat.avals[x].shape, str(flat.avals[x].dtype)


class Found(NamedTuple):
    """Equations and values of one piece, and those of another in their places."""

    equations: dict[int, int]
    values: dict[int, int]


class _Matched:
    """Equations that are being matched with others."""

    def __init__(self, flat: Flat, template: Sequence[int], fits: Fits):
        self.flat, self.fits = flat, fits
        self.inside = {x for n in template for x in flat.equations[n].outputs}
        self.equations: dict[int, int] = {}
        self.values: dict[int, int] = {}

    def alike(self, n: int, m: int) -> bool:
        """Whether two equations do the same with what has been matched so far."""
        one, other = self.flat.equations[n], self.flat.equations[m]
        if one.primitive is not other.primitive or len(one.inputs) != len(other.inputs):
            return False
        shape = lambda e: [aval_of(self.flat, x) for x in (*e.inputs, *e.outputs)]
        # What is made before the first layer may be a number of the program.
        if shape(one) != shape(other) or one.params != other.params:
            return False
        return all(map(self._may_be, one.inputs, other.inputs))

    def _may_be(self, x: Operand, y: Operand) -> bool:
        if isinstance(x, Constant):
            return isinstance(y, Constant)
        if isinstance(y, Constant):
            return x not in self.inside and self.fits(x, y)
        if x in self.values:
            return self.values[x] == y
        return x not in self.inside and self.fits(x, y)

    def put(self, n: int, m: int) -> None:
        """Matches two equations."""
        one, other = self.flat.equations[n], self.flat.equations[m]
        self.equations[n] = m
        self.values.update(zip(one.outputs, other.outputs, strict=True))
        for x, y in zip(one.inputs, other.inputs, strict=True):
            if not isinstance(x, Constant) and not isinstance(y, Constant):
                self.values[x] = y


def found_before(
    flat: Flat,
    producer: Callable[[int], int | None],
    template: Sequence[int],
    results: Sequence[tuple[int, int]],
    fits: Fits,
) -> Found | None:
    """What makes some values as a piece makes others, followed from its results.

    Args:
      flat: The loss.
      producer: The position of the equation that makes a value, or None.
      template: The piece's equations.
      results: The piece's results, and the values in their places.
      fits: What may be given in the place of what the piece is given.
    """
    inside = {x: n for n in template for x in flat.equations[n].outputs}
    pairs: dict[int, int] = {}
    stack = list(results)
    while stack:
        x, y = stack.pop()
        n = inside.get(x)
        if n is None or n in pairs:
            continue
        m = producer(y)
        one = flat.equations[n]
        if m is None or len(one.inputs) != len(flat.equations[m].inputs):
            return None
        pairs[n] = m
        both = zip(one.inputs, flat.equations[m].inputs, strict=True)
        for a, b in both:
            if not isinstance(a, Constant) and not isinstance(b, Constant):
                stack.append((a, b))
    matched = _Matched(flat, sorted(pairs), fits)
    for n in sorted(pairs):
        if not matched.alike(n, pairs[n]):
            return None
        matched.put(n, pairs[n])
    if any(matched.values.get(x, y) != y for x, y in results):
        return None
    return Found(matched.equations, matched.values)


def found_after(
    flat: Flat, template: Sequence[int], candidates: Sequence[int], fits: Fits
) -> Found | None:
    """What computes the same as a piece, followed from what it is given.

    Args:
      flat: The loss.
      template: The piece's equations, in an order in which they can be computed.
      candidates: The equations among which to look, in such an order too.
      fits: What may be given in the place of what the piece is given.
    """
    matched = _Matched(flat, template, fits)
    left = list(candidates)
    for n in template:
        k = next((k for k, m in enumerate(left) if matched.alike(n, m)), None)
        if k is None:
            return None
        matched.put(n, left.pop(k))
    return Found(matched.equations, matched.values)
