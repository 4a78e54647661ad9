"""Cuts a loss between its layers, at the fewest live bytes."""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from paged_optax.analysis.program import used_values
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
        self.depends, flat, count = depends, depends.flat, depends.count
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
        self.end = self.used_until(count - 1)
        # Places in `order` where the next layer begins.
        self.cuts = [self._cheapest(n, latest) for n in range(max(1, count - 2))]
        # With two layers there is no earlier cut to follow.
        if count > 2:
            self.cuts.append(self._last(self.cuts[-1], latest))

    def used_until(self, layer: int) -> int:
        """The place after the last use of a layer's parameters, in its region."""
        users = self.depends.users[layer]
        places = [place for place in self.regions[layer] if self.order[place] in users]
        if not places:
            raise self._error(layer, min(users), "with other layers")
        return 1 + max(places)

    def results_at(self, places: Iterable[int]) -> list[int]:
        """Results of the equations at these places."""
        eqns = self.depends.flat.eqns
        return [x for place in places for x in eqns[self.order[place]].outputs]

    def until(self, value: int, stop: int) -> int:
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
        layer, eqns = self.depends.count - 2, self.depends.flat.eqns
        starts = self.used_until(layer - 1), self.used_until(layer)
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
        flat, region = self.depends.flat, self.regions[layer]
        first, count = self.used_until(layer), self.depends.count
        # Values that only the last layer or the epilogue reads are kept in any case.
        stop = self.end if layer == count - 2 else self.regions[count - 1].start
        until = lambda x: self.until(x, stop if count > 2 else len(self.order) + 1)
        values = self.results_at(range(self.regions[0].start, first))
        # Values from before the layers are available to all, except the first input.
        if layer == 0:
            values += [
                x
                for x in self.results_at(self.regions[-1])
                if until(x) < region.stop and min(self.uses[x], default=first) < first
            ]
        # A value is alive from the place after its equation to its last use.
        alive = [(first, x) for x in values]
        for place in range(first, region.stop):
            alive += [(place + 1, x) for x in self.results_at([place])]
        spans = [
            (start, end, nbytes(flat.avals[x]))
            for start, x in alive
            if (end := until(x)) >= start
        ]
        live = lambda at: sum(size for start, end, size in spans if start <= at <= end)
        places = range(first, region.stop + 1)
        return min(reversed(places) if latest else places, key=live)


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
