"""Assembles the stages of a loss: kinds of equal layers, their carry and tables."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Operand, Program, used_values
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.numbered import Member
from paged_optax.splitting.stages import find_stages

# Most values that may pass through a layer that does not need them: each layer's input
# is saved, including such values.
_PASSING = 2


class Weight(NamedTuple):
    """A parameter of the layer."""

    member: Member


class Carried(NamedTuple):
    """A value of the carry."""

    slot: int


class Seen(NamedTuple):
    """A value from before the layers or a constant, the same for all layers."""

    value: Operand


class FromTable(NamedTuple):
    """A layer's row of a table."""

    table: int


class Kept(NamedTuple):
    """A value that a layer keeps for the epilogue; None: the values of all layers."""

    number: int
    layer: int | None


#: The role of a layer's argument.
Role = Weight | Carried | Seen | FromTable


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """The program of equal layers."""

    program: Callable[[Sequence[ArrayLike]], Sequence[ArrayLike]]
    roles: Sequence[Role]
    # The index of the result with the next value of each slot; others keep their value.
    carried: Mapping[int, int]
    # The index of the result for each kept value that layers of this kind compute.
    kept: Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A loss split into prologue, kinds of layers, and epilogue."""

    flat: Flat
    kinds: Sequence[LayerKind]
    kind_indices: Sequence[int]  # of each layer
    # First value of each slot of the carry; None for zeros.
    initial: Sequence[Operand | None]
    carried: Sequence[ShapedArray]  # the slots' shapes and dtypes
    # Arguments that differ between layers: an operand for each layer (None if the layer
    # needs none), or one operand with layers on its leading axis.
    tables: Sequence[Sequence[Operand | None] | Operand]
    # Shapes and dtypes of the values that each layer keeps.
    kept: Sequence[ShapedArray]
    # Values of layers that the epilogue reads, from the last carry or kept.
    after: Mapping[int, Carried | Kept]
    inside: frozenset[int]  # values that layers compute

    @property
    def seen(self) -> list[int]:
        """The values that all layers read, without the constants of the loss."""
        roles = (role for kind in self.kinds for role in kind.roles)
        values = used_values(role.value for role in roles if isinstance(role, Seen))
        return [x for x in dict.fromkeys(values) if x not in self.flat.constants]


class _Subprogram(NamedTuple):
    """Equations with renumbered values, so that equal programs compare equal."""

    program: Program  # without results
    arguments: tuple[Operand, ...]  # operands in the loss, with constants
    avals: tuple[Hashable, ...]  # the arguments' shapes and dtypes
    values: tuple[int, ...]  # numbers in the loss of the values after the arguments

    @classmethod
    def create(cls, flat: Flat, positions: Sequence[int]) -> "_Subprogram":
        # Constants are arguments, so that layers may differ by a literal.
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
            for n in positions
        ]
        program, args = Program.create(eqns, ())
        arguments = tuple(constants.get(x, x) for x in args)
        values = tuple(x for e in eqns for x in e.outputs)
        return cls(program, arguments, tuple(map(flat.aval, arguments)), values)


@dataclasses.dataclass(eq=False)
class _Group:
    """A group of equal layers."""

    layers: list[int]
    computed: Hashable  # for comparison of programs
    # The role of each argument; None for values from before the layers.
    roles: Sequence[Weight | Carried | None]
    # The place among the layer's values of each slot's next value; None for the last
    # layer, which has no next value and so agrees with all others.
    carried: Mapping[int, int] | None

    def takes(self, other: "_Group") -> bool:
        """True if another layer belongs to this group."""
        # The first layer reads values from before the layers instead of a carry.
        first = other.layers == [0]
        return (
            self.computed == other.computed
            and (None in (self.carried, other.carried) or self.carried == other.carried)
            and all(
                local == theirs
                or (first and theirs is None and isinstance(local, Carried))
                for local, theirs in zip(self.roles, other.roles, strict=True)
            )
        )


class Assembly:
    """The carry of all layers, with the tables and kept values that they share."""

    def __init__(self, cuts: Cuts, members: Mapping[int, Member]):
        depends = self.depends = cuts.depends
        self.members, self.flat, self.count = members, depends.flat, depends.count
        stages = find_stages(cuts, members)
        self.subprograms = [
            _Subprogram.create(self.flat, item) for item in _in_order(cuts, stages)
        ]
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
        groups = self._groups()
        initial: list[Operand | None] = [None] * len(self.carried)
        for group in groups:
            # The first layer's arguments are the first values of the slots.
            if 0 in group.layers:
                first = self.subprograms[0].arguments
                for role, x in zip(group.roles, first, strict=True):
                    if isinstance(role, Carried):
                        initial[role.slot] = x
        kind_of = {n: index for index, x in enumerate(groups) for n in x.layers}
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

    def _groups(self) -> list[_Group]:
        """Groups equal layers. The first layer is added last, to any matching group."""
        groups: list[_Group] = []
        for n in (*range(1, self.count), 0):
            group = self._single(n)
            known = next((g for g in groups if g.takes(group)), None)
            if known is None:
                groups.append(group)
                continue
            known.layers.append(n)
            known.carried = group.carried if known.carried is None else known.carried
        return groups

    def _single(self, n: int) -> _Group:
        subprogram, members = self.subprograms[n], self.members

        def role(x: Operand) -> Weight | Carried | None:
            if isinstance(x, Constant):
                return None
            if x in members:
                return Weight(members[x])
            return Carried(self.slots[n][x]) if x in self.slots[n] else None

        carried = None
        if n + 1 < self.count:
            places = {x: k for k, x in enumerate(subprogram.values)}
            following = self.slots[n + 1].items()
            carried = {slot: places[x] for x, slot in following if x in places}
        computed = subprogram.program, subprogram.avals
        return _Group([n], computed, [*map(role, subprogram.arguments)], carried)

    def _kind(self, group: _Group) -> LayerKind:
        subprogram = self.subprograms[group.layers[0]]
        arguments = zip(
            *(self.subprograms[n].arguments for n in group.layers), strict=True
        )
        roles = [
            role or self._before_layers(group.layers, operands)
            for role, operands in zip(group.roles, arguments, strict=True)
        ]
        carried = self._last(group) if group.carried is None else group.carried
        kept = self._kept(group, carried)
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

    def _last(self, group: _Group) -> dict[int, int]:
        """The carry of a last layer of its own kind, by shapes and dtypes."""
        values = self.subprograms[group.layers[0]].values
        # The latest value of each type, as in the other layers.
        free = [k for k, x in enumerate(values) if x in self.needed_after][::-1]
        carried: dict[int, int] = {}
        for slot, aval in enumerate(self.carried):
            for place in free:
                if place not in carried.values() and self._equal(aval, values[place]):
                    carried[slot] = place
                    break
        return carried

    def _kept(self, group: _Group, carried: Mapping[int, int]) -> dict[int, int]:
        """The values that a group's layers keep for the epilogue, by number."""
        places: dict[int, int] = {}
        numbers: dict[int, int] = {}
        slots = {place: slot for slot, place in carried.items()}
        for n in group.layers:
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


def _in_order(cuts: Cuts, stages: Mapping[int, int]) -> list[list[int]]:
    """Sorts the equations of each layer depth first, operands before users.

    The order depends only on the computation, so that equal layers compare equal. The
    order of the trace differs: an equation that depends on parameters in other layers
    may depend on none in the first layer, and is then sorted before the layers.
    """
    eqns, source = cuts.depends.flat.eqns, cuts.depends.flat.source
    inputs = lambda n: (source[x] for x in eqns[n].numbers if x in source)
    needs = {
        n: [m for m in inputs(n) if stages.get(m) == layer]
        for n, layer in stages.items()
    }
    used = {m for item in needs.values() for m in item}
    layers = collections.defaultdict[int, dict[int, None]](dict)
    for end in (n for n in cuts.order if n not in used):
        done, queue = layers[stages[end]], [end]
        while queue:
            missing = [m for m in needs[queue[-1]] if m not in done]
            if missing:
                queue.append(missing[0])
            else:
                done[queue.pop()] = None
    return [list(layers[n]) for n in range(cuts.depends.count)]
