"""Assigns each equation of a loss to a layer."""

import dataclasses
import itertools
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)

from paged_optax.analysis.program import Constant, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError, values_in, values_of
from paged_optax.splitting.numbered import Member
from paged_optax.splitting.pieces import aval_of, match_backward, match_forward

# Values from before the layers of at most this many bytes are not computed in layers.
_SMALL = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The equations of each layer."""

    cuts: Cuts
    members: Mapping[int, Member]  # the name of each parameter within its layer
    # The layer of each equation: -1 before all layers, the number of layers after.
    of: Mapping[int, int]

    @classmethod
    def from_cuts(cls, cuts: Cuts, members: Mapping[int, Member]) -> "Stages":
        """Searches the first and the last layer, which have one cut, and all others."""
        search = _Search(cuts, members)
        pieces = search.pieces()
        depends = cuts.depends
        of = {n: -1 if depends.last_layer(n) < 0 else depends.count for n in cuts.order}
        for turn, piece in enumerate(pieces):
            of.update(dict.fromkeys(piece, turn))
        _refuse_elsewhere(cuts, of)
        return cls(cuts, members, _with_early_equations(cuts, of))


class _Search:
    """Searches the equations of all layers."""

    def __init__(self, cuts: Cuts, members: Mapping[int, Member]):
        self.cuts, self.members = cuts, members
        self.depends, self.flat = cuts.depends, cuts.depends.flat
        self.count = cuts.depends.count

    def pieces(self) -> list[list[int]]:
        # Inner layers lie between two cuts. No cut begins the first layer or ends the
        # last one: each is matched with another layer. Without a match, it begins or
        # ends where values of the carry's types are alive.
        cuts, order, count = self.cuts.cuts, self.cuts.order, self.count
        inner = [
            list(order[start:stop]) for start, stop in zip(cuts, cuts[1:], strict=False)
        ]
        if count == 1:
            starts = self._starts()
            return [list(order[starts[0] if starts else 0 : self._ends_at()])]
        first = self._first(inner)
        last = None
        if first is None:
            for start in (starts := self._starts()):
                piece = self._from(start)
                if not inner and (last := self._last([piece])) is not None:
                    first = piece
                    break
            else:
                start = starts[0] if starts else self.cuts.regions[0].start
                first = self._from(start)
        last = self._last([*inner, first]) if last is None else last
        if last is None:
            last = list(order[cuts[-1] : self._ends_at()])
        return [first, *inner, last]

    def _from(self, start: int) -> list[int]:
        """The equations of the first layer, if it begins at this place."""
        chosen = self.cuts.order[start : self.cuts.cuts[0]]
        producer = {x: n for n in chosen for x in self.flat.equations[n].outputs}
        needed = {n for n in chosen if self.depends.last_layer(n) == 0}
        # Also the equations that these need, as far back as the layer may begin.
        stack = list(needed)
        while stack:
            operands = values_in(self.flat.equations[stack.pop()])
            more = {producer[x] for x in operands if x in producer} - needed
            needed |= more
            stack += more
        # Equations with users outside the layer stay before the layers.
        for n in reversed(chosen):
            early = n in needed and self.depends.last_layer(n) < 0
            if early and not self._used_only_in(n, needed):
                needed.remove(n)
        return [n for n in chosen if n in needed]

    def _used_only_in(self, n: int, piece: Container[int]) -> bool:
        """True if only a piece uses the values of an equation."""
        order, uses = self.cuts.order, self.cuts.uses
        places = (x for y in self.flat.equations[n].outputs for x in uses[y])
        return all(place < len(order) and order[place] in piece for place in places)

    def _leaves(self, turn: int) -> Callable[[Operand, Operand], bool]:
        """Returns a test of whether operands correspond, for a layer's parameters."""
        layer, members = self.depends.layer, self.members

        def fits(x: Operand, y: Operand) -> bool:
            if isinstance(x, Constant) or isinstance(y, Constant):
                return x not in layer and y not in layer
            if x not in layer or y not in layer:
                return x not in layer and y not in layer
            return members[x] == members[y] and layer[y] == turn

        return fits

    def _results(self, turn: int) -> list[int]:
        """The carry that an inner layer or the first layer computes."""
        cuts = self.cuts
        start = cuts.cuts[turn - 1] if turn else cuts.regions[0].start
        stop = cuts.cuts[turn]
        used = lambda x: cuts.until(x, cuts.end) >= stop
        return list(filter(used, cuts.results_at(range(start, stop))))

    def _first(self, inner: Sequence[Sequence[int]]) -> list[int] | None:
        """The first layer, matched with an inner layer; None without a match."""
        depends, cuts = self.depends, self.cuts
        fits = self._leaves(0)
        before = lambda x: isinstance(x, Constant) or depends.after.get(x, -1) < 0
        # Operands are parameters of the first layer, or are computed before all layers.
        fit = lambda x, y: fits(x, y) and (y in depends.layer or before(y))
        results = self._results(0)
        needed = [n for n in cuts.order[: cuts.cuts[0]] if depends.last_layer(n) == 0]
        for turn, template in enumerate(inner, 1):
            theirs = self._results(turn)
            avals = [[aval_of(self.flat, x) for x in xs] for xs in (theirs, results)]
            # A layer with a carry of other types is of another kind.
            if avals[0] != avals[1]:
                continue
            # The first cut fixes the results of the first layer but not its beginning:
            # match backward from the results.
            pairs = list(zip(theirs, results, strict=True))
            match = match_backward(self.flat, depends.producer, template, pairs, fit)
            if match is None or self._shared(match):
                continue
            # The layers differ if the first has equations without a match.
            piece = {*match, *needed}
            if len(piece) <= len(template):
                return [n for n in cuts.order if n in piece]
        return None

    def _shared(self, piece: Iterable[int]) -> bool:
        """True if others use equations of a piece that precede the layers."""
        chosen = set(piece)
        early = {n for n in chosen if self.depends.last_layer(n) < 0}
        results = {x for n in early for x in self.flat.equations[n].outputs}
        return any(
            self.cuts.order[place] not in chosen
            for x in results
            for place in self.cuts.uses[x]
            if place < len(self.cuts.order)
        )

    def _starts(self) -> list[int]:
        """Places where the first layer may begin, in reverse order."""
        # A layer keeps the types of the carry. It may begin wherever exactly such
        # values are alive, not counting values that later layers use.
        cuts, flat = self.cuts, self.flat
        stop = cuts.cuts[0] if cuts.cuts else cuts.end
        goes_on = lambda x: any(stop <= place < cuts.end for place in cuts.uses[x])
        region = cuts.regions[-1]
        inputs = {x: cuts.uses[x] for x in cuts.results_at(region) if not goes_on(x)}
        carry = sorted(map(str, (aval_of(flat, x) for x in self._carry())))
        places = []
        producer = {x: k for k in region for x in cuts.results_at([k])}
        for place in range(region.stop, region.start, -1):
            alive = [
                x
                for x, uses in inputs.items()
                if producer[x] < place and any(place <= use < stop for use in uses)
            ]
            if sorted(str(aval_of(flat, x)) for x in alive) == carry:
                places.append(place)
        return places

    def _carry(self) -> list[int]:
        if self.count > 1:
            return self._results(0)
        cuts = self.cuts
        results = cuts.results_at(range(cuts.regions[0].start, cuts.end))
        return [x for x in results if any(place >= cuts.end for place in cuts.uses[x])]

    def _last(self, templates: Sequence[Sequence[int]]) -> list[int] | None:
        """The last layer, matched with another layer; None without a match."""
        depends, cuts = self.depends, self.cuts
        candidates = cuts.order[cuts.cuts[-1] :]
        fits = self._leaves(self.count - 1)
        needed = {
            n
            for n in candidates
            if self.count - 1 in depends.uses(n) and len(depends.uses(n)) == 1
        }
        # The last cut fixes the inputs of the last layer: match forward.
        for template in reversed(templates):
            match = match_forward(self.flat, template, candidates, fits)
            # The match must contain all equations that read the last layer's parameters
            # directly. Others may follow it.
            if match is None:
                continue
            piece = set(match)
            missing = any(map(self._reads_parameters, needed - piece))
            if not missing and self._is_closed(piece, candidates):
                return [n for n in candidates if n in piece]
        return None

    def _is_closed(self, piece: set[int], candidates: Sequence[int]) -> bool:
        """True if a piece needs none of the other candidates."""
        others = set(candidates) - piece
        results = {x for n in others for x in self.flat.equations[n].outputs}
        return all(results.isdisjoint(values_in(self.flat.equations[n])) for n in piece)

    def _reads_parameters(self, n: int) -> bool:
        operands = values_in(self.flat.equations[n])
        return not self.depends.layer.keys().isdisjoint(operands)

    def _ends_at(self) -> int:
        """The place where a last layer without a match ends."""
        cuts, flat = self.cuts, self.flat
        if not cuts.cuts:
            return cuts.end
        types = lambda values: sorted(str(aval_of(flat, x)) for x in values)
        alive = lambda start, stop: types(
            x
            for x in cuts.results_at(range(start, stop))
            if any(use >= stop for use in cuts.uses[x])
        )
        last = cuts.cuts[-1]
        begins = cuts.cuts[-2] if self.count > 2 else cuts.regions[0].start
        earlier = set(cuts.results_at(range(cuts.regions[0].start, begins)))
        places = range(cuts.end, min(cuts.end + 64, len(cuts.order)) + 1)
        takes = lambda place: values_in(flat.equations[cuts.order[place - 1]])
        of_it = lambda place: place == cuts.end or earlier.isdisjoint(takes(place))
        # The first choice counts values that are kept for the epilogue, such as all
        # layers' means. Values computed from these may have the type of the carry; the
        # second choice leaves them out.
        for carry in (alive(begins, last), types(self._results(self.count - 2))):
            for place in itertools.takewhile(of_it, places):
                if alive(last, place) == carry:
                    return place
        return cuts.end


