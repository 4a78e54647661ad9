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
from paged_optax.splitting.dependence import SplitError, source_line, used_values
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
    eqns: tuple[Equation, ...] = ()  # that prepare the stack

    def one(self, x: ArrayLike, axis: int) -> ArrayLike:
        """Prepares a slice of the stack along `axis`."""
        for eqn in self.eqns:
            if eqn.primitive.name == "transpose":
                order = _numbers(eqn, "permutation")
                x = lax.transpose(x, [k - (k > axis) for k in order if k != axis])
                axis = order.index(axis)
            else:
                operands = [getattr(o, "value", x) for o in eqn.inputs]
                (x,) = eqn.bind(operands, None)
        return x


class Wholes:
    """Follows whole stacks through a loss up to their indexing."""

    def __init__(self, flat: Flat, leaves: Iterable[int]):
        self.flat = flat
        self.whole = {n: Whole(n, tuple(range(len(flat.shape(n))))) for n in leaves}

    def follow(self, eqn: Equation) -> bool:
        """Returns whether an equation prepares a whole stack, and records the result.

        Transpositions and elementwise equations can prepare each layer separately.
        """
        values, name = eqn.numbers, eqn.primitive.name
        if len(values) != 1 or values[0] not in self.whole:
            return False
        whole = self.whole[values[0]]
        axes, eqns = whole.axes, (*whole.eqns, eqn)
        if name == "transpose":
            axes = tuple(axes[k] for k in _numbers(eqn, "permutation"))
        elif name == "sharding_constraint":
            eqns = whole.eqns
        elif not (
            name in ELEMENTWISE
            and len(eqn.outputs) == 1
            and self.flat.is_elementwise(eqn, self.flat.shape(values[0]))
        ):
            return False
        self.whole[eqn.outputs[0]] = Whole(whole.leaf, axes, eqns)
        return True

    def slices(self, eqn: Equation) -> dict[int, list[int]]:
        """Axes along which an equation slices a stack into layers.

        Maps each axis to the numbers of the layers that are the equation's results.
        """
        values, name = eqn.numbers, eqn.primitive.name
        if len(values) != 1 or values[0] not in self.whole:
            return {}
        axes, shape = self.whole[values[0]].axes, self.flat.shape(values[0])
        if name == "slice":
            starts = _numbers(eqn, "start_indices")
            limits = _numbers(eqn, "limit_indices")
            bounds = zip(axes, starts, limits, strict=True)
            return {axis: [start] for axis, start, stop in bounds if stop - start == 1}
        if name in ("split", "unstack"):
            (axis,) = _numbers(eqn, "axis")
            if len(eqn.outputs) == shape[axis]:
                return {axes[axis]: list(range(shape[axis]))}
        return {}


def _numbers(eqn: Equation, name: str) -> list[int]:
    """Numbers among an equation's parameters; empty for None."""
    value = dict(eqn.params)[name]
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
    for eqn in flat.eqns:
        if not wholes.follow(eqn) and (layers := wholes.slices(eqn)):
            indexed[wholes.whole[eqn.numbers[0]].leaf].append(layers)
    groups = defaultdict[tuple[Names, int], dict[int, int]](dict)
    for n, item in indexed.items():
        if (axis := _axis(flat.shape(n), item)) is not None:
            names = leaves[n][1]
            for k in range(len(names)):
                groups[names[:k], flat.shape(n)[axis]][n] = axis
    # Several prefixes may have the same stacks. The longest prefix wins.
    subset = {tuple(axes): (common, n, axes) for (common, n), axes in groups.items()}
    results: list[Candidate] = []
    for common, length, axes in subset.values():
        within = [x for x in lists if x.leaves >= set(axes)]
        layers = (
            {x.leaves[k] for x in item.stacks.values()}
            for item in within
            for k in range(item.length)
        )
        parts = any(set(axes) <= layer for layer in layers)
        if parts or all(leaves[n][0] for n in axes):
            continue
        stacks = {
            (leaves[n][0], leaves[n][1][len(common) :]): Stack((n,), axis)
            for n, axis in axes.items()
        }
        name, stacks = "/".join(common), relabeled(stacks, flat.avals)
        label = f"{name or 'stacks'}, by their numbers"
        results.append(Candidate(name, label, stacks, length, bool(within)))
    return results


