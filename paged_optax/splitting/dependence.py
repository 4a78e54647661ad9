"""Dependence of a loss's values on the parameters of layers, and source lines."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from jax.extend import core

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand

# Installed packages that models are built with. Errors point to the user's own line.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|flax|haiku|equinox|optax|qwix|paged_optax)[/\\]"
)


def line_of(equation: Equation, nearby: Iterable[Equation] = ()) -> str:
    """Returns the line of the model that an equation was traced from.

    For an equation of a library's module, this is the line that calls the module. An
    equation without a line, as within `jnp.clip`, has the line of one of the `nearby`
    equations.
    """
    equation = next((e for e in (equation, *nearby) if e.line), equation)
    where, traced = equation.where, equation.traced
    traceback = traced and traced.source_info.traceback
    if not traceback or not _LIBRARIES.search(where):
        return where
    frames = traceback.frames
    for place, frame in enumerate(frames):
        if where.startswith(f"{frame.file_name}:"):
            # Outward, to the first line outside the libraries.
            for outer in frames[place:]:
                if not _LIBRARIES.search(outer.file_name):
                    line = f"{outer.file_name}:{outer.line_num}"
                    return f"{line} ({outer.function_name}), which calls {where}"
    return where


class SplitError(ValueError):
    """Raised for a loss that is not computed layer by layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Depends:
    """Layers and parameters that each value of a loss depends on."""

    flat: Flat
    live: tuple[int, ...]  # positions of the equations that the loss needs
    producer: Mapping[int, int]  # position of the equation that computes each value
    layer: Mapping[int, int]  # of each parameter, in the order of computation
    count: int  # number of layers
    learned: frozenset[int]  # values that depend on parameters
    # The last layer that each learned value depends on; -1 for none. A value that
    # depends only on parameters of several layers comes after all layers.
    after: Mapping[int, int]
    # The layers of each value that depends only on parameters of layers. The loss may
    # compute such values early, for example a cast of the whole model to bfloat16; they
    # belong to their layer.
    pure: Mapping[int, frozenset[int]]

    @classmethod
    def of(
        cls, flat: Flat, weights: Sequence[int], members: Sequence[Sequence[int]]
    ) -> "Depends":
        """Follows the parameters `weights`, with each layer's `members`."""
        producer = producers_of(flat)
        live = live_of(flat, producer)
        owner = {leaf: n for n, leaves in enumerate(members) for leaf in leaves}
        rest = set(weights) - set(owner)
        pure, first = _pure(flat, live, owner, set(flat.constants), rest)
        # Layers are ordered by their first use, whatever their numbers.
        order = {n: k for k, n in enumerate(sorted(first, key=lambda n: first[n]))}
        if missing := sorted(set(range(len(members))) - set(order)):
            _refuse_together(flat, live, pure, missing[0])
            raise SplitError(
                f"the loss does not use layer {missing[0]} of {len(members)}. Remove"
                " it from the parameters, or name other layers with layers=."
            )
        layer = {leaf: order[n] for leaf, n in owner.items()}
        pure = {x: frozenset(order[n] for n in layers) for x, layers in pure.items()}
        learned = set(weights)
        last = {x: -1 for x in weights} | layer
        for n in live:
            equation = flat.equations[n]
            operands = [x for x in values_in(equation) if x in learned]
            if not operands:
                continue
            learned.update(equation.outputs)
            # A value of several layers' parameters alone belongs to no layer.
            several = [pure[x] for x in equation.outputs if len(pure.get(x, ())) > 1]
            turn = len(members) if several else max(last[x] for x in operands)
            last.update(dict.fromkeys(equation.outputs, turn))
        _sink(flat, live, pure, layer, last, len(members))
        return cls(
            flat, live, producer, layer, len(members), frozenset(learned), last, pure
        )

    @functools.cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """Equations that combine a layer's parameters with other values, by layer."""
        users: dict[int, set[int]] = {turn: set() for turn in range(self.count)}
        for n in self.live:
            if not self.is_pure(n):
                for turn in self.uses(n):
                    users[turn].add(n)
        return {turn: frozenset(equations) for turn, equations in users.items()}

    def is_learned(self, n: int) -> bool:
        """True if an equation depends on parameters."""
        return any(x in self.learned for x in self.flat.equations[n].outputs)

    def is_pure(self, n: int) -> bool:
        """True if an equation depends only on parameters of layers."""
        return bool(self.pure.get(self.flat.equations[n].outputs[0]))

    def last_layer(self, n: int) -> int:
        """The last layer that an equation depends on; -1 for none."""
        return self.after.get(self.flat.equations[n].outputs[0], -1)

    def uses(self, n: int) -> set[int]:
        """The layers whose parameters an equation reads, directly or prepared."""
        operands = values_in(self.flat.equations[n])
        return set().union(*(self.pure.get(x, ()) for x in operands))

    def line(self, n: int) -> str:
        """The line of the model that an equation was traced from, see `line_of`."""
        return line_of(self.flat.equations[n], self._near(n))

    def _near(self, n: int) -> Iterator[Equation]:
        """Equations after this one, then before it, then of the same layers."""
        equations = self.flat.equations
        reached = set(equations[n].outputs)
        for m in sorted(x for x in self.live if x > n):
            if not reached.isdisjoint(values_in(equations[m])):
                reached.update(equations[m].outputs)
                yield equations[m]
        operands = set(values_in(equations[n]))
        for m in sorted((x for x in self.live if x < n), reverse=True):
            if not operands.isdisjoint(equations[m].outputs):
                operands.update(values_in(equations[m]))
                yield equations[m]
        for layer in sorted(self.uses(n)):
            yield from (equations[m] for m in sorted(self.users[layer]))


