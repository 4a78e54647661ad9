"""Assembles the stages of a loss: kinds of equal layers, their carry and tables."""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray

from paged_optax.analysis.program import Constant, Operand, Program, used_values
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.pieces import (
    Carried,
    FromTable,
    Kept,
    LayerKind,
    Pieces,
    Role,
    Seen,
    Weight,
)
from paged_optax.splitting.stages import find_stages

# Most values that may pass through a layer that does not need them: each layer's input
# is saved, including such values.
_PASSING = 2


class _Subprogram(NamedTuple):
    """Equations with renumbered values, so that equal programs compare equal."""

    program: Program  # without results
    arguments: tuple[Operand, ...]  # operands in the loss, with constants
    values: tuple[int, ...]  # numbers in the loss of the values after the arguments
    kind: Hashable  # equal for equal programs of parameters of the same names

    @classmethod
    def create(cls, cuts: Cuts, piece: Collection[int]) -> "_Subprogram":
        """Renumbers the values of a layer's equations."""
        # Constants are arguments, so that layers may differ by a literal.
        flat, names = cuts.depends.flat, cuts.depends.names
        constants: dict[int, Constant] = {}

        def number(x: Operand) -> int:
            if isinstance(x, Constant):
                constants[-1 - len(constants)] = x
                return -len(constants)
            return x

        eqns = [
            dataclasses.replace(
                flat.eqns[n], inputs=tuple(map(number, flat.eqns[n].inputs))
            )
            for n in _in_order(cuts, piece)
        ]
        program, args = Program.create(eqns, ())
        arguments = tuple(constants.get(x, x) for x in args)
        values = tuple(x for e in eqns for x in e.outputs)
        types = [
            (flat.aval(x), names.get(n)) for n, x in zip(args, arguments, strict=True)
        ]
        return cls(program, arguments, values, (program, *types))


