"""Assigns each equation of a loss to a layer."""

import collections
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from paged_optax.analysis.program import Constant, Operand, used_values
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError

# Values from before the layers of at most this many bytes are not computed in layers.
_SMALL = 4096


def find_stages(cuts: Cuts) -> dict[int, int]:
    """Returns the layer of each equation: -1 before all layers, their number after."""
    depends = cuts.depends
    stage = lambda n: -1 if depends.last_layer(n) < 0 else depends.count
    initial = {n: stage(n) for n in cuts.order}
    for layer, piece in enumerate(_Search(cuts).pieces()):
        initial.update(dict.fromkeys(piece, layer))
    _check_location(cuts, initial)
    return _with_preceding(cuts, initial)


class _Search:
    """Searches the equations of all layers.

    Inner layers lie between two cuts, and one cut ends the first layer or begins the
    last one. These have equations equal to another layer's. Without such equations,
    they begin or end where values of the carry's types are alive.
    """

    def __init__(self, cuts: Cuts):
        self.cuts, self.depends, self.flat = cuts, cuts.depends, cuts.depends.flat
        self.order = [*cuts.order, -1]  # the loss's results follow

    def pieces(self) -> list[Collection[int]]:
        cuts, order = self.cuts.cuts, self.cuts.order
        inner = [order[start:stop] for start, stop in itertools.pairwise(cuts)]
        first = self._equal(inner, order[: cuts[0]], 0)
        firsts = [first] if first else [*map(self._from, self._starts())]
        last = order[cuts[-1] :]
        # Of two layers, each is compared with the other.
        for first in firsts[: 1 if inner else None]:
            if piece := self._equal([*inner, first], last, self.depends.count - 1):
                return [first, *inner, piece]
        return [firsts[0], *inner, order[cuts[-1] : self._ends_at()]]

    def _equal(
        self,
        layers: Sequence[Collection[int]],
        candidates: Sequence[int],
        number: int,
    ) -> set[int] | None:
        """The candidates for layer `number` that equal another layer; None without."""
        eqns, source, aval = self.flat.eqns, self.flat.source, self.flat.aval
        depends, step = self.depends, 1 if number else -1  # from the cut
        # Equations that read a parameter of the layer, or an array prepared from it.
        array = lambda x: x in depends.layer or self.flat.size(x) > 1
        reads = lambda n: any(x in depends.pure and array(x) for x in eqns[n].numbers)
        needed = {n for n in candidates if depends.uses(n) == {number} and reads(n)}
        values = [x for n in candidates for x in eqns[n].outputs][::step]
        types = lambda n: (eqns[n].primitive.name, *map(aval, eqns[n].outputs))
        for layer in {tuple(map(types, x)): {*x} for x in layers}.values():
            outputs = [x for n in sorted(layer) for x in eqns[n].outputs]
            results = [x for x in outputs if not self._users([x]) <= layer][::step]
            equal = dict[int, Operand]()
            add = functools.partial(self._add_equal, equal, layer)
            if not all(any(add(x, y) for y in values) for x in results):
                continue
            piece = {source[y] for x in outputs if isinstance(y := equal.get(x), int)}
            known = {equal[x] for x in results}
            if needed <= piece and (number or self._is_first(piece, known)):
                return piece
        return None

    def _is_first(self, piece: set[int], results: set[Operand]) -> bool:
        """True if the other layers do without the equations of a first layer."""
        depends, eqns = self.depends, self.flat.eqns
        values = lambda ns: {x for n in ns for x in eqns[n].outputs}
        own = {n for n in self.order[: self.cuts.cuts[0]] if depends.last_layer(n) == 0}
        # Others may not use equations of the piece that precede the layers. Equations
        # that are not in the piece, such as sums of norms, follow all layers.
        late = self._users(values(own - piece)) - own
        return self._users(values(piece - own) - results) <= piece and all(
            n < 0 or depends.last_layer(n) == depends.count for n in late
        )

    def _add_equal(
        self, equal: dict[int, Operand], layer: set[int], result: int, other: int
    ) -> bool:
        """Adds a layer's result, with the values before it, if another value equals it.

        Maps the layer's values to the others in `equal`.
        """
        flat, eqns = self.flat, self.flat.eqns
        source = lambda x: flat.source.get(x, -1) if isinstance(x, int) else -1
        name = lambda x: self.depends.names.get(x) if isinstance(x, int) else None
        place = lambda x, n: eqns[n].outputs.index(x)
        function = lambda x, n: (eqns[n].primitive, eqns[n].params, place(x, n))
        added, others = dict(equal), set(equal.values())
        queue: list[tuple[Operand, Operand]] = [(result, other)]
        while queue:
            x, y = queue.pop()
            # The first layer may read a literal where others read a value.
            allowed = isinstance(x, int) or isinstance(y, Constant)
            if flat.aval(x) != flat.aval(y) or not allowed:
                return False
            if isinstance(x, Constant) or added.get(x) == y:
                continue
            n, m = source(x), source(y)
            if x in added or (n not in layer and name(x) != name(y)):
                return False
            added[x] = y
            if n not in layer:
                continue
            if m < 0 or y in others or function(x, n) != function(y, m):
                return False
            queue += zip(eqns[n].inputs, eqns[m].inputs, strict=True)
        equal.update(added)
        return True

    def _users(self, values: Iterable[int]) -> set[int]:
        """The learned equations that use values; -1 stands for the loss's results."""
        return {self.order[place] for x in values for place in self.cuts.uses[x]}

    def _from(self, start: int) -> list[int]:
        """The equations of the first layer, if it begins at this place."""
        subset = self.cuts.order[start : self.cuts.cuts[0]]
        piece = {n for n in subset if self.depends.last_layer(n) == 0}
        # Also the equations before that only these need.
        for n in reversed(subset):
            if self._users(self.flat.eqns[n].outputs) <= piece:
                piece.add(n)
        return [n for n in subset if n in piece]

    def _between(self, layer: int) -> range:
        """Places from the cut before a layer, or the first use of one, to the next."""
        starts = [self.cuts.regions[0].start, *self.cuts.cuts]
        return range(starts[layer], starts[layer + 1])

    def _alive(self, places: range, stop: int | None = None) -> list[int]:
        """Values computed at these places that are used afterwards, before `stop`."""
        stop = len(self.cuts.order) + 1 if stop is None else stop
        values = self.cuts.results_at(places)
        return [x for x in values if self.cuts.until(x, stop) >= places.stop]

    def _types(self, values: Iterable[int]) -> list[str]:
        return sorted(str(self.flat.aval(x)) for x in values)

    def _starts(self) -> list[int]:
        """Places where the first layer may begin, in reverse order."""
        # A layer keeps the types of the carry. It may begin wherever exactly such
        # values are alive, not counting values that later layers use.
        cuts, region = self.cuts, self.cuts.regions[-1]
        carry = self._types(self._alive(self._between(0), cuts.end))
        is_local = lambda x: cuts.until(x, cuts.end) < cuts.cuts[0]
        alive = lambda place: self._alive(range(region.start, place), cuts.end)
        places = range(region.stop, region.start, -1)
        fits = lambda place: self._types(filter(is_local, alive(place))) == carry
        return [*filter(fits, places)] or [region.stop]

    def _ends_at(self) -> int:
        """The place where a last layer ends that is equal to no other."""
        cuts, flat, before = self.cuts, self.flat, self._between(self.depends.count - 2)
        earlier = set(cuts.results_at(range(cuts.regions[0].start, before.start)))
        # It reads no values of earlier layers that are kept for the epilogue.
        places = [cuts.end]
        for place in range(cuts.end, min(cuts.end + 64, len(cuts.order))):
            if not earlier.isdisjoint(flat.eqns[cuts.order[place]].numbers):
                break
            places.append(place + 1)
        # The first choice counts values that are kept for the epilogue, such as all
        # layers' means. Values computed from these may have the type of the carry; the
        # second choice leaves them out.
        for stop in (None, cuts.end):
            carry = self._types(self._alive(before, stop))
            for place in places:
                if self._types(self._alive(range(before.stop, place))) == carry:
                    return place
        return cuts.end


