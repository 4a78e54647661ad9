"""Candidates for the layers of a loss: stacks that are indexed layer by layer."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import ELEMENTWISE, Flat, trace
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.splitting.dependence import SplitError, line_of, values_of
from paged_optax.splitting.numbered import (
    Candidate,
    Member,
    Names,
    Stack,
    relabeled,
)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole stack of parameters, possibly transposed or cast."""

    leaf: int  # number of the stack
    axes: tuple[int, ...]  # the stack's axis for each axis of the prepared stack
    equations: tuple[Equation, ...] = ()  # that prepare the stack

    def one(self, x: ArrayLike, axis: int) -> ArrayLike:
        """Prepares a slice of the stack along `axis`."""
        for equation in self.equations:
            if equation.primitive.name == "transpose":
                order = _numbers(equation, "permutation")
                x = lax.transpose(x, [k - (k > axis) for k in order if k != axis])
                axis = order.index(axis)
            else:
                operands = [getattr(o, "value", x) for o in equation.inputs]
                (x,) = equation.bind(operands, None)
        return x


class Wholes:
    """Follows whole stacks through a loss up to their indexing."""

    def __init__(self, flat: Flat, leaves: Iterable[int]):
        self.flat = flat
        self.whole = {n: Whole(n, tuple(range(len(flat.shape(n))))) for n in leaves}

    def follow(self, equation: Equation) -> bool:
        """Returns whether an equation prepares a whole stack, and records the result.

        Transpositions and elementwise equations can prepare each layer separately.
        """
        values, name = equation.numbers, equation.primitive.name
        if len(values) != 1 or values[0] not in self.whole:
            return False
        whole = self.whole[values[0]]
        axes, equations = whole.axes, (*whole.equations, equation)
        if name == "transpose":
            axes = tuple(axes[k] for k in _numbers(equation, "permutation"))
        elif name == "sharding_constraint":
            equations = whole.equations
        elif not (
            name in ELEMENTWISE
            and len(equation.outputs) == 1
            and self.flat.is_elementwise(equation, self.flat.shape(values[0]))
        ):
            return False
        self.whole[equation.outputs[0]] = Whole(whole.leaf, axes, equations)
        return True

    def slices(self, equation: Equation) -> dict[int, list[int]]:
        """Axes along which an equation slices a stack into layers.

        Maps each axis to the numbers of the layers that are the equation's results.
        """
        values, name = equation.numbers, equation.primitive.name
        if len(values) != 1 or values[0] not in self.whole:
            return {}
        axes, shape = self.whole[values[0]].axes, self.flat.shape(values[0])
        if name == "slice":
            starts = _numbers(equation, "start_indices")
            limits = _numbers(equation, "limit_indices")
            bounds = zip(axes, starts, limits, strict=True)
            return {axis: [start] for axis, start, stop in bounds if stop - start == 1}
        if name in ("split", "unstack"):
            (axis,) = _numbers(equation, "axis")
            if len(equation.outputs) == shape[axis]:
                return {axes[axis]: list(range(shape[axis]))}
        return {}


def _numbers(equation: Equation, name: str) -> list[int]:
    """Numbers among an equation's parameters; empty for None."""
    value = dict(equation.params)[name]
    return [value] if isinstance(value, int) else list(value or ())  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def slices(
    flat: Flat, leaves: Sequence[tuple[bool, Names]], lists: Sequence[Candidate]
) -> list[Candidate]:
    """Returns all layers that a loss indexes from stacks, as `stack[n]`.

    An array that is indexed within one of the numbered `lists` has parts, not layers.
    `leaves` holds whether each parameter is frozen, and its names.
    """
    wholes = Wholes(flat, range(len(leaves)))
    indexed = defaultdict[int, list[dict[int, list[int]]]](list)
    for equation in flat.equations:
        if not wholes.follow(equation) and (layers := wholes.slices(equation)):
            indexed[wholes.whole[equation.numbers[0]].leaf].append(layers)
    groups = defaultdict[tuple[Names, int], dict[int, int]](dict)
    for n, each in indexed.items():
        if (axis := _axis(flat.shape(n), each)) is not None:
            names = leaves[n][1]
            for k in range(len(names)):
                groups[names[:k], flat.shape(n)[axis]][n] = axis
    # Several prefixes may have the same stacks. The longest prefix wins.
    chosen = {tuple(axes): (common, n, axes) for (common, n), axes in groups.items()}
    results: list[Candidate] = []
    for common, length, axes in chosen.values():
        within = [x for x in lists if x.leaves >= set(axes)]
        layers = (
            {x.leaves[k] for x in each.stacks.values()}
            for each in within
            for k in range(each.length)
        )
        parts = any(set(axes) <= layer for layer in layers)
        if parts or all(leaves[n][0] for n in axes):
            continue
        stacks = {
            (leaves[n][0], leaves[n][1][len(common) :]): Stack((n,), axis)
            for n, axis in axes.items()
        }
        name, stacks = "/".join(common), relabeled(stacks, flat.avals)
        shown = f"{name or 'stacks'}, by their numbers"
        results.append(Candidate(name, shown, stacks, length, bool(within)))
    return results


