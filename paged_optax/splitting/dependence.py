"""Dependence of a loss's values on the parameters of layers, and source lines."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Equation
from paged_optax.splitting.numbered import Member

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
    where = eqn.line or f"a `{eqn.primitive.name}` of no known line"
    traced = eqn.traced
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
    names: Mapping[int, Member]  # of the layers' parameters, within their layer
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
        cls, flat: Flat, params: int, members: Sequence[Mapping[Member, int]]
    ) -> "Depends":
        """Follows the first values `params`, with each layer's `members`."""
        live, count = flat.needed(flat.outputs), len(members)
        names = {n: name for layer in members for name, n in layer.items()}
        param_index = {x: n for n, item in enumerate(members) for x in item.values()}
        pure = dict.fromkeys(flat.constants, frozenset[int]())
        pure |= {leaf: frozenset([n]) for leaf, n in param_index.items()}
        # A scalar of other parameters counts as a constant if a layer's scalar is added
        # to it: a sum of all norms may begin with an embedding's.
        remaining = set(range(params)) - set(param_index)
        after = dict.fromkeys(remaining, -1)
        order: dict[int, int] = {}  # of the layers by first use, whatever their numbers
        last = lambda layers: order[min(layers)] if len(layers) == 1 else count
        for n in live:
            operands, results = flat.eqns[n].numbers, flat.eqns[n].outputs
            layers = [pure[x] for x in operands if pure.get(x)]
            extra = remaining.intersection(operands)
            if all(x in pure or x in extra for x in operands):
                if extra and not layers:
                    remaining.update(results)
                elif not extra or all(flat.size(x) == 1 for x in (*extra, *results)):
                    union = frozenset[int]().union(*layers)
                    pure.update(dict.fromkeys(results, union))
                    continue
            # A layer is first used where its parameters meet other values.
            for item in layers:
                if len(item) == 1:
                    order.setdefault(min(item), len(order))
            earlier = [after[x] for x in operands if x in after]
            if learned := [*earlier, *map(last, layers)]:
                after.update(dict.fromkeys(results, max(learned)))
        pure = {x: layers for x, layers in pure.items() if layers}
        for n in range(count):
            if n not in order:
                raise _unused(flat, live, pure, n)
        after |= {x: last(layers) for x, layers in pure.items()}
        pure = {x: frozenset(map(order.__getitem__, y)) for x, y in pure.items()}
        layer = {leaf: order[n] for leaf, n in param_index.items()}
        return cls(flat, live, names, layer, count, after, pure)

    @functools.cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """Equations that combine a layer's parameters with other values, by layer."""
        mixed = {n: self.uses(n) for n in self.live if not self.is_pure(n)}
        return {
            layer: frozenset(n for n, layers in mixed.items() if layer in layers)
            for layer in range(self.count)
        }

    def is_learned(self, n: int) -> bool:
        """True if an equation depends on parameters."""
        return self.flat.eqns[n].outputs[0] in self.after

    def is_pure(self, n: int) -> bool:
        """True if an equation depends only on parameters of layers."""
        return self.flat.eqns[n].outputs[0] in self.pure

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
        layers = pure.get(flat.eqns[n].outputs[0], ())
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
