"""Cuts a loss between its layers, at the fewest live bytes."""

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from paged_optax.analysis.program import Constant, Operand, used_values
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.dependence import Depends, SplitError


class Cuts:
    """The learned equations in an order that can be cut, and the cuts.

    Args:
      depends: The dependence of the equations on layers.
      latest: Cut at the last of several equally good places. They differ if a layer
        ends or begins with equations that keep the size of the carry.
      interleaved: Order the ends of a layer's towers, for example of two inputs, step
        by step instead of tower by tower.
    """

    def __init__(self, depends: Depends, *, latest: bool, interleaved: bool = False):
        self.depends, count = depends, depends.count
        flat = self.flat = depends.flat
        # Positions of the equations, sorted by the last layer they depend on, from none
        # to the last. A cast of all weights at the beginning of the model is thus
        # ordered with its layer.
        order = _ordered(depends)
        self.order = _interleaved(depends, order) if interleaved else order
        # The places where each value is used. Results of the loss are used after all
        # equations.
        self.uses = defaultdict[int, list[int]](list)
        operands = [*(flat.eqns[n].numbers for n in self.order)]
        for place, values in enumerate([*operands, used_values(flat.outputs)]):
            for x in values:
                self.uses[x].append(place)
        # Places in `order` of the equations that depend on each layer and on no later
        # one. Region -1 depends on no layer, the region after the last layer only on
        # parameters of several layers.
        layers = [depends.last_layer(n) for n in self.order]
        stops = [bisect.bisect_right(layers, n) for n in range(-2, count + 1)]
        self.regions = {n: range(*stops[n + 1 : n + 3]) for n in range(-1, count + 1)}
        self._check_single_use()
        # The place after the last use of the last layer's parameters.
        self.end = self._used_until(count - 1)
        # Places in `order` where the next layer begins.
        self.cuts = [self._cheapest(n, latest) for n in range(max(1, count - 2))]
        # With two layers there is no earlier cut to follow.
        if count > 2:
            self.cuts.append(self._last(self.cuts[-1], latest))

    def _used_until(self, layer: int) -> int:
        """The place after the last use of a layer's parameters, in its region."""
        users = self.depends.users[layer]
        places = [place for place in self.regions[layer] if self.order[place] in users]
        if not places:
            raise self._error(layer, min(users), "with other layers")
        return 1 + max(places)

    def _results_at(self, places: Iterable[int]) -> list[int]:
        """Results of the equations at these places."""
        eqns = self.flat.eqns
        return [x for place in places for x in eqns[self.order[place]].outputs]

    def _until(self, value: int, stop: int) -> int:
        """The last place before `stop` where a value is used; -1 for none."""
        return max((place for place in self.uses[value] if place < stop), default=-1)

    def _check_single_use(self) -> None:
        depends = self.depends
        for layer in range(depends.count - 1):
            for n in (self.order[place] for place in self.regions[layer]):
                again = depends.uses(n) - {layer}
                if again and not depends.is_pure(n):
                    how = f"after layer {layer} or with it"
                    raise self._error(min(again), n, how)

    def _error(self, layer: int, n: int, how: str) -> SplitError:
        return SplitError(
            f"layer {layer} is used at {self.depends.line(n)} {how}. Each layer must be"
            " used once, in sequence, by equations of its own. Move parameters that are"
            " used twice out of the layers, to a key of their own, name other layers"
            " with layers=, or train with jax.grad and a paged optimizer."
        )

    def _last(self, before: int, latest: bool) -> int:
        """The cut before the last layer, at the same distance as the cut before it."""
        # The end of the last layer, and thus the live bytes before it, are not known
        # yet. If the two layers end differently, live bytes decide.
        layer, eqns = self.depends.count - 2, self.flat.eqns
        starts = self._used_until(layer - 1), self._used_until(layer)
        length = before - starts[0]
        ends = [
            [eqns[n].primitive for n in self.order[start : start + length]]
            for start in starts
        ]
        if ends[0] == ends[1]:
            return min(starts[1] + length, self.regions[layer].stop)
        return self._cheapest(layer, latest)

    def _cheapest(self, layer: int, latest: bool) -> int:
        """The place in a layer's region with the fewest live bytes."""
        region = self.regions[layer]
        first, count = self._used_until(layer), self.depends.count
        # Values that only the last layer or the epilogue reads are kept in any case.
        stop = self.end if layer == count - 2 else self.regions[count - 1].start
        until = lambda x: self._until(x, stop if count > 2 else len(self.order) + 1)
        values = self._results_at(range(self.regions[0].start, first))
        # Values from before the layers are available to all, except the first input.
        if layer == 0:
            values += [
                x
                for x in self._results_at(self.regions[-1])
                if until(x) < region.stop and min(self.uses[x], default=first) < first
            ]
        # A value is alive from the place after its equation to its last use.
        alive = [(first, x) for x in values]
        for place in range(first, region.stop):
            alive += [(place + 1, x) for x in self._results_at([place])]
        spans = [
            (start, end, nbytes(self.flat.avals[x]))
            for start, x in alive
            if (end := until(x)) >= start
        ]
        live = lambda at: sum(size for start, end, size in spans if start <= at <= end)
        places = range(first, region.stop + 1)
        return min(reversed(places) if latest else places, key=live)

    def pieces(self) -> list[Collection[int]]:
        """Returns the equations of each layer.

        Inner layers lie between two cuts, and one cut ends the first layer or begins
        the last one. These have equations equal to another layer's. Without such
        equations, they begin or end where values of the carry's types are alive.
        """
        cuts, order = self.cuts, self.order
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
        # The layer reads no value that equations of its own parameters, or between the
        # cut and the last layer, compute outside it.
        own = [n for n in candidates if number or depends.last_layer(n) == 0]
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
            outside = {x for n in own if n not in piece for x in eqns[n].outputs}
            if not all(outside.isdisjoint(eqns[n].numbers) for n in piece):
                continue
            if needed <= piece and (number or self._is_first(piece, known)):
                return piece
        return None

    def _is_first(self, piece: set[int], results: set[Operand]) -> bool:
        """True if the other layers do without the equations of a first layer."""
        depends, eqns = self.depends, self.flat.eqns
        values = lambda ns: {x for n in ns for x in eqns[n].outputs}
        own = {n for n in self.order[: self.cuts[0]] if depends.last_layer(n) == 0}
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
        places = {place for x in values for place in self.uses[x]}
        return {self.order[n] if n < len(self.order) else -1 for n in places}

    def _from(self, start: int) -> list[int]:
        """The equations of the first layer, if it begins at this place."""
        subset = self.order[start : self.cuts[0]]
        piece = {n for n in subset if self.depends.last_layer(n) == 0}
        # Also the equations before that only these need.
        for n in reversed(subset):
            if self._users(self.flat.eqns[n].outputs) <= piece:
                piece.add(n)
        return [n for n in subset if n in piece]

    def _between(self, layer: int) -> range:
        """Places from the cut before a layer, or the first use of one, to the next."""
        starts = [self.regions[0].start, *self.cuts]
        return range(starts[layer], starts[layer + 1])

    def _alive(self, places: range, stop: int | None = None) -> list[int]:
        """Values computed at these places that are used afterwards, before `stop`."""
        stop = len(self.order) + 1 if stop is None else stop
        values = self._results_at(places)
        return [x for x in values if self._until(x, stop) >= places.stop]

    def _types(self, values: Iterable[int]) -> list[str]:
        return sorted(str(self.flat.aval(x)) for x in values)

    def _starts(self) -> list[int]:
        """Places where the first layer may begin, in reverse order."""
        # A layer keeps the types of the carry. It may begin wherever exactly such
        # values are alive, not counting values that later layers use.
        region = self.regions[-1]
        carry = self._types(self._alive(self._between(0), self.end))
        is_local = lambda x: self._until(x, self.end) < self.cuts[0]
        alive = lambda place: self._alive(range(region.start, place), self.end)
        places = range(region.stop, region.start, -1)
        fits = lambda place: self._types(filter(is_local, alive(place))) == carry
        return [*filter(fits, places)] or [region.stop]

    def _ends_at(self) -> int:
        """The place where a last layer ends that is equal to no other."""
        before = self._between(self.depends.count - 2)
        earlier = set(self._results_at(range(self.regions[0].start, before.start)))
        # It reads no values of earlier layers that are kept for the epilogue.
        places = [self.end]
        for place in range(self.end, min(self.end + 64, len(self.order))):
            if not earlier.isdisjoint(self.flat.eqns[self.order[place]].numbers):
                break
            places.append(place + 1)
        # The first choice counts values that are kept for the epilogue, such as all
        # layers' means. Values computed from these may have the type of the carry; the
        # second choice leaves them out.
        for stop in (None, self.end):
            carry = self._types(self._alive(before, stop))
            for place in places:
                if self._types(self._alive(range(before.stop, place))) == carry:
                    return place
        return self.end


