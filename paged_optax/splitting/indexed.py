"""Layers whose stacked parameters are indexed layer by layer."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike

from paged_optax.analysis.flat import ELEMENTWISE, Flat, trace
from paged_optax.analysis.program import FILLS, Constant, Equation, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.backend.types import is_traced
from paged_optax.splitting.dependence import SplitError, line_of, values_in, values_of
from paged_optax.splitting.numbered import (
    Member,
    Names,
    NumberedLayers,
    first_names,
    relabeled,
)
from paged_optax.splitting.stacking import Stack

# A step that prepares a whole stack: an equation, or a permutation of its axes.
_Preparation = Equation | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole stack of parameters, possibly transposed or cast."""

    leaf: int  # number of the stack
    axes: tuple[int, ...]  # the stack's axis for each axis of the prepared stack
    steps: tuple[_Preparation, ...]

    def one(self, x: ArrayLike, axis: int) -> ArrayLike:
        """Prepares a slice of the stack along `axis`."""
        for step in self.steps:
            if isinstance(step, tuple):
                x = lax.transpose(x, [k - (k > axis) for k in step if k != axis])
                axis = step.index(axis)
                continue
            operands = [o.value if isinstance(o, Constant) else x for o in step.inputs]
            (x,) = step.bind(operands, None)
        return x


class Wholes:
    """Follows whole stacks through a loss up to their indexing."""

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
        """Records the result if an equation prepares a whole stack, else False."""
        taken = values_in(equation)
        if len(taken) != 1 or taken[0] not in self.whole:
            return False
        # Transpositions and elementwise equations can prepare each layer separately.
        whole, name = self.whole[taken[0]], equation.primitive.name
        axes, steps = whole.axes, whole.steps
        if name == "transpose":
            order = dict(equation.params)["permutation"]
            assert isinstance(order, tuple)
            axes, steps = tuple(axes[k] for k in order), (*steps, order)
        elif name in ELEMENTWISE and len(equation.outputs) == 1:
            if not self.flat.is_elementwise(equation, self.flat.shape(taken[0])):
                return False
            steps = (*steps, equation)
        elif name != "sharding_constraint":
            return False
        result = Whole(whole.leaf, axes, steps)
        self.whole.update(dict.fromkeys(equation.outputs, result))
        return True

    def slices(self, equation: Equation) -> dict[int, list[int]]:
        """Axes along which an equation slices a stack into layers.

        Maps each axis to the numbers of the layers that are the equation's results.
        """
        x, *others = equation.inputs
        if isinstance(x, Constant) or x not in self.whole:
            return {}
        if any(y in self.whole for y in values_of(others)):
            return {}
        axes = self.whole[x].axes
        taken = _taken(equation, self.flat.shape(x), self._number)
        return {axes[axis]: layers for axis, layers in taken}

    def _number(self, x: Operand) -> int | None:
        """The value of an index that is concrete during tracing, or None."""
        value = x.value if isinstance(x, Constant) else self.known.get(x)
        return None if value is None else int(np.asarray(value).reshape(()))

    def compute_index(self, equation: Equation) -> None:
        """Computes an integer scalar of concrete operands, which may be an index."""
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
        # Needed if split_layers is called within a traced function.
        with jax.ensure_compile_time_eval():
            results = equation.bind(operands, None)
        self.known.update(zip(equation.outputs, results, strict=True))


def _is_index(aval: ShapedArray) -> bool:
    return getattr(aval.dtype, "kind", "") in ("i", "u", "b") and aval.size == 1


def _taken(
    equation: Equation, shape: Sequence[int], number: Callable[[Operand], int | None]
) -> Iterator[tuple[int, list[int]]]:
    """Yields axes along which an equation reads single indices, with the indices."""
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
                # XLA clamps the index of a dynamic slice.
                if n is not None and read("slice_sizes") == _only(shape, axis):
                    yield axis, [min(max(n, 0), shape[axis] - 1)]
        case "gather":
            numbers = params["dimension_numbers"]
            mapped = getattr(numbers, "start_index_map", ())
            collapsed = getattr(numbers, "collapsed_slice_dims", ())
            n = number(equation.inputs[1])
            # The result of a gather out of bounds depends on its mode: such a stack
            # counts as used whole.
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
    return (*shape[:axis], 1, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True, eq=False)
class Sliced:
    """Layers that a loss indexes from stacks, as `stack[n]` in a Python loop."""

    name: str  # common prefix of the stacks' paths
    stacks: Mapping[Member, Stack]  # by name within a layer
    axes: Mapping[int, int]  # the layers' axis of each stack
    length: int  # number of layers
    nbytes: int
    guess: bool  # the stacks may be parts of a numbered list's layers

    @property
    def shown(self) -> str:
        """The prefix of the stacks' paths, for tables and messages."""
        return f"{self.name or first_names(self.stacks)}, by their numbers"

    @property
    def leaves(self) -> set[int]:
        """The numbers of the stacks."""
        return set(self.axes)

    def per_layer(self, flat: Flat) -> tuple[Flat, tuple[dict[Member, int], ...]]:
        """Replaces slices by parameters of single layers.

        Args:
          flat: The loss, without checkpoints around layers.

        Returns:
          The loss, and the numbers of each layer's parameters.
        """
        split = _PerLayer(flat, self)
        members = tuple(
            {
                name: split.parts[stack.leaves[0]][n]
                for name, stack in self.stacks.items()
            }
            for n in range(self.length)
        )
        return split.flat, members

    def refuse_other_order(self, positions: Sequence[int]) -> None:
        """Raises if the order of computation is not the order in the stacks."""
        if list(positions) != sorted(positions):
            order = sorted(range(len(positions)), key=lambda n: positions[n])
            raise SplitError(
                f"the layers of {self.name or 'all parameters'} are computed in the"
                f" order {order} of their numbers. Stack them once, outside the loss,"
                " in the order of computation."
            )


