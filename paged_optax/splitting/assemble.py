"""A loss that is cut, as what is done before, in each layer, and after."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from paged_optax.analysis.program import Constant, Equation, Operand, Program
from paged_optax.splitting.depends import SplitError, values_in, values_of
from paged_optax.splitting.match import Straight, aval_of
from paged_optax.splitting.pieces import (
    Carried,
    Fixed,
    FromCarry,
    FromKept,
    FromTable,
    Kind,
    Pieces,
    Role,
    Seen,
    Weight,
)
from paged_optax.splitting.stages import Stages

#: How many values may pass through layers that do not need them.
_PASSING = 2


@dataclasses.dataclass(frozen=True, eq=False)
class _Handed:
    """What goes from layer to layer, and to the end.

    Attributes:
      straight: Each layer's equations.
      made: For each value that a layer makes the layer.
      goes: For each of them the last layer that needs it, or -1.
      last: Those that are needed after the layers.
      slots: For each layer what comes from those before: value to slot.
      avals: Shapes and dtypes of the slots.
    """

    straight: tuple[Straight, ...]
    made: Mapping[int, int]
    goes: Mapping[int, int]
    last: frozenset[int]
    slots: Sequence[Mapping[int, int]]
    avals: Sequence[Hashable]

    @classmethod
    def of(cls, stages: Stages) -> "_Handed":
        """Follows what layers make.

        Raises:
          SplitError: If more is handed on than the next layer needs.
        """
        depends = stages.cuts.depends
        flat, count = depends.flat, depends.count
        positions: list[list[int]] = [[] for _ in range(count)]
        goes: dict[int, int] = {}
        last = set(values_of(flat.outputs))
        for n in depends.live:
            stage = stages.of[n]
            inside = 0 <= stage < count
            if inside:
                positions[stage].append(n)
                goes.update(dict.fromkeys(flat.equations[n].outputs, -1))
            for x in values_in(flat.equations[n]):
                if inside and x in goes:
                    goes[x] = max(goes[x], stage)
                elif not inside:
                    last.add(x)
        # In the order of the cuts: what all layers do stands alike in each.
        place = {n: k for k, n in enumerate(stages.cuts.order)}
        for turn, each in enumerate(positions):
            positions[turn] = _in_order(flat.equations, each, place)
        straight = tuple(Straight.of(flat, each) for each in positions)
        made = {x: turn for turn, each in enumerate(straight) for x in each.values}
        goes = {x: turn if turn > made[x] else -1 for x, turn in goes.items()}
        slots: list[dict[int, int]] = [{}]
        avals: list[Hashable] = []
        for turn in range(1, count):
            held = {x: s for x, s in slots[-1].items() if goes[x] >= turn}
            for x in (x for x in straight[turn - 1].values if goes[x] >= turn):
                aval = aval_of(flat, x)
                taken = set(held.values())
                free = (s for s, a in enumerate(avals) if a == aval and s not in taken)
                slot = next(free, len(avals))
                avals += [aval] * (slot == len(avals))
                held[x] = slot
            slots.append(held)
        found = cls(straight, made, goes, frozenset(last & set(made)), slots, avals)
        found._refuse_skipping(stages)
        found._refuse_kept_weights(stages)
        return found

    def _refuse_kept_weights(self, stages: Stages) -> None:
        """Refuses what is needed later of a layer's parameters alone, if as large."""
        depends = stages.cuts.depends
        flat = depends.flat
        later = {x: turn for x, turn in self.goes.items() if turn >= 0}
        for x in (*self.last, *later):
            layers = depends.pure.get(x)
            equation = flat.equations[depends.producer[x]]
            given = max((flat.size(y) for y in values_in(equation)), default=0)
            if layers and flat.size(x) > 1 and flat.size(x) >= given:
                by = f"by layer {later[x]}" if x in later else "after all layers"
                raise SplitError(
                    f"parameters of layer {min(layers)} are used {by} too, by way of"
                    f" {depends.line(depends.producer[x])}: what a layer leaves for"
                    " others is kept for all layers, and would be as large as their"
                    " parameters. Reduce it within the layer, to a norm, or move these"
                    " parameters out of the layers."
                )

    def _refuse_skipping(self, stages: Stages) -> None:
        passing = max(
            (
                sum(self.made[x] < turn - 1 for x in held)
                for turn, held in enumerate(self.slots)
            ),
            default=0,
        )
        if passing > _PASSING:
            depends = stages.cuts.depends
            x = max(self.goes, key=lambda x: self.goes[x] - self.made[x])
            where = depends.line(depends.producer[x])
            raise SplitError(
                f"a value that layer {self.made[x]} makes at {where} skips layers:"
                f" layer {self.goes[x]} uses it. Each layer's input is saved, and would"
                " hold all that skips it. Give the layers before and after such"
                " skips lists of their own, such as params['down'] and params['up']:"
                " the largest is then taken apart."
            )


