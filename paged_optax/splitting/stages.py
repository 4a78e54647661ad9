"""Assigns each equation of a loss to a layer."""

import collections
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from paged_optax.analysis.program import Constant, Operand, used_values
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.numbered import Member

# Values from before the layers of at most this many bytes are not computed in layers.
_SMALL = 4096
# Most ways to compare one equation with equations of a layer.
_CHOICES = 64


def find_stages(cuts: Cuts, members: Mapping[int, Member]) -> dict[int, int]:
    """Returns the layer of each equation: -1 before all layers, their number after.

    `members` has the name of each parameter within its layer.
    """
    depends = cuts.depends
    initial = {
        n: -1 if depends.last_layer(n) < 0 else depends.count for n in cuts.order
    }
    for layer, piece in enumerate(_Search(cuts, members).pieces()):
        initial.update(dict.fromkeys(piece, layer))
    _check_location(cuts, initial)
    return _with_preceding(cuts, initial)


class _Search:
    """Searches the equations of all layers.

    Inner layers lie between two cuts. No cut begins the first layer or ends the last
    one: they have equations equal to another layer's. Without such equations, they
    begin or end where values of the carry's types are alive.
    """

    def __init__(self, cuts: Cuts, members: Mapping[int, Member]):
        self.cuts, self.members = cuts, members
        self.depends, self.flat = cuts.depends, cuts.depends.flat
        self.count = cuts.depends.count
        self.numbers: dict[Hashable, int] = {}  # of equal computations

    def pieces(self) -> list[Sequence[int]]:
        cuts, order = self.cuts.cuts, self.cuts.order
        inner = [order[start:stop] for start, stop in itertools.pairwise(cuts)]
        first, last = self._first(self._templates(inner)), None
        if first is None:
            starts = self._starts() or [self.cuts.regions[0].start]
            first = self._from(starts[0])
            if not inner:
                # Of two layers, each is compared with the other.
                pieces = map(self._from, starts)
                pairs = ((x, self._last(self._templates([x]))) for x in pieces)
                first, last = next((x for x in pairs if x[1]), (first, None))
        last = last or self._last(self._templates([*inner, first]))
        return [first, *inner, last or order[cuts[-1] : self._ends_at()]]

    def _numbered(
        self,
        eqns: Iterable[int],
        layer: int,
        free: Callable[[int], bool],
        among: Mapping[int, int] | None = None,
    ) -> dict[int, tuple[int, list[int]]]:
        """Numbers the computations of a layer, and lists the operands within.

        Equal computations of parameters of the same names, and of any values of equal
        types, have one number. Values that are `free` may come from outside, and
        `among` has the number of occurrences of each number; None for any.
        """
        numbered: dict[int, tuple[int, list[int]]] = {}
        inner: dict[Operand, Hashable] = {}
        left = collections.Counter(among)

        def meanings(x: Operand) -> Sequence[Hashable]:
            aval = self.flat.aval(x)
            if isinstance(x, Constant):
                # The first layer may read a literal where others read a value.
                return [("constant", aval), aval]
            if x in self.depends.layer:
                fits = self.depends.layer[x] == layer
                return [("parameter", self.members[x])] if fits else []
            outside = [aval] if free(x) else []
            return [inner[x], *outside] if x in inner else outside

        for n in eqns:
            eqn = self.flat.eqns[n]
            types = tuple(map(self.flat.aval, eqn.outputs))
            choices = itertools.product(*map(meanings, eqn.inputs))
            for operands in itertools.islice(choices, _CHOICES):
                key = eqn.primitive, eqn.params, operands, types
                index = self.numbers.setdefault(key, len(self.numbers))
                if among is not None and not left[index]:
                    continue
                left[index] -= 1
                pairs = zip(eqn.inputs, operands, strict=True)
                within = [x for x, how in pairs if inner.get(x) == how]
                numbered[n] = index, used_values(within)
                inner |= {x: (index, k) for k, x in enumerate(eqn.outputs)}
                break
        return numbered

    def _templates(self, pieces: Iterable[Sequence[int]]) -> list[Mapping[int, int]]:
        """How often a layer computes each number, the largest first."""
        templates: dict[Hashable, Mapping[int, int]] = {}
        for piece in pieces:
            layer = max(map(self.depends.last_layer, piece))
            numbered = self._numbered(piece, layer, lambda _: True)
            counts = collections.Counter(index for index, _ in numbered.values())
            templates.setdefault(frozenset(counts.items()), counts)
        return sorted(templates.values(), key=lambda x: -sum(x.values()))

    def _first(self, templates: Sequence[Mapping[int, int]]) -> list[int] | None:
        """The first layer, equal to another layer; None without such equations."""
        depends, source = self.depends, self.flat.source
        candidates = self.cuts.order[: self.cuts.cuts[0]]
        free = lambda x: depends.after.get(x, -1) < 0
        needed = {n for n in candidates if depends.last_layer(n) == 0}
        carry = self._alive(self._between(0), self.cuts.end)
        for template in templates:
            anywhere = dict.fromkeys(template, len(candidates))
            numbered = self._numbered(candidates, 0, free, anywhere)
            # Backward from the first cut: equations before the layers may be equal to
            # a layer's too.
            piece, queue = set[int](), [*needed, *(source[x] for x in carry)]
            while queue:
                n = queue.pop()
                if n in numbered and n not in piece:
                    piece.add(n)
                    queue += [source[x] for x in numbered[n][1]]
            counts = collections.Counter(numbered[n][0] for n in piece)
            # Others may not use equations of the piece that precede the layers.
            alone = all(self._users(n) <= piece for n in piece - needed)
            if counts == template and needed <= piece and alone:
                return [n for n in candidates if n in piece]
        return None

    def _last(self, templates: Sequence[Mapping[int, int]]) -> list[int] | None:
        """The last layer, equal to another layer; None without such equations."""
        depends, cuts = self.depends, self.cuts
        candidates = cuts.order[cuts.cuts[-1] :]
        produced = {x for n in candidates for x in self.flat.eqns[n].outputs}
        free = lambda x: x not in produced
        params = {x for x, n in depends.layer.items() if n == self.count - 1}
        reads = lambda n: not params.isdisjoint(self.flat.eqns[n].numbers)
        needed = {n for n in candidates if reads(n) and len(depends.uses(n)) == 1}
        for template in templates:
            piece = self._numbered(candidates, self.count - 1, free, template)
            if len(piece) == sum(template.values()) and needed <= set(piece):
                return list(piece)
        return None

    def _users(self, n: int) -> set[int]:
        """The learned equations that use the values of an equation."""
        order, uses = self.cuts.order, self.cuts.uses
        places = (x for y in self.flat.eqns[n].outputs for x in uses[y])
        return {order[place] if place < len(order) else -1 for place in places}

    def _from(self, start: int) -> list[int]:
        """The equations of the first layer, if it begins at this place."""
        subset = self.cuts.order[start : self.cuts.cuts[0]]
        piece = {n for n in subset if self.depends.last_layer(n) == 0}
        # Also the equations before that only these need.
        for n in reversed(subset):
            if self._users(n) <= piece:
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
        return [
            place
            for place in range(region.stop, region.start, -1)
            if self._types(filter(is_local, alive(place))) == carry
        ]

    def _ends_at(self) -> int:
        """The place where a last layer ends that is equal to no other."""
        cuts, flat, before = self.cuts, self.flat, self._between(self.count - 2)
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