def _check_location(cuts: Cuts, initial: Mapping[int, int]) -> None:
    """Raises if parameters are used outside their layer, directly or prepared."""
    depends = cuts.depends
    flat, eqns = depends.flat, depends.flat.eqns

    def layer_of(x: int) -> int | None:
        """The layer of a parameter, or of a value as large as its parameters."""
        layers, source = depends.pure.get(x, frozenset()), flat.source.get(x)
        if source is not None:
            operands = map(flat.size, eqns[source].numbers)
            if not 1 < flat.size(x) >= max(operands, default=0):
                return None
        return min(layers) if len(layers) == 1 else None

    for n in cuts.order:
        for layer in map(layer_of, eqns[n].numbers):
            if layer is not None and initial[n] != layer:
                after = initial[n] == depends.count
                raise SplitError(
                    f"parameters of layer {layer} are used"
                    f" {'after all layers' if after else 'in another one'}, at"
                    f" {depends.line(n)}. A layer's parameters are available only"
                    " within the layer. Move parameters that are used twice out of the"
                    " layers, to a key of their own. For a penalty of several layers,"
                    " or of gradients through them, train with jax.grad and a paged"
                    " optimizer."
                )
    for layer in map(layer_of, used_values(flat.outputs)):
        if layer is not None:
            raise SplitError(
                f"the loss returns a parameter of layer {layer}. Return a value"
                " computed from it, such as its norm; of an NNX model the state alone,"
                " nnx.state(model, nnx.Not(nnx.Param))."
            )


