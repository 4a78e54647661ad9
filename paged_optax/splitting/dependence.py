"""Dependencies of the values of a loss on layers, and the lines of equations."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from jax.extend import core

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand

# Packages whose lines are not the user's.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|flax|haiku|equinox|optax|qwix|paged_optax)[/\\]"
)


def line_of(equation: Equation, nearby: Iterable[Equation] = ()) -> str:
    """Returns the line of the model that an equation was traced from.

    For equations inside a library's module this is the model's call of the module.
    Without a line, as within `jnp.clip`, a nearby equation's line is returned.
    """
    equation = next((e for e in (equation, *nearby) if e.line), equation)
    where, traced = equation.where, equation.traced
    traceback = traced and traced.source_info.traceback
    if not traceback or not _LIBRARIES.search(where):
        return where
    frames = traceback.frames
    for place, frame in enumerate(frames):
        if where.startswith(f"{frame.file_name}:"):
            # Outward, to the first line that is no library's.
            for outer in frames[place:]:
                if not _LIBRARIES.search(outer.file_name):
                    line = f"{outer.file_name}:{outer.line_num}"
                    return f"{line} ({outer.function_name}), which calls {where}"
    return where


class SplitError(ValueError):
    """Raised if a loss is not computed layer by layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Depends:
    """The layers and parameters that each value of a loss depends on.

    Attributes:
      flat: The loss.
      live: The positions of the equations that the loss needs.
      producer: The position of the equation that computes each value.
      layer: The layer of each parameter, in the order of computation.
      count: The number of layers.
      learned: The values that depend on parameters.
      after: The last layer that each learned value depends on, or -1. A value of
        parameters of several layers only is computed after all of them.
      pure: The layers of each value of layers' parameters only. Such values may be
        computed early, such as casts of a whole model to bfloat16, and belong to their
        layer.
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
        """Follows the parameters `weights`; `members` has those by layer."""
        producer = producers_of(flat)
        live = live_of(flat, producer)
        owner = {leaf: n for n, leaves in enumerate(members) for leaf in leaves}
        rest = set(weights) - set(owner)
        pure, first = _pure(flat, live, owner, set(flat.constants), rest)
        # Layers are ordered by their first use, whatever their numbers.
        turns = {n: k for k, n in enumerate(sorted(first, key=lambda n: first[n]))}
        if missing := sorted(set(range(len(members))) - set(turns)):
            _refuse_together(flat, live, pure, missing[0])
            raise SplitError(
                f"the loss does not use layer {missing[0]} of {len(members)}: leave it"
                " out of the parameters, or name other layers by layers=."
            )
        layer = {leaf: turns[n] for leaf, n in owner.items()}
        pure = {x: frozenset(turns[n] for n in layers) for x, layers in pure.items()}
        learned = set(weights)
        last = {x: -1 for x in weights} | layer
        for n in live:
            equation = flat.equations[n]
            taken = [x for x in values_in(equation) if x in learned]
            if not taken:
                continue
            learned.update(equation.outputs)
            # Values of several layers' parameters only belong to no layer.
            several = [pure[x] for x in equation.outputs if len(pure.get(x, ())) > 1]
            turn = len(members) if several else max(last[x] for x in taken)
            last.update(dict.fromkeys(equation.outputs, turn))
        _sink(flat, live, pure, layer, last, len(members))
        return cls(
            flat, live, producer, layer, len(members), frozenset(learned), last, pure
        )

    @functools.cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """For each layer the equations that take its parameters and other values."""
        users: dict[int, set[int]] = {turn: set() for turn in range(self.count)}
        for n in self.live:
            if not self.is_pure(n):
                for turn in self.uses(n):
                    users[turn].add(n)
        return {turn: frozenset(equations) for turn, equations in users.items()}

    def is_learned(self, n: int) -> bool:
        """Returns whether an equation depends on parameters."""
        return any(x in self.learned for x in self.flat.equations[n].outputs)

    def is_pure(self, n: int) -> bool:
        """Returns whether an equation depends on layers' parameters only."""
        return bool(self.pure.get(self.flat.equations[n].outputs[0]))

    def turn(self, n: int) -> int:
        """Returns the last layer that an equation depends on, or -1."""
        return self.after.get(self.flat.equations[n].outputs[0], -1)

    def uses(self, n: int) -> set[int]:
        """Returns the layers whose parameters an equation takes, prepared or not."""
        taken = values_in(self.flat.equations[n])
        return set().union(*(self.pure.get(x, ()) for x in taken))

    def line(self, n: int) -> str:
        """Returns the line of an equation, or of a nearby one."""
        return line_of(self.flat.equations[n], self._near(n))

    def _near(self, n: int) -> Iterator[Equation]:
        """Yields later equations, then earlier ones, then equations of its layers."""
        equations = self.flat.equations
        reached, later = (
            set(equations[n].outputs),
            sorted(x for x in self.live if x > n),
        )
        for m in later:
            if not reached.isdisjoint(values_in(equations[m])):
                reached.update(equations[m].outputs)
                yield equations[m]
        taken = set(values_in(equations[n]))
        for m in sorted((x for x in self.live if x < n), reverse=True):
            if not taken.isdisjoint(equations[m].outputs):
                taken.update(values_in(equations[m]))
                yield equations[m]
        for layer in sorted(self.uses(n)):
            yield from (equations[m] for m in sorted(self.users[layer]))