def _axis(
    shape: Sequence[int], indexed: Sequence[Mapping[int, Sequence[int]]]
) -> int | None:
    """The axis along which most layers are indexed, or None."""
    counts = {
        axis: len({n for each in indexed for n in each[axis]})
        for axis in range(len(shape))
        if all(axis in each for each in indexed)
    }
    best = max(counts, key=lambda axis: counts[axis], default=None)
    return best if best is not None and counts[best] > 1 else None


def by_layer(flat: Flat, layers: Candidate) -> tuple[Flat, list[dict[Member, int]]]:
    """Replaces slices of stacks by parameters of single layers.

    Returns the loss, and the numbers of each layer's parameters.
    """
    new = copy.copy(flat)
    new.avals, new.equations = list(flat.avals), []
    renamed: dict[int, Operand] = {}

    def read(x: Operand) -> Operand:
        return x if isinstance(x, Constant) else renamed.get(x, x)

    def number(aval: ShapedArray) -> int:
        new.avals.append(aval)
        return len(new.avals) - 1

    parts: dict[int, list[int]] = {}
    axes: dict[int, int] = {}
    for stack in layers.stacks.values():
        (leaf,), axis = stack.leaves, stack.axis
        assert axis is not None
        shape = list(flat.shape(leaf))
        del shape[axis]
        aval = flat.avals[leaf].update(shape=tuple(shape))
        axes[leaf] = axis
        parts[leaf] = [number(aval) for _ in range(layers.length)]
    wholes = Wholes(flat, axes)
    for equation in flat.equations:
        if wholes.follow(equation):
            continue
        if all(x not in wholes.whole for x in equation.numbers):
            inputs = tuple(map(read, equation.inputs))
            new.equations.append(dataclasses.replace(equation, inputs=inputs))
            continue
        chosen = wholes.slices(equation)
        whole = wholes.whole.get(equation.numbers[0])
        if whole is None or axes[whole.leaf] not in chosen:
            raise used_whole(layers, equation)
        axis = axes[whole.leaf]
        for output, n in zip(equation.outputs, chosen[axis], strict=True):
            part = parts[whole.leaf][n]
            body = _slice(equation, whole, axis, new.avals[part], flat.shape(output))
            names = {0: part}
            names |= {
                x: number(body.avals[x]) for e in body.equations for x in e.outputs
            }
            rename = lambda x, names=names: x if isinstance(x, Constant) else names[x]
            new.equations += [
                e.of(map(rename, e.inputs), [names[x] for x in e.outputs], equation)
                for e in body.equations
            ]
            renamed[output] = rename(body.outputs[0])
    if any(x in wholes.whole for x in values_of(flat.outputs)):
        raise used_whole(layers, None)
    new.outputs = list(map(read, flat.outputs))
    members = [
        {name: parts[stack.leaves[0]][n] for name, stack in layers.stacks.items()}
        for n in range(layers.length)
    ]
    return new, members


def _slice(
    equation: Equation,
    whole: Whole,
    axis: int,
    aval: ShapedArray,
    shape: tuple[int, ...],
) -> Flat:
    """The computation of a slice of a prepared stack from a layer's parameter."""
    place = whole.axes.index(axis)

    def run(x: ArrayLike) -> ArrayLike:
        x = whole.one(x, axis)
        # `jnp.unstack` drops the axis.
        x = x if np.shape(x) == shape else lax.expand_dims(x, [place])
        if np.shape(x) == shape:
            return x
        # The slice is a part of the layer, such as `stack[n, :2]`.
        starts, limits, strides = (
            _numbers(equation, name)
            for name in ("start_indices", "limit_indices", "strides")
        )
        starts[place], limits[place] = 0, 1
        return lax.slice(x, starts, limits, strides or None)

    closed, _ = trace(run, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return Flat(closed, derivatives=False)


def used_whole(layers: Candidate, equation: Equation | None) -> SplitError:
    """The error for stacks that an equation uses whole, or that the loss returns."""
    if equation is None:
        return SplitError(
            f"the loss returns the stacked parameters of {layers.name}. Return a value"
            " computed from them, such as a norm, and pass state in the batch."
        )
    return SplitError(
        f"the stacked parameters of {layers.name or 'all layers'} are used whole at"
        f" {line_of(equation)}, and also layer by layer. A layer's parameters are"
        " available only within the layer. Compute other values of them, such as a"
        " norm, in each layer. For several inputs, pass all of them through a layer at"
        " once."
    )
