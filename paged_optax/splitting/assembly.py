"""Assembles the stages of a loss as `Pieces`: groups of equal layers, and the carry."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from paged_optax.analysis.program import Constant, Equation, Operand, Program
from paged_optax.splitting.dependence import SplitError, values_in, values_of
from paged_optax.splitting.pieces import (
    Carried,
    Fixed,
    FromCarry,
    FromKept,
    FromTable,
    LayerKind,
    Pieces,
    Role,
    Seen,
    Subprogram,
    Weight,
    aval_of,
)
from paged_optax.splitting.stages import Stages

# Most values that may pass through a layer that does not need them: each layer's input
# is saved, including such values.
_PASSING = 2


@dataclasses.dataclass(frozen=True, eq=False)
class _Dataflow:
    """The values carried between layers, and kept for the epilogue."""

    subprograms: tuple[Subprogram, ...]  # of each layer
    layer_of: Mapping[int, int]  # the layer that computes each value
    last_use: Mapping[int, int]  # the last later layer that needs each value, or -1
    needed_after: frozenset[int]  # values that the epilogue needs
    # For each layer, the slot of each value of an earlier layer.
    slots: Sequence[Mapping[int, int]]
    avals: Sequence[Hashable]  # the slots' shapes and dtypes

    @classmethod
    def of(cls, stages: Stages) -> "_Dataflow":
        depends = stages.cuts.depends
        flat, count = depends.flat, depends.count
        positions: list[list[int]] = [[] for _ in range(count)]
        last_use: dict[int, int] = {}
        needed_after = set(values_of(flat.outputs))
        for n in depends.live:
            stage = stages.of[n]
            inside = 0 <= stage < count
            if inside:
                positions[stage].append(n)
                last_use.update(dict.fromkeys(flat.equations[n].outputs, -1))
            for x in values_in(flat.equations[n]):
                if inside and x in last_use:
                    last_use[x] = max(last_use[x], stage)
                elif not inside:
                    needed_after.add(x)
        # The order must not depend on the trace, so that equal layers compare equal.
        place = {n: k for k, n in enumerate(stages.cuts.order)}
        for layer, each in enumerate(positions):
            positions[layer] = _in_order(flat.equations, each, place)
        subprograms = tuple(Subprogram.of(flat, each) for each in positions)
        layer_of = {
            x: layer for layer, each in enumerate(subprograms) for x in each.values
        }
        last_use = {
            x: layer if layer > layer_of[x] else -1 for x, layer in last_use.items()
        }
        slots: list[dict[int, int]] = [{}]
        avals: list[Hashable] = []
        for layer in range(1, count):
            # A value keeps its slot as long as a later layer needs it. Afterwards the
            # slot is reused for the next value of its type.
            held = {x: s for x, s in slots[-1].items() if last_use[x] >= layer}
            for x in (x for x in subprograms[layer - 1].values if last_use[x] >= layer):
                aval = aval_of(flat, x)
                used = set(held.values())
                free = (s for s, a in enumerate(avals) if a == aval and s not in used)
                slot = next(free, len(avals))
                avals += [aval] * (slot == len(avals))
                held[x] = slot
            slots.append(held)
        dataflow = cls(
            subprograms,
            layer_of,
            last_use,
            frozenset(needed_after & set(layer_of)),
            slots,
            avals,
        )
        dataflow._refuse_skipping(stages)
        dataflow._refuse_kept_weights(stages)
        return dataflow

    def _refuse_kept_weights(self, stages: Stages) -> None:
        depends = stages.cuts.depends
        flat = depends.flat
        later = {x: layer for x, layer in self.last_use.items() if layer >= 0}
        for x in (*self.needed_after, *later):
            layers = depends.pure.get(x)
            equation = flat.equations[depends.producer[x]]
            largest = max((flat.size(y) for y in values_in(equation)), default=0)
            if layers and flat.size(x) > 1 and flat.size(x) >= largest:
                by = f"by layer {later[x]}" if x in later else "after all layers"
                raise SplitError(
                    f"parameters of layer {min(layers)} are used {by} too, by way of"
                    f" {depends.line(depends.producer[x])}. A value that a layer keeps"
                    " is stored for all layers, and this one is as large as their"
                    " parameters. Reduce it within the layer, for example to a norm, or"
                    " move these parameters out of the layers."
                )

    def _refuse_skipping(self, stages: Stages) -> None:
        passing = max(
            (
                sum(self.layer_of[x] < layer - 1 for x in held)
                for layer, held in enumerate(self.slots)
            ),
            default=0,
        )
        if passing > _PASSING:
            depends = stages.cuts.depends
            x = max(self.last_use, key=lambda x: self.last_use[x] - self.layer_of[x])
            where = depends.line(depends.producer[x])
            raise SplitError(
                f"a value that layer {self.layer_of[x]} computes at {where} skips"
                f" layers: layer {self.last_use[x]} uses it. Each layer's input is"
                " saved, and would include all values that skip it. Give the layers"
                " before and after such skips lists of their own, such as"
                " params['down'] and params['up']. The largest is then split."
            )


def _in_order(
    equations: Sequence[Equation], chosen: Sequence[int], place: Mapping[int, int]
) -> list[int]:
    """Sorts the equations of one layer depth first, operands before users.

    The order depends only on the computation, so that equal layers compare equal. The
    order of the trace differs: an equation that depends on parameters in other layers
    may depend on none in the first layer, and is then sorted before the layers.
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
class _LayerGroup:
    """A group of equal layers."""

    layers: list[int]
    key: Hashable  # for comparison of programs
    # The role of each argument; None for values from before the layers.
    roles: tuple[Weight | Carried | None, ...]
    # For each slot the index of its next value among the layer's values, or None if the
    # slot keeps its value; None for the last layer.
    carried: tuple[int | None, ...] | None

    def takes(self, other: "_LayerGroup") -> bool:
        """True if another layer belongs to this group."""
        # The first layer reads values from before the layers instead of a carry.
        first = other.layers == [0]
        return (
            self.key == other.key
            and (None in (self.carried, other.carried) or self.carried == other.carried)
            and all(
                mine == theirs
                or (first and theirs is None and isinstance(mine, Carried))
                for mine, theirs in zip(self.roles, other.roles, strict=True)
            )
        )


