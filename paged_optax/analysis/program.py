"""Programs of pages, and the evaluation of an update leaf by leaf.

A program is a list of equations, each one primitive applied to numbered values.
Programs compare by value: leaves of equal shape have equal programs, and JAX traces and
lowers their loop once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend import core, source_info_util
from jax.sharding import AxisType, Sharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import is_explicit

#: Primitives that fill an array of the leaf's shape with a scalar operand. They may
#: permute any other operand; a page then needs other pages' values.
FILLS = frozenset(["broadcast_in_dim", "reshape"])


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal, compared by value, dtype and weak type."""

    key: tuple[Hashable, ...]
    value: ArrayLike = dataclasses.field(compare=False)

    @classmethod
    def create(cls, literal: core.Literal) -> "Constant":
        """Wraps a jaxpr's literal."""
        aval = literal.aval
        assert isinstance(aval, ShapedArray)
        array = np.asarray(literal.val)
        key = (array.tobytes(), array.shape, str(aval.dtype), aval.weak_type)
        return cls(key, literal.val)


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A parameter with a key of its own: a jaxpr, or an object without a hash."""

    value: object = dataclasses.field(compare=False)
    key: Hashable


#: An operand: the number of a value, or a constant.
Operand = int | Constant


def used_values(operands: Iterable[Operand]) -> list[int]:
    """Returns the operands that are no constants."""
    return [x for x in operands if not isinstance(x, Constant)]


@dataclasses.dataclass(frozen=True)
class Equation:
    """One primitive applied to numbered values."""

    primitive: core.Primitive
    params: tuple[tuple[str, Hashable], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    traced: core.JaxprEqn | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def numbers(self) -> list[int]:
        """The inputs that are no constants."""
        return used_values(self.inputs)

    @property
    def line(self) -> str | None:
        """The line of the user's code that it was traced from, or None."""
        if self.traced is None:
            return None
        return source_info_util.summarize(self.traced.source_info) or None

    def bind(
        self, operands: Sequence[ArrayLike], shape: tuple[int, ...] | None
    ) -> list[Array]:
        """Applies the primitive; `shape` is the page's, or None for whole leaves."""
        if shape is not None and self.primitive.name in FILLS:
            # Traced with the shape of the whole leaf.
            return [jax.lax.broadcast(operands[0], shape)]
        params = {
            name: value.value if isinstance(value, Opaque) else value
            for name, value in self.params
            if name  # an empty name holds a key for comparison
        }
        # Axes that are automatic now may have been explicit during tracing: axes of a
        # rate that was closed over (jax 0.10.2 states the sharding of its broadcast).
        stated = params.get("sharding") if self.primitive.name in FILLS else None
        if isinstance(stated, Sharding) and is_explicit(stated):
            if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
                params["sharding"] = None
        params = self.primitive.get_bind_params(params)
        result = self.primitive.bind(*operands, **params)
        return list(result) if self.primitive.multiple_results else [result]


@dataclasses.dataclass(frozen=True)
class Program:
    """A list of equations; values `0 .. inputs-1` are its arguments."""

    inputs: int
    eqns: tuple[Equation, ...]
    outputs: tuple[Operand, ...]
    elementwise: bool = False

    @classmethod
    def create(
        cls, eqns: Iterable[Equation], outputs: Iterable[Operand]
    ) -> tuple["Program", tuple[int, ...]]:
        """Returns a program of equations, and its arguments by their numbers before.

        Renumbered, leaves of equal shape have equal programs, which JAX traces and
        lowers once.
        """
        eqns, outputs = tuple(eqns), tuple(outputs)
        computed = [x for eqn in eqns for x in eqn.outputs]
        inside = set(computed)
        operands = (*[x for eqn in eqns for x in eqn.inputs], *outputs)
        args = dict.fromkeys(used_values(operands))
        args = [x for x in args if x not in inside]
        names = {x: n for n, x in enumerate((*args, *computed))}
        rename = lambda x: x if isinstance(x, Constant) else names[x]
        renamed = lambda e: Equation(
            e.primitive,
            e.params,
            tuple(map(rename, e.inputs)),
            tuple(map(names.__getitem__, e.outputs)),
        )
        program = tuple(map(renamed, eqns)), tuple(map(rename, outputs))
        return cls(len(args), *program), tuple(args)

    def __call__(
        self, args: Sequence[ArrayLike], shape: tuple[int, ...] | None = None
    ) -> list[PyTree[ArrayLike]]:
        """Runs the equations.

        `shape` is a page's, if the arguments are pages of a leaf (element-wise programs
        only); None if they are whole leaves.
        """
        values: dict[int, ArrayLike] = dict(enumerate(args))
        read = lambda x: x.value if isinstance(x, Constant) else values[x]
        for eqn in self.eqns:
            results = eqn.bind([read(x) for x in eqn.inputs], shape)
            values.update(zip(eqn.outputs, results, strict=True))
        results = [read(x) for x in self.outputs]
        if shape is None:
            return results
        # A constant result has no page to take its shape from.
        return [x if np.ndim(x) else jax.lax.broadcast(x, shape) for x in results]