def _refuse_elsewhere(cuts: Cuts, of: Mapping[int, int]) -> None:
    depends = cuts.depends
    for n in cuts.order:
        equation = depends.flat.equations[n]
        for x in values_in(equation):
            layer = depends.layer.get(x)
            if layer is not None and of[n] != layer:
                after = (
                    "after all layers" if of[n] == depends.count else "in another one"
                )
                raise SplitError(
                    f"parameters of layer {layer} are used {after}, at"
                    f" {depends.line(n)}. A layer's parameters are available only"
                    " within the layer. Move parameters that are used twice out of the"
                    " layers, to a key of their own. For a penalty of several layers,"
                    " or of gradients through them, train with jax.grad and a paged"
                    " optimizer."
                )
    for x in values_of(depends.flat.outputs):
        if x in depends.layer:
            raise SplitError(
                f"the loss returns a parameter of layer {depends.layer[x]}. Return a"
                " value computed from it, such as its norm."
            )


def _with_early_equations(cuts: Cuts, of: Mapping[int, int]) -> dict[int, int]:
    """Moves equations from before the layers into the only layer that uses them.

    This applies to an equation that several layers repeat on the same operands, such as
    a transpose of an encoder's output or the broadcast of a mask, and to an equation
    whose result is larger than its operands: a dropout mask, but not its key.
    """
    depends = cuts.depends
    flat, equations = depends.flat, depends.flat.equations
    users: dict[int, set[int]] = {}
    for x in values_of(flat.outputs):
        users.setdefault(x, set()).add(depends.count)
    only: dict[int, int] = {}
    # Backward: the layers that need each equation, and the layer if it is the only one.
    for n in reversed(depends.live):
        layers = set().union(*(users.get(x, ()) for x in equations[n].outputs))
        if of.get(n, -1) >= 0:
            layers = {of[n]}
        elif len(layers) == 1 and 0 <= min(layers) < depends.count:
            only[n] = min(layers)
        for x in values_in(equations[n]):
            users.setdefault(x, set()).update(layers)
    repeated = _repeated(cuts, only)
    stages, inside = dict(of), set[int]()
    size = lambda xs: nbytes([flat.avals[x] for x in xs])
    # Forward, because an equation follows its operands into a layer.
    for n in depends.live:
        if of.get(n, -1) >= 0:
            continue
        equation, operands = equations[n], values_in(equations[n])
        grows = size(equation.outputs) > max(_SMALL, size(operands))
        grows = grows and not depends.is_learned(n)
        stages[n] = -1
        if n in only and (grows or n in repeated or not inside.isdisjoint(operands)):
            stages[n] = only[n]
            inside.update(equation.outputs)
    return stages


def _repeated(cuts: Cuts, only: Mapping[int, int]) -> set[int]:
    """Equations that several layers repeat on the same operands."""
    same: dict[int, Hashable] = {}
    groups: dict[Hashable, list[int]] = {}
    for n in cuts.depends.live:
        equation = cuts.depends.flat.equations[n]
        if n in only:
            operands = tuple(
                x if isinstance(x, Constant) else same.get(x, x)
                for x in equation.inputs
            )
            key = equation.primitive, equation.params, operands
            groups.setdefault(key, []).append(n)
            for k, x in enumerate(equation.outputs):
                same[x] = key, k
    return {
        n for each in groups.values() if len({only[n] for n in each}) > 1 for n in each
    }