def _axis(
    shape: Sequence[int], indexed: Sequence[Mapping[int, Sequence[int]]]
) -> int | None:
    """The axis along which most layers are indexed, or None."""
    counts = {
        axis: len({n for item in indexed for n in item[axis]})
        for axis in range(len(shape))
        if all(axis in item for item in indexed)
    }
    best = max(counts, key=lambda axis: counts[axis], default=None)
    return best if best is not None and counts[best] > 1 else None


def by_layer(flat: Flat, layers: Candidate) -> tuple[Flat, list[dict[Member, int]]]:
    """Replaces slices of stacks by parameters of single layers.

    Returns the loss, and the numbers of each layer's parameters.
    """
    new = copy.copy(flat)
    new.avals, new.eqns = list(flat.avals), []
    renamed: dict[int, Operand] = {}

    def read(x: Operand) -> Operand:
        return x if isinstance(x, Constant) else renamed.get(x, x)

    def new_value(aval: ShapedArray) -> int:
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
        parts[leaf] = [new_value(aval) for _ in range(layers.length)]
    wholes = Wholes(flat, axes)
    for eqn in flat.eqns:
        if wholes.follow(eqn):
            continue
        if all(x not in wholes.whole for x in eqn.numbers):
            inputs = tuple(map(read, eqn.inputs))
            new.eqns.append(dataclasses.replace(eqn, inputs=inputs))
            continue
        subset = wholes.slices(eqn)
        whole = wholes.whole.get(eqn.numbers[0])
        if whole is None or axes[whole.leaf] not in subset:
            raise used_whole(layers, eqn)
        axis = axes[whole.leaf]
        for output, n in zip(eqn.outputs, subset[axis], strict=True):
            part = parts[whole.leaf][n]
            body = _slice(eqn, whole, axis, new.avals[part], flat.shape(output))
            names = {0: part}
            names |= {x: new_value(body.avals[x]) for e in body.eqns for x in e.outputs}
            rename = lambda x, names=names: x if isinstance(x, Constant) else names[x]
            new.eqns += [
                e.of(map(rename, e.inputs), [names[x] for x in e.outputs], eqn)
                for e in body.eqns
            ]
            renamed[output] = rename(body.outputs[0])
    if any(x in wholes.whole for x in used_values(flat.outputs)):
        raise used_whole(layers, None)
    new.outputs = list(map(read, flat.outputs))
    members = [
        {name: parts[stack.leaves[0]][n] for name, stack in layers.stacks.items()}
        for n in range(layers.length)
    ]
    return new, members


def _slice(
    eqn: Equation,
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
            _numbers(eqn, name)
            for name in ("start_indices", "limit_indices", "strides")
        )
        starts[place], limits[place] = 0, 1
        return lax.slice(x, starts, limits, strides or None)

    closed, _ = trace(run, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return Flat(closed, derivatives=False)


def used_whole(layers: Candidate, eqn: Equation | None) -> SplitError:
    """The error for stacks that an equation uses whole, or that the loss returns."""
    if eqn is None:
        return SplitError(
            f"the loss returns the stacked parameters of {layers.name}. Return a value"
            " computed from them, such as a norm, and pass state in the batch."
        )
    return SplitError(
        f"the stacked parameters of {layers.name or 'all layers'} are used whole at"
        f" {source_line(eqn)}, and also layer by layer. A layer's parameters are"
        " available only within the layer. Compute other values of them, such as a"
        " norm, in each layer. For several inputs, pass all of them through a layer at"
        " once."
    )
