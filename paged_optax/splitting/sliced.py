"""Layers whose stacked parameters are indexed, one layer after the other."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike

from paged_optax.analysis.flat import ELEMENTWISE, Flat, trace
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.splitting.depends import SplitError, values_in, values_of
from paged_optax.splitting.find import (
    Layers,
    Member,
    Names,
    first_names,
    nbytes_of,
    one_layer,
)
from paged_optax.splitting.lines import line_of
from paged_optax.splitting.stacking import Stack
from paged_optax.splitting.whole import Whole, Wholes


@dataclasses.dataclass(frozen=True, eq=False)
class Sliced:
    """Layers that a loss takes from stacks, as `stack[n]` in a loop of Python.

    Attributes:
      name: What the paths of the stacks begin with.
      stacks: The parameters, by what they are within a layer.
      axes: For each stack the axis that is the layers'.
      length: How many layers there are.
      nbytes: Their bytes.
      guess: Whether all stacks are in one list, whose layers may have stacks.
    """

    name: str
    stacks: Mapping[Member, Stack]
    axes: Mapping[int, int]
    length: int
    nbytes: int
    guess: bool

    @property
    def shown(self) -> str:
        """What the paths of the stacks begin with."""
        return f"{self.name or first_names(self.stacks)}, by their numbers"

    @property
    def leaves(self) -> set[int]:
        """The numbers of the stacks."""
        return set(self.axes)

    def apart(
        self, closed: core.ClosedJaxpr
    ) -> tuple[Flat, tuple[dict[Member, int], ...]]:
        """The loss with a parameter for each layer in the place of each slice.

        Args:
          closed: The loss.

        Returns:
          The loss, and each layer's parameters in it.

        Raises:
          SplitError: If something else is done with a stack.
        """
        flat = _WithoutCheckpoints(closed, self.leaves)
        apart = _Apart(flat, self)
        members = tuple(
            {name: apart.parts[stack.leaves[0]][n] for name, stack in found}
            for n, found in enumerate([self.stacks.items()] * self.length)
        )
        return apart.flat, members

    def refuse_other_order(self, turns: Sequence[int]) -> None:
        """Refuses layers that are computed in another order than they are stacked in.

        Args:
          turns: For each layer its turn.
        """
        if list(turns) != sorted(turns):
            order = sorted(range(len(turns)), key=lambda n: turns[n])
            raise SplitError(
                f"the layers of {self.name or 'all parameters'} are computed in the"
                f" order {order} of their numbers: stack them once, outside the loss,"
                " in the order in which it takes them."
            )


class _WithoutCheckpoints(Flat):
    """A loss whose layers are not computed again as a whole: a step does that.

    A checkpoint that is given whole stacks is left out too, or nothing would be known
    of what it takes of them.
    """

    def __init__(self, closed: core.ClosedJaxpr, leaves: set[int]):
        self.leaves = leaves
        self.producer: dict[int, Equation] = {}
        self.known = 0
        super().__init__(closed, checkpoints=False, derivatives=False)

    def _inlines(self, eqn: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
        if eqn.primitive.name != "remat2" or eqn.params["policy"] is not None:
            return super()._inlines(eqn, operands)
        new, self.known = self.equations[self.known :], len(self.equations)
        for equation in new:
            self.producer.update(dict.fromkeys(equation.outputs, equation))
        found = {self._stack_of(x) for x in values_of(operands)} - {None}
        whole = any(x is not None and x[1] for x in found)
        return whole or 2 * len(found) > len(self.leaves)

    def _stack_of(self, x: int) -> tuple[int, bool] | None:
        """The stack that a value is made of alone, and whether of the whole."""
        whole = True
        while x not in self.leaves:
            equation = self.producer.get(x)
            if equation is None or len(values_in(equation)) != 1:
                return None
            name = equation.primitive.name
            whole = whole and (name in ELEMENTWISE or name == "transpose")
            (x,) = values_in(equation)
        return x, whole


class _Apart:
    """A loss, being written anew with a parameter for each layer."""

    def __init__(self, flat: Flat, sliced: Sliced):
        self.flat = copy.copy(flat)
        self.flat.avals, self.flat.equations = list(flat.avals), []
        self.renamed: dict[int, int] = {}
        self.parts = {n: self._parts(n, axis) for n, axis in sliced.axes.items()}
        wholes = Wholes(flat, list(sliced.axes))
        for equation in flat.equations:
            if wholes.follow(equation):
                continue
            if all(x not in wholes.whole for x in values_in(equation)):
                inputs = tuple(map(self._read, equation.inputs))
                self.flat.equations.append(dataclasses.replace(equation, inputs=inputs))
                continue
            x = equation.inputs[0]
            whole = None if isinstance(x, Constant) else wholes.whole.get(x)
            layers = whole and wholes.slices(equation).get(sliced.axes[whole.leaf])
            if whole is None or layers is None:
                raise SplitError(
                    f"the stacked parameters of {sliced.name or 'all layers'} are used"
                    f" whole at {line_of(equation)}, beside the layers that are taken"
                    " of them by their numbers: a layer's parameters are there in its"
                    " turn alone. Compute what else is needed of them layer by layer,"
                    " such as a norm."
                )
            for output, layer in zip(equation.outputs, layers, strict=True):
                self._put(equation, whole, sliced.axes[whole.leaf], layer, output)
        if any(x in wholes.whole for x in values_of(flat.outputs)):
            raise SplitError(
                f"the loss returns the stacked parameters of {sliced.name}: return a"
                " value computed of them, such as a norm."
            )
        self.flat.outputs = list(map(self._read, flat.outputs))

    def _number(self, aval: ShapedArray) -> int:
        self.flat.avals.append(aval)
        return len(self.flat.avals) - 1

    def _parts(self, leaf: int, axis: int) -> list[int]:
        """Parameters for each layer of a stack."""
        aval = self.flat.avals[leaf]
        shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
        one = aval.update(shape=shape)
        return [self._number(one) for _ in range(aval.shape[axis])]

    def _read(self, x: Operand) -> Operand:
        return x if isinstance(x, Constant) else self.renamed.get(x, x)

    def _put(
        self, equation: Equation, whole: Whole, axis: int, layer: int, output: int
    ) -> None:
        """Makes of a layer's own parameter what was a slice of the stack."""
        part = self.parts[whole.leaf][layer]
        shape = self.flat.avals[output].shape

        def run(x: ArrayLike) -> ArrayLike:
            x = whole.one(x, axis)
            if np.shape(x) == shape:
                return x
            place = whole.axes.index(axis)
            x = lax.expand_dims(x, [place])
            if x.shape == shape:
                return x
            # Not all of the layer: `stack[n, :2]`.
            params = dict(equation.params)
            starts, limits, strides = (
                params[name] for name in ("start_indices", "limit_indices", "strides")
            )
            assert isinstance(starts, tuple) and isinstance(limits, tuple)
            assert strides is None or isinstance(strides, tuple)
            at = lambda old, value: (*old[:place], value, *old[place + 1 :])
            strides = strides and at(strides, 1)
            return lax.slice(x, at(starts, 0), at(limits, 1), strides)

        aval = self.flat.avals[part]
        closed, _ = trace(run, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        body = Flat(closed, derivatives=False)
        names = {0: part} | {
            x: self._number(body.avals[x]) for e in body.equations for x in e.outputs
        }
        read = lambda x: x if isinstance(x, Constant) else names[x]
        for e in body.equations:
            self.flat.equations.append(
                e.of(map(read, e.inputs), map(names.__getitem__, e.outputs), equation)
            )
        (made,) = body.outputs
        assert not isinstance(made, Constant)
        self.renamed[output] = names[made]


def slices(
    closed: core.ClosedJaxpr,
    leaves: Sequence[tuple[bool, Names]],
    lists: Sequence[Layers],
) -> list[Sliced]:
    """All layers that are taken from stacks by their numbers, the largest first.

    Args:
      closed: The loss.
      leaves: For each parameter whether it is frozen, and its names.
      lists: Layers that are numbered: what is indexed in one alone are its parts.
    """
    flat = Flat(closed, derivatives=False)
    axes = _axes(flat, range(len(leaves)))
    groups: dict[tuple[Names, int], list[int]] = defaultdict(list)
    for n, axis in axes.items():
        names = leaves[n][1]
        for k in range(len(names)):
            groups[names[:k], flat.shape(n)[axis]].append(n)
    # Of all names that the same stacks begin with the longest.
    chosen = {tuple(own): (names, n) for (names, n), own in groups.items()}
    found: list[Sliced] = []
    for own, (common, length) in chosen.items():
        within = [x.members for x in lists if x.leaves.issuperset(own)]
        parts = any({*own} <= {*one.values()} for each in within for one in each)
        if parts or all(leaves[n][0] for n in own):
            continue
        stacks = {
            (leaves[n][0], leaves[n][1][len(common) :]): Stack((n,), axes[n])
            for n in own
        }
        stacks = one_layer(stacks, lambda x: len(flat.shape(x.leaves[0])) - 1)
        size = sum(nbytes_of(flat.avals[n]) for n in own)
        name, along = "/".join(common), {n: axes[n] for n in own}
        found.append(Sliced(name, stacks, along, length, size, bool(within)))
    return sorted(found, key=lambda each: -each.nbytes)


def _axes(flat: Flat, leaves: Sequence[int]) -> dict[int, int]:
    """The parameters that are stacks, and the axis of each that is the layers'."""
    wholes = Wholes(flat, leaves)
    taken: dict[int, list[dict[int, list[int]]]] = defaultdict(list)
    for equation in flat.equations:
        if wholes.follow(equation) or not equation.inputs:
            continue
        if found := wholes.slices(equation):
            (x,) = values_of(equation.inputs[:1])
            taken[wholes.whole[x].leaf].append(found)
    axes = {n: _axis(flat.shape(n), found) for n, found in taken.items()}
    return {n: axis for n, axis in axes.items() if axis is not None}


def _axis(
    shape: Sequence[int], found: Sequence[Mapping[int, Sequence[int]]]
) -> int | None:
    """The axis of a stack that is the layers', or None: the one with most of them."""
    best, most = None, 1
    for axis in range(len(shape)):
        if all(axis in each for each in found):
            count = len({n for each in found for n in each[axis]})
            if count > most:
                best, most = axis, count
    return best