@dataclasses.dataclass(frozen=True)
class NumberedProgram:
    """A program of numbered values."""

    program: Program
    inputs: tuple[int, ...]  # numbers of its arguments
    # Numbers of its results, or positions of outputs.
    outputs: tuple[Operand, ...]

    def __call__(self, values: Mapping[int, PyTree]) -> dict[Operand, PyTree]:
        """Returns the results, by their numbers."""
        results = self.program([values[i] for i in self.inputs])
        return dict(zip(self.outputs, results, strict=True))


@dataclasses.dataclass(frozen=True)
class LeafUpdate:
    """The update of one parameter, or of one moment that no gradient enters."""

    program: Program
    inputs: tuple[int, ...]  # numbers of the program's arguments
    outputs: tuple[int, ...]  # positions of its first results among all outputs
    between: tuple[int, ...]  # numbers of its other results, for the tail
    avals: tuple[ShapedArray, ...]  # of the results
    shape: tuple[int, ...]  # common to all arrays of an element-wise program
    param_index: int | None  # the parameter of its gradient or position; None: several

    @property
    def places(self) -> tuple[int | None, ...]:
        """For each result its position among the outputs, or None."""
        return (*self.outputs, *[None] * len(self.between))


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A traced function, as one program a leaf."""

    shared: NumberedProgram  # the scalars shared by all leaves
    equations: tuple[Equation, ...]  # of `shared`, with the numbers of all values
    leaf_updates: tuple[LeafUpdate, ...]
    tail: NumberedProgram  # outputs split from concatenated leaves
    direct: tuple[tuple[int, Operand], ...]  # outputs that need no leaf's program
    param_indices: tuple[int | None, ...]  # the parameter of each output

    @property
    def elementwise(self) -> frozenset[int]:
        """Positions of the element-wise outputs."""
        leaves = (x.outputs for x in self.leaf_updates if x.program.elementwise)
        direct = (index for index, _ in self.direct)
        return frozenset(itertools.chain(direct, *leaves))

    @functools.cached_property
    def same(self) -> Mapping[int, int]:
        """For each shared value the first one of an equal computation.

        Optax computes the negative learning rate separately for each leaf.
        """
        first: dict[Hashable, int] = {}
        seen: dict[Hashable, int] = {}
        meaning: dict[Operand, Hashable] = {}
        for eqn in self.equations:
            how = eqn.primitive, eqn.params, *[meaning.get(x, x) for x in eqn.inputs]
            known = first.setdefault(how, eqn.outputs[0])
            meaning.update((x, (known, k)) for k, x in enumerate(eqn.outputs))
        values = used_values(self.shared.outputs)
        return {x: seen.setdefault(meaning.get(x, x), x) for x in values}

    def reached_from(self, numbers: Iterable[int]) -> set[int]:
        """Returns the shared values that depend on arguments."""
        reached = set(numbers)
        for eqn in self.equations:
            if reached.intersection(eqn.numbers):
                reached.update(eqn.outputs)
        return reached


class Evaluation:
    """Outputs of a traced function, computed leaf by leaf.

    The shared values are computed first, then the leaves, which are independent of each
    other, and last the outputs.

    Args:
      analysis: The function.
      args: Its arguments.
      constants: The values that it closes over, by number.
      counts: Step counts of each parameter, by the number of the argument. The shared
        program then runs once for each parameter.
    """

    def __init__(
        self,
        analysis: Analysis,
        args: Sequence[PyTree[ArrayLike]],
        constants: Mapping[int, ArrayLike],
        counts: Mapping[int, Sequence[ArrayLike]] | None = None,
    ):
        complete = lambda values: values | analysis.shared(values)
        self.analysis, self.counts = analysis, counts or {}
        self.values = complete(dict(enumerate(args)) | dict(constants))
        self.by_parameter = [
            complete(self.values | dict(zip(self.counts, item, strict=True)))
            for item in zip(*self.counts.values(), strict=True)
        ]

    def inputs(self, leaf: LeafUpdate) -> list[PyTree[ArrayLike]]:
        """Returns the arguments of a leaf's program."""
        values = self.values
        if self.by_parameter and leaf.param_index is not None:
            values = self.by_parameter[leaf.param_index]
        return [values[i] for i in leaf.inputs]

    def results(
        self, by_leaf: Sequence[Sequence[PyTree[ArrayLike]]]
    ) -> list[PyTree[ArrayLike]]:
        """Returns the outputs, given the results of each leaf's program.

        An output that depends on `counts` and on no leaf is a list of one value for
        each parameter.
        """
        analysis, values = self.analysis, dict(self.values)
        results: dict[Operand, PyTree] = {}
        of_counts = analysis.reached_from(self.counts) if self.counts else ()
        for index, x in analysis.direct:
            if isinstance(x, Constant):
                results[index] = x.value
            elif x in of_counts:
                results[index] = [item[x] for item in self.by_parameter]
            else:
                results[index] = values[x]
        for leaf, new in zip(analysis.leaf_updates, by_leaf, strict=True):
            count = len(leaf.outputs)
            results.update(zip(leaf.outputs, new[:count], strict=True))
            values.update(zip(leaf.between, new[count:], strict=True))
        results |= analysis.tail(values)
        return [results[index] for index in range(len(results))]
