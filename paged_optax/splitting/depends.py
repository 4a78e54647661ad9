"""Which layer's parameters each value of a loss is made of."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.splitting.lines import line_of


class SplitError(ValueError):
    """A loss is not computed layer by layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Depends:
    """What each value of a loss depends on.

    Attributes:
      flat: The loss.
      live: The equations that the loss needs, by their positions.
      producer: For each value that is made the position of its equation.
      layer: For each parameter of a layer the layer, in the order of their turns.
      count: How many layers there are.
      learned: The values that depend on parameters.
      after: For each learned value the last layer that it depends on; -1: none. A value
        of several layers' parameters alone is computed after all of them.
      pure: For each value that depends on parameters of layers and nothing else, those
        layers. They may be made early, as all casts of a model to bfloat16 are, and are
        counted to the layer.
    """

    flat: Flat
    live: tuple[int, ...]
    producer: Mapping[int, int]
    layer: Mapping[int, int]
    count: int
    learned: frozenset[int]
    after: Mapping[int, int]
    pure: Mapping[int, frozenset[int]]

    @classmethod
    def of(
        cls, flat: Flat, weights: Sequence[int], members: Sequence[Sequence[int]]
    ) -> "Depends":
        """Follows the parameters.

        Args:
          flat: The loss.
          weights: All parameters.
          members: Those of each layer, in any order of the layers.

        Raises:
          SplitError: If a layer is not used.
        """
        producer = {x: n for n, e in enumerate(flat.equations) for x in e.outputs}
        live = live_of(flat, producer)
        owner = {leaf: n for n, leaves in enumerate(members) for leaf in leaves}
        rest = set(weights) - set(owner)
        pure, first = _pure(flat, live, owner, set(flat.constants), rest)
        turns = {n: k for k, n in enumerate(sorted(first, key=lambda n: first[n]))}
        if missing := sorted(set(range(len(members))) - set(turns)):
            _refuse_together(flat, live, pure, missing[0])
            raise SplitError(
                f"the loss does not use layer {missing[0]} of {len(members)}: leave it"
                " out of the parameters, or name other layers by layers=."
            )
        layer = {leaf: turns[n] for leaf, n in owner.items()}
        pure = {x: frozenset(turns[n] for n in of) for x, of in pure.items()}
        learned = set(weights)
        last = {x: -1 for x in weights} | layer
        for n in live:
            equation = flat.equations[n]
            given = [x for x in values_in(equation) if x in learned]
            if not given:
                continue
            learned.update(equation.outputs)
            several = [pure[x] for x in equation.outputs if len(pure.get(x, ())) > 1]
            turn = len(members) if several else max(last[x] for x in given)
            last.update(dict.fromkeys(equation.outputs, turn))
        _sink(flat, live, pure, layer, last, len(members))
        return cls(
            flat, live, producer, layer, len(members), frozenset(learned), last, pure
        )

    @functools.cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """For each layer the equations that take its parameters and something else."""
        users: dict[int, set[int]] = {turn: set() for turn in range(self.count)}
        for n in self.live:
            if not self.is_pure(n):
                for turn in self.uses(n):
                    users[turn].add(n)
        return {turn: frozenset(found) for turn, found in users.items()}

    def is_learned(self, n: int) -> bool:
        """Whether an equation depends on parameters."""
        return any(x in self.learned for x in self.flat.equations[n].outputs)

    def is_pure(self, n: int) -> bool:
        """Whether an equation depends on parameters of layers and nothing else."""
        return bool(self.pure.get(self.flat.equations[n].outputs[0]))

    def turn(self, n: int) -> int:
        """The last layer that an equation depends on; -1: none."""
        return self.after.get(self.flat.equations[n].outputs[0], -1)

    def uses(self, n: int) -> set[int]:
        """The layers whose parameters an equation takes, as they are or prepared."""
        given = values_in(self.flat.equations[n])
        return set().union(*(self.pure.get(x, ()) for x in given))

    def line(self, n: int) -> str:
        """The line of the model that an equation is from.

        If it has none, that of one that takes its values, or theirs in turn; or else of
        one that it takes a value of; or of one that takes the same layers' parameters.
        """
        return line_of(self.flat.equations[n], self._near(n))

    def _near(self, n: int) -> Iterator[Equation]:
        """Equations after this one, then before it, and beside it."""
        equations = self.flat.equations
        made, later = set(equations[n].outputs), sorted(x for x in self.live if x > n)
        for m in later:
            if not made.isdisjoint(values_in(equations[m])):
                made.update(equations[m].outputs)
                yield equations[m]
        taken = set(values_in(equations[n]))
        for m in sorted((x for x in self.live if x < n), reverse=True):
            if not taken.isdisjoint(equations[m].outputs):
                taken.update(values_in(equations[m]))
                yield equations[m]
        for layer in sorted(self.uses(n)):
            yield from (equations[m] for m in sorted(self.users[layer]))