class Assembly:
    """The carry of all layers, with the tables and kept values that they share."""

    def __init__(self, cuts: Cuts):
        depends = self.depends = cuts.depends
        self.flat, self.count = depends.flat, depends.count
        stages = find_stages(cuts)
        layers = [[n for n, x in stages.items() if x == k] for k in range(self.count)]
        self.subprograms = [_Subprogram.create(cuts, x) for x in layers]
        self.layer_of = {
            x: n for n, item in enumerate(self.subprograms) for x in item.values
        }
        self.last_use: dict[int, int] = {}  # the last later layer that needs each value
        self.needed_after = set(used_values(self.flat.outputs))
        for n in depends.live:
            stage, values = stages[n], self.flat.eqns[n].numbers
            if not 0 <= stage < self.count:
                self.needed_after.update(values)
                continue
            for x in values:
                if self.layer_of.get(x, stage) < stage:
                    self.last_use[x] = max(stage, self.last_use.get(x, 0))
        self.carried: list[ShapedArray] = []
        self.tables: list[Sequence[Operand | None]] = []
        self.kept: list[ShapedArray] = []
        self.after: dict[int, Carried | Kept] = {}
        self.slots = self._find_slots()
        self._check_not_skipping()
        self.roles = [*map(self._roles, range(self.count))]
        self.following = [*map(self._following, range(self.count - 1))]

    def _find_slots(self) -> list[dict[int, int]]:
        """For each layer, the slot of each value of an earlier layer."""
        slots: list[dict[int, int]] = [{}]
        for layer in range(1, self.count):
            # A value keeps its slot as long as a later layer needs it. Afterwards the
            # slot is reused for the next value of its type.
            needed = lambda x, layer=layer: self.last_use.get(x, -1) >= layer
            retained = {x: s for x, s in slots[-1].items() if needed(x)}
            for x in filter(needed, self.subprograms[layer - 1].values):
                retained[x] = self._unused(self.carried, retained.values(), x)
            slots.append(retained)
        return slots

    def _unused(
        self, avals: list[ShapedArray], used: Collection[int], value: int
    ) -> int:
        """The first unused entry of a value's type, which is added if there is none."""
        for index, aval in enumerate(avals):
            if index not in used and self._equal(aval, value):
                return index
        avals.append(self.flat.avals[value])
        return len(avals) - 1

    def _equal(self, aval: ShapedArray, value: int) -> bool:
        return (aval.shape, str(aval.dtype)) == self.flat.aval(value)

    def _check_not_skipping(self) -> None:
        skipping = [
            [x for x in retained if self.layer_of[x] < layer - 1]
            for layer, retained in enumerate(self.slots)
        ]
        if max(map(len, skipping)) > _PASSING:
            last_use = self.last_use
            x = max(last_use, key=lambda x: last_use[x] - self.layer_of[x])
            where = self.depends.line(self.flat.source[x])
            raise SplitError(
                f"a value that layer {self.layer_of[x]} computes at {where} skips"
                f" layers: layer {last_use[x]} uses it. Each layer's input is saved,"
                " and would include all values that skip it. Give the layers before and"
                " after such skips lists of their own, such as params['down'] and"
                " params['up']. The largest is then split."
            )

    def pieces(self) -> Pieces:
        """Returns the loss split into kinds of layers."""
        # The first layer is added last, to any matching group.
        groups: list[list[int]] = []
        for n in (*range(1, self.count), 0):
            equal = [group for group in groups if self._is_equal(n, group)]
            if equal:
                equal[0].append(n)
            else:
                groups.append([n])
        initial: list[Operand | None] = [None] * len(self.carried)
        # The first layer's arguments are the first values of the slots.
        group = next(x for x in groups if 0 in x)
        first = self.subprograms[0].arguments
        for role, x in zip(self.roles[group[0]], first, strict=True):
            if isinstance(role, Carried):
                initial[role.slot] = x
        kind_of = {n: index for index, x in enumerate(groups) for n in x}
        return Pieces(
            flat=self.flat,
            kinds=list(map(self._kind, groups)),
            kind_indices=[kind_of[n] for n in range(self.count)],
            initial=initial,
            carried=self.carried,
            tables=self.tables,
            kept=self.kept,
            after=self.after,
            inside=frozenset(self.layer_of),
        )

    def _roles(self, n: int) -> list[Weight | Carried | None]:
        """The roles of a layer's arguments; None for values from before the layers."""
        known: dict[int, Weight | Carried]
        known = {x: Weight(name) for x, name in self.depends.names.items()}
        known |= {x: Carried(slot) for x, slot in self.slots[n].items()}
        arguments = self.subprograms[n].arguments
        return [known.get(x) if isinstance(x, int) else None for x in arguments]

    def _following(self, n: int) -> dict[int, int]:
        """The place among a layer's values of each slot's next value."""
        places = {x: k for k, x in enumerate(self.subprograms[n].values)}
        return {slot: places[x] for x, slot in self.slots[n + 1].items() if x in places}

    def _is_equal(self, n: int, group: Sequence[int]) -> bool:
        """True if a layer is of a group's kind."""
        if self.subprograms[n].kind != self.subprograms[group[0]].kind:
            return False
        # The last layer has no next values, and so agrees with all others.
        following = [self.following[m] for m in (n, *group) if m + 1 < self.count]
        # The first layer reads values from before the layers instead of a carry.
        return all(x == following[0] for x in following) and all(
            known == role or (n == 0 and role is None and isinstance(known, Carried))
            for known, role in zip(self.roles[group[0]], self.roles[n], strict=True)
        )

    def _kind(self, layers: Sequence[int]) -> LayerKind:
        subprogram = self.subprograms[layers[0]]
        arguments = zip(*(self.subprograms[n].arguments for n in layers), strict=True)
        roles = [
            role or self._before_layers(layers, operands)
            for role, operands in zip(self.roles[layers[0]], arguments, strict=True)
        ]
        last = layers == [self.count - 1]
        carried = self._last() if last else self.following[min(layers)]
        kept = self._kept(layers, carried)
        # A value that is both carried and kept is one result.
        results = sorted({*carried.values(), *kept.values()})
        outputs = tuple(len(roles) + x for x in results)
        program = dataclasses.replace(subprogram.program, outputs=outputs)
        indices = lambda places: {k: results.index(x) for k, x in places.items()}
        return LayerKind(program, roles, indices(carried), indices(kept))

    def _before_layers(
        self, layers: Sequence[int], operands: Sequence[Operand]
    ) -> Role:
        """The role of an argument from before the layers.

        An argument that differs between layers is stored in a table. Equal tables are
        shared.
        """
        first = operands[0]
        if all(x == first for x in operands):
            return Seen(first)
        by_layer = dict(zip(layers, operands, strict=True))
        row = [by_layer.get(n) for n in range(self.count)]
        # Layers of other kinds have no row here. Their tables may fill the gaps.
        for index, known in enumerate(self.tables):
            pairs = [*zip(known, row, strict=True)]
            agree = all(None in pair or pair[0] == pair[1] for pair in pairs)
            aval = next(self.flat.aval(x) for x in known if x is not None)
            if agree and aval == self.flat.aval(first):
                self.tables[index] = [b if a is None else a for a, b in pairs]
                return FromTable(index)
        self.tables.append(row)
        return FromTable(len(self.tables) - 1)

    def _last(self) -> dict[int, int]:
        """The carry of a last layer of its own kind, by shapes and dtypes."""
        values = self.subprograms[-1].values
        # The latest value of each type, as in the other layers.
        free = [k for k, x in enumerate(values) if x in self.needed_after][::-1]
        carried: dict[int, int] = {}
        for slot, aval in enumerate(self.carried):
            for place in free:
                if place not in carried.values() and self._equal(aval, values[place]):
                    carried[slot] = place
                    break
        return carried

    def _kept(
        self, layers: Sequence[int], carried: Mapping[int, int]
    ) -> dict[int, int]:
        """The values that equal layers keep for the epilogue, by number."""
        places: dict[int, int] = {}
        numbers: dict[int, int] = {}
        slots = {place: slot for slot, place in carried.items()}
        for n in layers:
            for place, x in enumerate(self.subprograms[n].values):
                if x not in self.needed_after:
                    continue
                # The epilogue reads the last layer's carry, which is not kept twice.
                if n == self.count - 1 and place in slots:
                    self.after[x] = Carried(slots[place])
                    continue
                if place not in numbers:
                    numbers[place] = self._unused(self.kept, places, x)
                    places[numbers[place]] = place
                self.after[x] = Kept(numbers[place], n)
        return places


def _in_order(cuts: Cuts, piece: Collection[int]) -> Iterable[int]:
    """Sorts the equations of a layer depth first, operands before users.

    The order depends only on the computation, so that equal layers compare equal. The
    order of the trace differs: an equation that depends on parameters in other layers
    may depend on none in the first layer, and is then sorted before the layers.
    """
    eqns, source, piece = cuts.depends.flat.eqns, cuts.depends.flat.source, set(piece)
    needs = {
        n: [m for x in eqns[n].numbers if (m := source.get(x)) in piece] for n in piece
    }
    used = {m for item in needs.values() for m in item}
    done = dict[int, None]()
    for end in (n for n in cuts.order if n in piece and n not in used):
        queue = [end]
        while queue:
            missing = [m for m in needs[queue[-1]] if m not in done]
            if missing:
                queue.append(missing[0])
            else:
                done[queue.pop()] = None
    return done
