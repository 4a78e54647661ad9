"""Dependence of a loss's values on the parameters of layers, and source lines."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Equation

# Installed packages that models are built with. Errors point to the user's own line.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|flax|haiku|equinox|optax|qwix|paged_optax)[/\\]"
)


def source_line(eqn: Equation, nearby: Iterable[Equation] = ()) -> str:
    """Returns the line of the model that an equation was traced from.

    For an equation of a library's module, this is the line that calls the module. An
    equation without a line, as within `jnp.clip`, has the line of one of the `nearby`
    equations.
    """
    eqn = next((e for e in (eqn, *nearby) if e.line), eqn)
    where, traced = eqn.where, eqn.traced
    traceback = traced and traced.source_info.traceback
    if not traceback or not _LIBRARIES.search(where):
        return where
    inner = lambda frame: not where.startswith(f"{frame.file_name}:")
    for frame in itertools.dropwhile(inner, traceback.frames):
        if not _LIBRARIES.search(frame.file_name):
            line = f"{frame.file_name}:{frame.line_num}"
            return f"{line} ({frame.function_name}), which calls {where}"
    return where


class SplitError(ValueError):
    """Raised for a loss that is not computed layer by layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Depends:
    """Layers and parameters that each value of a loss depends on."""

    flat: Flat
    live: Sequence[int]  # positions of the equations that the loss needs
    layer: Mapping[int, int]  # of each parameter, in the order of computation
    count: int  # number of layers
    # The last layer that each value depends on, of all values that depend on
    # parameters; -1 for none. A value that depends only on parameters of several layers
    # comes after all layers.
    after: Mapping[int, int]
    # The layers of each value that depends only on parameters of layers. The loss may
    # compute such values early, for example a cast of the whole model to bfloat16; they
    # belong to their layer.
    pure: Mapping[int, frozenset[int]]

    @classmethod
    def create(
        cls, flat: Flat, weights: Sequence[int], members: Sequence[Sequence[int]]
    ) -> "Depends":
        """Follows the parameters `weights`, with each layer's `members`."""
        live = flat.needed(flat.outputs)
        param_index = {leaf: n for n, leaves in enumerate(members) for leaf in leaves}
        rest = set(weights) - set(param_index)
        pure, first = _pure(flat, live, param_index, set(flat.constants), rest)
        # Layers are ordered by their first use, whatever their numbers.
        order = {n: k for k, n in enumerate(sorted(first, key=lambda n: first[n]))}
        if missing := sorted(set(range(len(members))) - set(order)):
            raise _unused(flat, live, pure, missing[0])
        layer = {leaf: order[n] for leaf, n in param_index.items()}
        pure = {x: frozenset(order[n] for n in layers) for x, layers in pure.items()}
        after = {x: -1 for x in weights} | layer
        for n in live:
            outputs = flat.eqns[n].outputs
            layers = [after[x] for x in flat.eqns[n].numbers if x in after]
            # A value of several layers' parameters alone belongs to no layer.
            if len(pure.get(outputs[0], ())) > 1:
                layers = [len(members)]
            if layers:
                after |= dict.fromkeys(outputs, max(layers))
        _sink(flat, live, pure, layer, after, len(members))
        return cls(flat, live, layer, len(members), after, pure)

    @functools.cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """Equations that combine a layer's parameters with other values, by layer."""
        users: dict[int, set[int]] = {
            iteration: set() for iteration in range(self.count)
        }
        for n in self.live:
            if not self.is_pure(n):
                for iteration in self.uses(n):
                    users[iteration].add(n)
        return {iteration: frozenset(eqns) for iteration, eqns in users.items()}

    def is_learned(self, n: int) -> bool:
        """True if an equation depends on parameters."""
        return self.flat.eqns[n].outputs[0] in self.after

    def is_pure(self, n: int) -> bool:
        """True if an equation depends only on parameters of layers."""
        return bool(self.pure.get(self.flat.eqns[n].outputs[0]))

    def last_layer(self, n: int) -> int:
        """The last layer that an equation depends on; -1 for none."""
        return self.after.get(self.flat.eqns[n].outputs[0], -1)

    def uses(self, n: int) -> set[int]:
        """The layers whose parameters an equation reads, directly or prepared."""
        operands = self.flat.eqns[n].numbers
        return set().union(*(self.pure.get(x, ()) for x in operands))

    def line(self, n: int) -> str:
        """The line of the model that an equation was traced from, see `source_line`."""
        eqns = self.flat.eqns
        nearest = sorted(self.live, key=lambda m: (abs(m - n), -m))
        return source_line(eqns[n], (eqns[m] for m in nearest))


def _unused(
    flat: Flat, live: Sequence[int], pure: Mapping[int, frozenset[int]], layer: int
) -> SplitError:
    """The error for a layer whose parameters meet no other value."""
    for n in live:
        layers = pure.get(flat.eqns[n].outputs[0], frozenset())
        if layer in layers and len(layers) > 1:
            return SplitError(
                f"the parameters of several layers are put together at"
                f" {source_line(flat.eqns[n])} and used as one array. Use them layer"
                " by layer, or stack them before, outside the loss, and scan over the"
                " stacks."
            )
    return SplitError(
        f"the loss does not use layer {layer}. Remove it from the parameters, or name"
        " other layers with layers=."
    )


def _pure(
    flat: Flat,
    live: Sequence[int],
    param_index: Mapping[int, int],
    constants: set[int],
    rest: set[int],
) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """Returns values that depend only on layers' parameters, and each first use."""
    # A scalar of other parameters counts as a constant if a layer's scalar is added to
    # it: a sum of all norms may begin with an embedding's.
    remaining, single = set(rest), lambda x: flat.size(x) == 1
    pure: dict[int, frozenset[int]] = dict.fromkeys(constants, frozenset())
    pure |= {leaf: frozenset([n]) for leaf, n in param_index.items()}
    first: dict[int, int] = {}
    for n in live:
        eqn = flat.eqns[n]
        operands = eqn.numbers
        find_layers = [pure.get(x) for x in operands]
        if all(x in pure or x in remaining for x in operands):
            scalars = remaining.intersection(operands)
            union = frozenset[int]().union(*(x for x in find_layers if x is not None))
            if scalars and not union:
                remaining.update(eqn.outputs)
                continue
            if not scalars or all(map(single, (*scalars, *eqn.outputs))):
                pure.update(dict.fromkeys(eqn.outputs, union))
                continue
        # A layer is first used where its parameters meet other values.
        for item in find_layers:
            if item and len(item) == 1:
                first.setdefault(next(iter(item)), n)
    return {x: layers for x, layers in pure.items() if layers}, first


def _sink(
    flat: Flat,
    live: Sequence[int],
    pure: Mapping[int, frozenset[int]],
    layer: Mapping[int, int],
    after: dict[int, int],
    count: int,
) -> None:
    """Moves scalars of a layer's parameters, such as norms, after all layers."""
    # Such a sum begins in the first layer, which would otherwise differ from others.
    early = set[int]()  # values with users that do not follow all layers
    users = set[int]()  # values with users
    for n in reversed(live):
        operands, results = flat.eqns[n].numbers, flat.eqns[n].outputs
        small = all(flat.size(x) == 1 and x not in layer for x in (*operands, *results))
        late = not users.isdisjoint(results) and early.isdisjoint(results)
        if pure.get(results[0]) and small and late:
            after |= dict.fromkeys(results, count)
        users.update(operands)
        if after.get(results[0]) != count:
            early.update(operands)