def values_in(equation: Equation) -> list[int]:
    """Returns the values among an equation's operands."""
    return values_of(equation.inputs)


def values_of(operands: Sequence[Operand]) -> list[int]:
    """Returns the values among operands."""
    return [x for x in operands if not isinstance(x, Constant)]


def producers_of(flat: Flat) -> dict[int, int]:
    """Returns the position of the equation that computes each value."""
    return {x: n for n, e in enumerate(flat.equations) for x in e.outputs}


def _refuse_together(
    flat: Flat, live: Sequence[int], pure: Mapping[int, frozenset[int]], layer: int
) -> None:
    """Raises if a layer's parameters are only used combined with others'."""
    for n in live:
        layers = pure.get(flat.equations[n].outputs[0], frozenset())
        if layer in layers and len(layers) > 1:
            raise SplitError(
                f"the parameters of several layers are put together at"
                f" {line_of(flat.equations[n])}, and used as one array: use them one"
                " after the other, or stack them before, outside the loss, and let the"
                " loss scan over the stacks."
            )


def live_of(flat: Flat, producer: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the equations that the outputs need."""
    needed: set[int] = set()
    stack = values_of(flat.outputs)
    while stack:
        n = producer.get(stack.pop())
        if n is not None and n not in needed:
            needed.add(n)
            stack += values_in(flat.equations[n])
    return tuple(sorted(needed))


def repeated_keys(
    jaxpr: core.Jaxpr, given: Sequence[Set[int | None]]
) -> set[int | None]:
    """Returns the sources of random numbers that depend on nothing else.

    Args:
      jaxpr: A function.
      given: The sources of each argument; None for arguments that may change.
    """
    repeated = set[int | None]()
    sources = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        each = [
            set() if isinstance(x, core.Literal) else sources.get(x, set())
            for x in eqn.invars
        ]
        union = set().union(*each)
        if eqn.primitive.name in ("random_bits", "random_gamma") and None not in union:
            repeated |= union
        for inner in core.jaxprs_in_params(eqn.params):
            # Calls, branches and loop bodies take the last operands.
            count = len(inner.invars)
            last = each[-count:] if 0 < count <= len(each) else [union] * count
            repeated |= repeated_keys(inner, last)
        sources.update(dict.fromkeys(eqn.outvars, union))
    return repeated


def _pure(
    flat: Flat,
    live: Sequence[int],
    owner: Mapping[int, int],
    constants: set[int],
    rest: set[int],
) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """Returns the values of layers' parameters only, and each layer's first use."""
    # Scalars of other parameters are constants where a layer's scalar is added: a sum
    # of norms may begin with the embedding's.
    others, single = set(rest), lambda x: flat.size(x) == 1
    pure: dict[int, frozenset[int]] = dict.fromkeys(constants, frozenset())
    pure |= {leaf: frozenset([n]) for leaf, n in owner.items()}
    first: dict[int, int] = {}
    for n in live:
        equation = flat.equations[n]
        taken = values_in(equation)
        layers_of = [pure.get(x) for x in taken]
        if all(x in pure or x in others for x in taken):
            scalars = others.intersection(taken)
            union = frozenset[int]().union(*(x for x in layers_of if x is not None))
            if scalars and not union:
                others.update(equation.outputs)
                continue
            if not scalars or all(map(single, (*scalars, *equation.outputs))):
                pure.update(dict.fromkeys(equation.outputs, union))
                continue
        # A layer is first used where its parameters meet other values.
        for each in layers_of:
            if each and len(each) == 1:
                first.setdefault(next(iter(each)), n)
    return {x: layers for x, layers in pure.items() if layers}, first


def _sink(
    flat: Flat,
    live: Sequence[int],
    pure: Mapping[int, frozenset[int]],
    layer: Mapping[int, int],
    last: dict[int, int],
    count: int,
) -> None:
    """Moves scalars of a layer's parameters, such as norms, after all layers."""
    # Otherwise the first layer, where such a sum begins, would be unlike the others.
    users: dict[int, list[int]] = {}
    for n in reversed(live):
        equation = flat.equations[n]
        taken, results = values_in(equation), equation.outputs
        late = [last.get(x) == count for y in results for x in users.get(y, ())]
        small = all(flat.size(x) == 1 and x not in layer for x in (*taken, *results))
        if pure.get(results[0]) and small and late and all(late):
            last.update(dict.fromkeys(results, count))
        for x in taken:
            users.setdefault(x, []).append(results[0])