def values_in(equation: Equation) -> list[int]:
    """The values among an equation's operands."""
    return [x for x in equation.inputs if not isinstance(x, Constant)]


def values_of(operands: Sequence[Operand]) -> list[int]:
    """The values among operands."""
    return [x for x in operands if not isinstance(x, Constant)]


def _refuse_together(
    flat: Flat, live: Sequence[int], pure: Mapping[int, frozenset[int]], layer: int
) -> None:
    """Refuses a layer whose parameters are used with those of others alone."""
    for n in live:
        of = pure.get(flat.equations[n].outputs[0], frozenset())
        if layer in of and len(of) > 1:
            raise SplitError(
                f"the parameters of several layers are put together at"
                f" {line_of(flat.equations[n])}, and used as one array: use them one"
                " after the other, or stack them before, outside the loss, and let the"
                " loss scan over the stacks."
            )


def live_of(flat: Flat, producer: Mapping[int, int]) -> tuple[int, ...]:
    """The equations that the outputs need."""
    needed: set[int] = set()
    stack = values_of(flat.outputs)
    while stack:
        n = producer.get(stack.pop())
        if n is not None and n not in needed:
            needed.add(n)
            stack += values_in(flat.equations[n])
    return tuple(sorted(needed))


def _pure(
    flat: Flat,
    live: Sequence[int],
    owner: Mapping[int, int],
    constants: set[int],
    rest: set[int],
) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """Values made of layers' parameters alone, and where each layer is first used.

    A scalar of other parameters is no more than a constant beside a layer's scalar: a
    sum of all norms may begin with an embedding's.
    """
    others, single = set(rest), lambda x: flat.size(x) == 1
    pure: dict[int, frozenset[int]] = dict.fromkeys(constants, frozenset())
    pure |= {leaf: frozenset([n]) for leaf, n in owner.items()}
    first: dict[int, int] = {}
    for n in live:
        equation = flat.equations[n]
        given = values_in(equation)
        of = [pure.get(x) for x in given]
        if all(x in pure or x in others for x in given):
            beside = others.intersection(given)
            made = frozenset[int]().union(*(x for x in of if x is not None))
            if beside and not made:
                others.update(equation.outputs)
                continue
            if not beside or all(map(single, (*beside, *equation.outputs))):
                pure.update(dict.fromkeys(equation.outputs, made))
                continue
        for layers in of:
            if layers and len(layers) == 1:
                first.setdefault(next(iter(layers)), n)
    return {x: of for x, of in pure.items() if of}, first


def _sink(
    flat: Flat,
    live: Sequence[int],
    pure: Mapping[int, frozenset[int]],
    layer: Mapping[int, int],
    last: dict[int, int],
    count: int,
) -> None:
    """Counts scalars of a layer's norms that only all layers' sums need to these sums.

    Else the first layer, where such a sum begins, would be unlike the others.
    """
    users: dict[int, list[int]] = {}
    for n in reversed(live):
        equation = flat.equations[n]
        given, made = values_in(equation), equation.outputs
        late = [last.get(x) == count for y in made for x in users.get(y, ())]
        small = all(flat.size(x) == 1 and x not in layer for x in (*given, *made))
        if pure.get(made[0]) and small and late and all(late):
            last.update(dict.fromkeys(made, count))
        for x in given:
            users.setdefault(x, []).append(made[0])
