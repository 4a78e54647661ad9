"""Whole stacks of parameters, followed to where one layer is taken of them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import ELEMENTWISE, Flat
from paged_optax.analysis.program import FILLS, Constant, Equation, Operand
from paged_optax.backend.types import is_traced
from paged_optax.splitting.depends import values_in, values_of

#: What may be done with a whole stack before it is indexed: an equation, or a
#: permutation of its axes.
_Step = Equation | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A stack, or what is made of a whole one.

    Attributes:
      leaf: The stack.
      axes: For each of its axes that of the stack.
      steps: What was done with the stack.
    """

    leaf: int
    axes: tuple[int, ...]
    steps: tuple[_Step, ...]

    def one(self, x: ArrayLike, axis: int) -> ArrayLike:
        """The same of one layer, which is without the stack's axis for them."""
        for step in self.steps:
            if isinstance(step, tuple):
                x = lax.transpose(x, [k - (k > axis) for k in step if k != axis])
                axis = step.index(axis)
                continue
            operands = [o.value if isinstance(o, Constant) else x for o in step.inputs]
            (x,) = step.bind(operands, None)
        return x


class Wholes:
    """Whole stacks, followed through a loss up to where they are indexed."""

    def __init__(self, flat: Flat, leaves: Sequence[int]):
        self.flat = flat
        self.known: dict[int, ArrayLike] = {
            n: x
            for n, x in flat.constants.items()
            if _is_index(flat.avals[n]) and not is_traced(x)
        }
        axes = lambda n: tuple(range(len(flat.shape(n))))
        self.whole = {n: Whole(n, axes(n), ()) for n in leaves}

    def follow(self, equation: Equation) -> bool:
        """Whether an equation makes a whole stack of another one, and of no more."""
        self._compute(equation)
        given = values_in(equation)
        if len(given) != 1 or given[0] not in self.whole:
            return False
        whole, name = self.whole[given[0]], equation.primitive.name
        axes, steps = whole.axes, whole.steps
        if name == "transpose":
            order = dict(equation.params)["permutation"]
            assert isinstance(order, tuple)
            axes, steps = tuple(axes[k] for k in order), (*steps, order)
        elif name in ELEMENTWISE and len(equation.outputs) == 1:
            if not self.flat.is_elementwise(equation, self.flat.shape(given[0])):
                return False
            steps = (*steps, equation)
        elif name != "sharding_constraint":
            return False
        made = Whole(whole.leaf, axes, steps)
        self.whole.update(dict.fromkeys(equation.outputs, made))
        return True

    def slices(self, equation: Equation) -> dict[int, list[int]]:
        """The axes of a stack along which an equation takes one layer, or each one.

        Each has the layers that the equation's results are.
        """
        x, *others = equation.inputs
        if isinstance(x, Constant) or x not in self.whole:
            return {}
        if any(y in self.whole for y in values_of(others)):
            return {}
        axes = self.whole[x].axes
        found = _taken(equation, self.flat.shape(x), self._number)
        return {axes[axis]: layers for axis, layers in found}

    def _number(self, x: Operand) -> int | None:
        """An index that is a number of the program."""
        value = x.value if isinstance(x, Constant) else self.known.get(x)
        return None if value is None else int(np.asarray(value).reshape(()))

    def _compute(self, equation: Equation) -> None:
        """Computes an index that is made of numbers of the program."""
        if equation.primitive.name not in ELEMENTWISE | FILLS:
            return
        if not all(_is_index(self.flat.avals[x]) for x in equation.outputs):
            return
        if any(x not in self.known for x in values_in(equation)):
            return
        operands = [
            x.value if isinstance(x, Constant) else self.known[x]
            for x in equation.inputs
        ]
        with jax.ensure_compile_time_eval():
            made = equation.bind(operands, None)
        self.known.update(zip(equation.outputs, made, strict=True))


def _is_index(aval: ShapedArray) -> bool:
    """Whether a value may be an index, or part of how one is made."""
    return getattr(aval.dtype, "kind", "") in ("i", "u", "b") and aval.size == 1


def _taken(
    equation: Equation, shape: Sequence[int], number: Callable[[Operand], int | None]
) -> Iterator[tuple[int, list[int]]]:
    """For each axis along which an equation takes single indices those indices."""
    params = dict(equation.params)
    read = lambda name: tuple(params[name])  # pyright: ignore[reportArgumentType]
    match equation.primitive.name:
        case "slice":
            starts, limits = read("start_indices"), read("limit_indices")
            for axis, (start, limit) in enumerate(zip(starts, limits, strict=True)):
                if limit - start == 1:
                    yield axis, [start]
        case "dynamic_slice":
            for axis, index in enumerate(equation.inputs[1 : 1 + len(shape)]):
                n = number(index)
                if n is not None and read("slice_sizes") == _only(shape, axis):
                    yield axis, [min(max(n, 0), shape[axis] - 1)]
        case "gather":
            numbers = params["dimension_numbers"]
            mapped = getattr(numbers, "start_index_map", ())
            collapsed = getattr(numbers, "collapsed_slice_dims", ())
            n = number(equation.inputs[1])
            if n is not None and len(mapped) == 1 and collapsed == mapped:
                whole = read("slice_sizes") == _only(shape, mapped[0])
                if whole and 0 <= n < shape[mapped[0]]:
                    yield mapped[0], [n]
        case "split" | "unstack":
            axis = params["axis"]
            assert isinstance(axis, int)
            if len(equation.outputs) == shape[axis]:
                yield axis, list(range(shape[axis]))
        case _:
            pass


def _only(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of what has one index along an axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])