class _PerLayer:
    """Rewrites a loss with a parameter for each layer."""

    def __init__(self, flat: Flat, sliced: Sliced):
        self.flat = copy.copy(flat)
        self.flat.avals, self.flat.equations = list(flat.avals), []
        self.renamed: dict[int, int] = {}
        self.parts = {n: self._parts(n, axis) for n, axis in sliced.axes.items()}
        # A slice is replaced by a computation on one layer's parameter. Any other use
        # of a stack would need all layers.
        wholes = Wholes(flat, list(sliced.axes))
        for equation in flat.equations:
            wholes.compute_index(equation)
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
                    f" whole at {line_of(equation)}, and also indexed layer by layer. A"
                    " layer's parameters are available only within the layer. Compute"
                    " other values of them, such as a norm, layer by layer."
                )
            for output, layer in zip(equation.outputs, layers, strict=True):
                self._put(equation, whole, sliced.axes[whole.leaf], layer, output)
        if any(x in wholes.whole for x in values_of(flat.outputs)):
            raise returned_stacks(sliced.name)
        self.flat.outputs = list(map(self._read, flat.outputs))

    def _number(self, aval: ShapedArray) -> int:
        self.flat.avals.append(aval)
        return len(self.flat.avals) - 1

    def _parts(self, leaf: int, axis: int) -> list[int]:
        """Numbers new parameters for each layer of a stack."""
        aval = self.flat.avals[leaf]
        shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
        one = aval.update(shape=shape)
        return [self._number(one) for _ in range(aval.shape[axis])]

    def _read(self, x: Operand) -> Operand:
        return x if isinstance(x, Constant) else self.renamed.get(x, x)

    def _put(
        self, equation: Equation, whole: Whole, axis: int, layer: int, output: int
    ) -> None:
        """Computes a slice of the stack from a layer's parameter."""
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
            # The slice is a part of the layer, such as `stack[n, :2]`.
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
        # Traced separately; its equations are then renumbered for the loss.
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
        (result,) = body.outputs
        assert not isinstance(result, Constant)
        self.renamed[output] = names[result]


def returned_stacks(name: str) -> SplitError:
    """The error for a loss that returns stacked parameters."""
    return SplitError(
        f"the loss returns the stacked parameters of {name}. Return a value computed"
        " from them, such as a norm."
    )


def slices(
    closed: core.ClosedJaxpr,
    leaves: Sequence[tuple[bool, Names]],
    lists: Sequence[NumberedLayers],
) -> list[Sliced]:
    """Returns all layers that are indexed from stacks, the largest first.

    An array that is indexed within one of the numbered `lists` has parts, not layers.
    `leaves` holds whether each parameter is frozen, and its names.
    """
    flat = Flat(closed, derivatives=False)
    axes = _axes(flat, range(len(leaves)))
    groups: dict[tuple[Names, int], list[int]] = defaultdict(list)
    for n, axis in axes.items():
        names = leaves[n][1]
        for k in range(len(names)):
            groups[names[:k], flat.shape(n)[axis]].append(n)
    # Several prefixes may have the same stacks. The longest prefix wins.
    chosen = {tuple(members): (names, n) for (names, n), members in groups.items()}
    results: list[Sliced] = []
    for members, (common, length) in chosen.items():
        within = [x.members for x in lists if x.leaves.issuperset(members)]
        parts = any({*members} <= {*one.values()} for each in within for one in each)
        if parts or all(leaves[n][0] for n in members):
            continue
        stacks = {
            (leaves[n][0], leaves[n][1][len(common) :]): Stack((n,), axes[n])
            for n in members
        }
        stacks = relabeled(stacks, lambda x: len(flat.shape(x.leaves[0])) - 1)
        size = nbytes([flat.avals[n] for n in members])
        name, along = "/".join(common), {n: axes[n] for n in members}
        results.append(Sliced(name, stacks, along, length, size, bool(within)))
    return sorted(results, key=lambda each: -each.nbytes)


def _axes(flat: Flat, leaves: Sequence[int]) -> dict[int, int]:
    """Maps each parameter that is a stack to the layers' axis."""
    wholes = Wholes(flat, leaves)
    taken: dict[int, list[dict[int, list[int]]]] = defaultdict(list)
    for equation in flat.equations:
        wholes.compute_index(equation)
        if wholes.follow(equation) or not equation.inputs:
            continue
        if layers := wholes.slices(equation):
            (x,) = values_of(equation.inputs[:1])
            taken[wholes.whole[x].leaf].append(layers)
    axes = {n: _axis(flat.shape(n), layers) for n, layers in taken.items()}
    return {n: axis for n, axis in axes.items() if axis is not None}


def _axis(
    shape: Sequence[int], taken: Sequence[Mapping[int, Sequence[int]]]
) -> int | None:
    """The axis along which most layers are indexed, or None."""
    best, most = None, 1
    for axis in range(len(shape)):
        if all(axis in each for each in taken):
            count = len({n for each in taken for n in each[axis]})
            if count > most:
                best, most = axis, count
    return best