def _with_preceding(cuts: Cuts, initial: Mapping[int, int]) -> dict[int, int]:
    """Moves equations from before the layers into the only layer that uses them.

    This applies to an equation that several layers repeat on the same operands, such as
    a transpose of an encoder's output or the broadcast of a mask, and to an equation
    whose result is larger than its operands: a dropout mask, but not its key.
    """
    depends = cuts.depends
    flat, eqns = depends.flat, depends.flat.eqns
    users = collections.defaultdict[int, set[int]](set)
    users.update((x, {depends.count}) for x in used_values(flat.outputs))
    only: dict[int, int] = {}
    # Backward: the layers that need each equation, and the layer if it is the only one.
    for n in reversed(depends.live):
        layers = set[int]().union(*(users[x] for x in eqns[n].outputs))
        if initial.get(n, -1) >= 0:
            layers = {initial[n]}
        elif len(layers) == 1 and 0 <= min(layers) < depends.count:
            only[n] = min(layers)
        for x in eqns[n].numbers:
            users[x].update(layers)
    repeated = _repeated(cuts, only)
    stages, inner = dict(initial), set[int]()
    size = lambda xs: nbytes([flat.avals[x] for x in xs])
    # Forward, because an equation follows its operands into a layer.
    for n in depends.live:
        if initial.get(n, -1) >= 0:
            continue
        results, operands = eqns[n].outputs, eqns[n].numbers
        grows = size(results) > max(_SMALL, size(operands))
        grows = grows and not depends.is_learned(n)
        stages[n] = -1
        if n in only and (grows or n in repeated or not inner.isdisjoint(operands)):
            stages[n] = only[n]
            inner.update(results)
    return stages


def _repeated(cuts: Cuts, only: Mapping[int, int]) -> Collection[int]:
    """Equations that several layers repeat on the same operands."""
    same: dict[Operand, Hashable] = {}
    groups = collections.defaultdict[Hashable, list[int]](list)
    for n in cuts.depends.live:
        eqn = cuts.depends.flat.eqns[n]
        if n in only:
            operands = tuple(same.get(x, x) for x in eqn.inputs)
            key = eqn.primitive, eqn.params, operands
            groups[key].append(n)
            same |= {x: (key, k) for k, x in enumerate(eqn.outputs)}
    groups = (item for item in groups.values() if len({only[n] for n in item}) > 1)
    return {n for item in groups for n in item}