def values_in(equation: Equation) -> list[int]:
    """Values among an equation's operands."""
    return values_of(equation.inputs)


def values_of(operands: Sequence[Operand]) -> list[int]:
    """Values among operands, without constants."""
    return [x for x in operands if not isinstance(x, Constant)]


def producers_of(flat: Flat) -> dict[int, int]:
    """Maps each value to the position of the equation that computes it."""
    return {x: n for n, e in enumerate(flat.equations) for x in e.outputs}


def _refuse_together(
    flat: Flat, live: Sequence[int], pure: Mapping[int, frozenset[int]], layer: int
) -> None:
    for n in live:
        layers = pure.get(flat.equations[n].outputs[0], frozenset())
        if layer in layers and len(layers) > 1:
            raise SplitError(
                f"the parameters of several layers are put together at"
                f" {line_of(flat.equations[n])} and used as one array. Use them layer"
                " by layer, or stack them before, outside the loss, and scan over the"
                " stacks."
            )


def live_of(flat: Flat, producer: Mapping[int, int]) -> tuple[int, ...]:
    """Positions of the equations that the outputs depend on."""
    needed: set[int] = set()
    stack = values_of(flat.outputs)
    while stack:
        n = producer.get(stack.pop())
        if n is not None and n not in needed:
            needed.add(n)
            stack += values_in(flat.equations[n])
    return tuple(sorted(needed))


def repeated_keys(
    jaxpr: core.Jaxpr, sources: Sequence[Set[int | None]]
) -> set[int | None]:
    """Returns the sources of random numbers that depend on no other source.

    Args:
      jaxpr: A function.
      sources: The sources of each argument; None marks an argument that may change.
    """
    repeated = set[int | None]()
    known = dict(zip(jaxpr.invars, sources, strict=True))
    for eqn in jaxpr.eqns:
        each = [
            set() if isinstance(x, core.Literal) else known.get(x, set())
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
        known.update(dict.fromkeys(eqn.outvars, union))
    return repeated


def _pure(
    flat: Flat,
    live: Sequence[int],
    owner: Mapping[int, int],
    constants: set[int],
    rest: set[int],
) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """Returns values that depend only on layers' parameters, and each first use."""
    # A scalar of other parameters counts as a constant if a layer's scalar is added to
    # it: a sum of all norms may begin with an embedding's.
    others, single = set(rest), lambda x: flat.size(x) == 1
    pure: dict[int, frozenset[int]] = dict.fromkeys(constants, frozenset())
    pure |= {leaf: frozenset([n]) for leaf, n in owner.items()}
    first: dict[int, int] = {}
    for n in live:
        equation = flat.equations[n]
        operands = values_in(equation)
        layers_of = [pure.get(x) for x in operands]
        if all(x in pure or x in others for x in operands):
            scalars = others.intersection(operands)
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
    # Such a sum begins in the first layer, which would otherwise differ from others.
    users: dict[int, list[int]] = {}
    for n in reversed(live):
        equation = flat.equations[n]
        operands, results = values_in(equation), equation.outputs
        # It may follow all layers only if all of its users do.
        late = [last.get(x) == count for y in results for x in users.get(y, ())]
        small = all(flat.size(x) == 1 and x not in layer for x in (*operands, *results))
        if pure.get(results[0]) and small and late and all(late):
            last.update(dict.fromkeys(results, count))
        for x in operands:
            users.setdefault(x, []).append(results[0])