class Assembly:
    """Groups of equal layers, with the tables and kept values that they share."""

    def __init__(self, stages: Stages):
        self.stages, self.dataflow = stages, _Dataflow.of(stages)
        self.flat = stages.cuts.depends.flat
        self.count = len(self.dataflow.subprograms)
        self.tables: list[Sequence[Operand | None]] = []
        self.kept: list[Hashable] = []
        self.after: dict[int, FromCarry | FromKept] = {}

    def groups(self) -> list[_LayerGroup]:
        """Groups equal layers. The first layer is added last, to any matching group."""
        groups: list[_LayerGroup] = []
        for n in (*range(1, self.count), 0):
            group = self._single(n)
            known = next((g for g in groups if g.takes(group)), None)
            if known is None:
                groups.append(group)
                continue
            known.layers.append(n)
            # The last layer has no next value, and so agrees with all others.
            known.carried = group.carried if known.carried is None else known.carried
        return groups

    def _single(self, n: int) -> _LayerGroup:
        subprogram, slots = self.dataflow.subprograms[n], self.dataflow.slots
        members = self.stages.members

        def role(x: Operand) -> Weight | Carried | None:
            if isinstance(x, Constant):
                return None
            if x in members:
                return Weight(members[x])
            return Carried(slots[n][x]) if x in slots[n] else None

        # Values of this layer for the next layer's slots; None keeps a slot's value.
        carried = None
        if n + 1 < self.count:
            places = {x: k for k, x in enumerate(subprogram.values)}
            held = {slot: places.get(x) for x, slot in slots[n + 1].items()}
            carried = tuple(map(held.get, range(len(self.dataflow.avals))))
        return _LayerGroup(
            [n], subprogram.key, tuple(map(role, subprogram.arguments)), carried
        )

    def kind(self, group: _LayerGroup) -> LayerKind:
        """Returns the program of a group's layers, with the roles of its arguments."""
        arguments = [self.dataflow.subprograms[n].arguments for n in group.layers]
        subprogram = self.dataflow.subprograms[group.layers[0]]
        roles = tuple(
            role or self._before_layers(group.layers, operands)
            for role, operands in zip(
                group.roles, zip(*arguments, strict=True), strict=True
            )
        )
        carried = self._last(group) if group.carried is None else group.carried
        kept = self._kept(group, carried)
        # A value that is both carried and kept is one result.
        results = sorted({x for x in (*carried, *kept) if x is not None})
        count = len(subprogram.arguments)
        program = Program(
            inputs=count,
            equations=subprogram.equations,
            outputs=tuple(count + x for x in results),
            elementwise=False,
        )
        result = lambda x: None if x is None else results.index(x)
        return LayerKind(
            program, roles, tuple(map(result, carried)), tuple(map(result, kept))
        )

    def _before_layers(
        self, layers: Sequence[int], operands: Sequence[Operand]
    ) -> Role:
        """The role of an argument from before the layers.

        An argument that differs between layers is stored in a table. Equal tables are
        shared.
        """
        first = operands[0]
        if all(x == first for x in operands):
            return Fixed(first.value) if isinstance(first, Constant) else Seen(first)
        row: list[Operand | None] = [None] * self.count
        for n, x in zip(layers, operands, strict=True):
            row[n] = x
        # Layers of other kinds have no row here. Their tables may fill the gaps.
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

    def _last(self, group: _LayerGroup) -> tuple[int | None, ...]:
        """The carry of a last layer of its own kind, by shapes and dtypes."""
        values = self.dataflow.subprograms[group.layers[0]].values
        free = [k for k, x in enumerate(values) if x in self.dataflow.needed_after]
        carried: list[int | None] = []
        for aval in self.dataflow.avals:
            # The latest value of the type, as in the other layers.
            fit = (k for k in reversed(free) if aval_of(self.flat, values[k]) == aval)
            chosen = next(fit, None)
            if chosen is not None:
                free.remove(chosen)
            carried.append(chosen)
        return tuple(carried)

    def _kept(
        self, group: _LayerGroup, carried: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """The values that a group's layers keep for the epilogue, by number."""
        places: list[int | None] = [None] * len(self.kept)
        for n in group.layers:
            for place, x in enumerate(self.dataflow.subprograms[n].values):
                if x not in self.dataflow.needed_after:
                    continue
                # The epilogue reads the last layer's carry, which is not kept twice.
                if n == self.count - 1 and place in carried:
                    self.after[x] = FromCarry(carried.index(place))
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
        """Returns the split loss."""
        groups = self.groups()
        kinds = [self.kind(group) for group in groups]
        kind_of = [0] * self.count
        initial: list[Operand | None] = [None] * len(self.dataflow.avals)
        for number, group in enumerate(groups):
            for n in group.layers:
                kind_of[n] = number
            # The first layer's arguments are the first values of the slots.
            if 0 in group.layers:
                first = self.dataflow.subprograms[0].arguments
                for role, x in zip(group.roles, first, strict=True):
                    if isinstance(role, Carried):
                        initial[role.slot] = x
        aval = lambda x: self.flat.avals[x]
        slot = {s: aval(x) for held in self.dataflow.slots for x, s in held.items()}
        kept = {
            place.number: aval(x)
            for x, place in self.after.items()
            if isinstance(place, FromKept)
        }
        # A later kind may keep more values than an earlier kind has entries for.
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
            inside=frozenset(self.dataflow.layer_of),
        )