def _in_order(
    equations: Sequence[Equation], chosen: Sequence[int], place: Mapping[int, int]
) -> list[int]:
    """Equations of one layer, each after those that it needs, depth first.

    This follows from what is computed alone. In what order it was traced does not
    matter: some of it depends on no parameter in the first layer, but does in others.
    """
    producer = {x: n for n in chosen for x in equations[n].outputs}
    needs = {
        n: [producer[x] for x in values_in(equations[n]) if x in producer]
        for n in chosen
    }
    used = {m for each in needs.values() for m in each}
    ends = (n for n in chosen if n in place and n not in used)
    waiting = sorted(ends, key=lambda n: -place[n])
    done: dict[int, None] = {}
    while waiting:
        n = waiting[-1]
        missing = next((m for m in needs[n] if m not in done), None)
        if missing is not None:
            waiting.append(missing)
        else:
            done[waiting.pop()] = None
    return list(done)


@dataclasses.dataclass(eq=False)
class _Group:
    """Layers that are alike.

    Attributes:
      layers: Their numbers.
      key: What they compute.
      roles: What each argument is; None where it is made before the layers.
      handed: For each slot the place of the value among those made, None where it stays
        as it came; None as a whole where no layer follows.
    """

    layers: list[int]
    key: Hashable
    roles: tuple[Weight | Carried | None, ...]
    handed: tuple[int | None, ...] | None

    def takes(self, other: "_Group") -> bool:
        """Whether another layer is like these."""
        first = other.layers == [0]
        return (
            self.key == other.key
            and (None in (self.handed, other.handed) or self.handed == other.handed)
            and all(
                mine == theirs
                or (first and theirs is None and isinstance(mine, Carried))
                for mine, theirs in zip(self.roles, other.roles, strict=True)
            )
        )