def _ordered(depends: Depends) -> list[int]:
    """Sorts the learned equations by the last layer that they depend on."""
    # A layer's term of a sum that is traced after all layers, such as a penalty, is
    # ordered as early as possible. Otherwise the next layer would add it.
    live = [n for n in depends.live if depends.is_learned(n)]
    starts: dict[int, int] = {}
    for n in live:
        if not depends.is_pure(n):
            starts.setdefault(depends.last_layer(n), n)
    after = lambda layer: [n for t, n in starts.items() if layer < t < depends.count]
    later = {n: min(after(n), default=math.inf) for n in range(depends.count)}
    keys: dict[int, tuple[int, bool, tuple[int, ...]]] = {}
    for n in live:
        layer, pure = depends.last_layer(n), depends.is_pure(n)
        operands = depends.flat.eqns[n].numbers
        sources = {depends.flat.source.get(x) for x in operands}
        earlier = [keys[m] for m in sources if m in keys]
        same = [key for at, mixed, key in earlier if at == layer and mixed]
        late = n > later.get(layer, math.inf)
        # A sum of norms of parameters needs no other value of a layer, and is ordered
        # first, in the last layer too.
        goes_on = any(key[0] < 0 for *_, key in earlier) and all(x[0] < 0 for x in same)
        key = (n,)
        if not pure and (late or goes_on):
            key = max(same, default=(-1,)) + (n,)
        keys[n] = layer, not pure, key
    return sorted(live, key=lambda n: keys[n])


def _interleaved(depends: Depends, order: Sequence[int]) -> list[int]:
    """Orders the ends of a layer's towers step by step."""
    # In the order of the trace the first tower begins its next layer before the second
    # tower ends this layer, and more bytes are alive between the layers.
    eqns = depends.flat.eqns
    needed_values, ends = set[int](), set[int]()
    for n in reversed(order):
        layer, operands = depends.last_layer(n), eqns[n].numbers
        if not 0 <= layer < depends.count:
            continue
        needed = not needed_values.isdisjoint(eqns[n].outputs)
        if needed or n in depends.users[layer]:
            needed_values.update(x for x in operands if depends.after.get(x) == layer)
        else:
            ends.add(n)
    steps = dict[int, int]()  # distance from the equations that need parameters
    for n in order:
        sources = [depends.flat.source.get(x) for x in eqns[n].numbers]
        layer_of, layer = depends.last_layer, depends.last_layer(n)
        same = [steps[m] for m in sources if m in steps and layer_of(m) == layer]
        steps[n] = 1 + max(same, default=0) if n in ends else 0
    return sorted(order, key=lambda n: (depends.last_layer(n), steps[n]))