class _Assembly:
    """Layers, being put together."""

    def __init__(self, stages: Stages):
        self.stages, self.handed = stages, _Handed.of(stages)
        self.flat = stages.cuts.depends.flat
        self.count = len(self.handed.straight)
        self.tables: list[Sequence[Operand | None]] = []
        self.kept: list[Hashable] = []
        self.after: dict[int, FromCarry | FromKept] = {}

    def groups(self) -> list[_Group]:
        """Layers that are alike. The first one is told by what it becomes."""
        found: list[_Group] = []
        for n in (*range(1, self.count), 0):
            group = self._alone(n)
            known = next((g for g in found if g.takes(group)), None)
            if known is None:
                found.append(group)
                continue
            known.layers.append(n)
            known.handed = group.handed if known.handed is None else known.handed
        return found

    def _alone(self, n: int) -> _Group:
        """A layer, before it is known which others are like it."""
        straight, slots = self.handed.straight[n], self.handed.slots
        members = self.stages.members

        def role(x: Operand) -> Weight | Carried | None:
            if isinstance(x, Constant):
                return None
            if x in members:
                return Weight(members[x])
            return Carried(slots[n][x]) if x in slots[n] else None

        handed = None
        if n + 1 < self.count:
            places = {x: k for k, x in enumerate(straight.values)}
            held = {slot: places.get(x) for x, slot in slots[n + 1].items()}
            handed = tuple(map(held.get, range(len(self.handed.avals))))
        return _Group([n], straight.key, tuple(map(role, straight.arguments)), handed)

    def kind(self, group: _Group) -> Kind:
        """What a group's layers compute."""
        arguments = [self.handed.straight[n].arguments for n in group.layers]
        straight = self.handed.straight[group.layers[0]]
        roles = tuple(
            role or self._given(group.layers, operands)
            for role, operands in zip(
                group.roles, zip(*arguments, strict=True), strict=True
            )
        )
        handed = self._last(group) if group.handed is None else group.handed
        kept = self._kept(group, handed)
        wanted = sorted({x for x in (*handed, *kept) if x is not None})
        count = len(straight.arguments)
        program = Program(
            inputs=count,
            equations=straight.equations,
            outputs=tuple(count + x for x in wanted),
            elementwise=False,
        )
        result = lambda x: None if x is None else wanted.index(x)
        return Kind(
            program, roles, tuple(map(result, handed)), tuple(map(result, kept))
        )

    def _given(self, layers: Sequence[int], operands: Sequence[Operand]) -> Role:
        """What an argument is that is made before the layers."""
        first = operands[0]
        if all(x == first for x in operands):
            return Fixed(first.value) if isinstance(first, Constant) else Seen(first)
        row: list[Operand | None] = [None] * self.count
        for n, x in zip(layers, operands, strict=True):
            row[n] = x
        for number, known in enumerate(self.tables):
            pairs = zip(known, row, strict=True)
            agree = all(None in (a, b) or a == b for a, b in pairs)
            if agree and self._aval(known) == self._aval(row):
                self.tables[number] = [
                    b if a is None else a for a, b in zip(known, row, strict=True)
                ]
                return FromTable(number)
        self.tables.append(row)
        return FromTable(len(self.tables) - 1)

    def _aval(self, row: Sequence[Operand | None]) -> Hashable:
        return next(aval_of(self.flat, x) for x in row if x is not None)

    def _last(self, group: _Group) -> tuple[int | None, ...]:
        """What a last layer that is like no other one hands to the end."""
        values = self.handed.straight[group.layers[0]].values
        free = [k for k, x in enumerate(values) if x in self.handed.last]
        handed: list[int | None] = []
        for aval in self.handed.avals:
            fit = (k for k in reversed(free) if aval_of(self.flat, values[k]) == aval)
            chosen = next(fit, None)
            if chosen is not None:
                free.remove(chosen)
            handed.append(chosen)
        return tuple(handed)

    def _kept(
        self, group: _Group, handed: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """What a group's layers keep for the end: by number, the place of the value."""
        places: list[int | None] = [None] * len(self.kept)
        for n in group.layers:
            for place, x in enumerate(self.handed.straight[n].values):
                if x not in self.handed.last:
                    continue
                if n == self.count - 1 and place in handed:
                    self.after[x] = FromCarry(handed.index(place))
                    continue
                if place not in places:
                    aval = aval_of(self.flat, x)
                    free = (k for k, p in enumerate(places) if p is None)
                    number = next((k for k in free if self.kept[k] == aval), None)
                    if number is None:
                        number = len(places)
                        places.append(None)
                        self.kept.append(aval)
                    places[number] = place
                self.after[x] = FromKept(places.index(place), n)
        return tuple(places)

    def pieces(self) -> Pieces:
        """The whole."""
        groups = self.groups()
        kinds = [self.kind(group) for group in groups]
        kind_of = [0] * self.count
        initial: list[Operand | None] = [None] * len(self.handed.avals)
        for number, group in enumerate(groups):
            for n in group.layers:
                kind_of[n] = number
            if 0 in group.layers:
                first = self.handed.straight[0].arguments
                for role, x in zip(group.roles, first, strict=True):
                    if isinstance(role, Carried):
                        initial[role.slot] = x
        aval = lambda x: self.flat.avals[x]
        slot = {s: aval(x) for held in self.handed.slots for x, s in held.items()}
        kept = {
            found.number: aval(x)
            for x, found in self.after.items()
            if isinstance(found, FromKept)
        }
        fill = lambda kind: kind.kept + (None,) * (len(kept) - len(kind.kept))
        return Pieces(
            flat=self.flat,
            kinds=tuple(dataclasses.replace(kind, kept=fill(kind)) for kind in kinds),
            kind_of=tuple(kind_of),
            initial=tuple(initial),
            carried=tuple(slot[s] for s in range(len(slot))),
            tables=tuple(self.tables),
            kept=tuple(kept[k] for k in range(len(kept))),
            after=self.after,
            inside=frozenset(self.handed.made),
        )


def assembled(stages: Stages) -> Pieces:
    """Finds out which layers are alike, and what each of their arguments is.

    Args:
      stages: The layer of each equation.

    Raises:
      SplitError: If more is handed on than the next layer needs.
    """
    return _Assembly(stages).pieces()
