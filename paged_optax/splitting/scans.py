"""Layers of a scan over stacked parameters."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, closed_of
from paged_optax.analysis.program import Constant, Equation, Operand, Program
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.dependence import (
    SplitError,
    line_of,
    producers_of,
    values_in,
    values_of,
)
from paged_optax.splitting.indexed import Whole, Wholes, returned_stacks
from paged_optax.splitting.numbered import (
    Member,
    Names,
    first_names,
    relabeled,
)
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
    Weight,
)
from paged_optax.splitting.stacking import Stack


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """The body of a scan, for parameters that it prepares itself."""

    program: Program
    # For each argument, the stack that it is a layer of, or None.
    prepared: Sequence[Whole | None]

    def __call__(self, arguments: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
        pairs = zip(self.prepared, arguments, strict=True)
        return self.program(
            [x if whole is None else whole.one(x, whole.axes[0]) for whole, x in pairs]
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A scan over stacked parameters."""

    guess: ClassVar[bool] = False

    flat: Flat
    equation: Equation
    # For each array that is scanned over, the stack it is computed from, or None.
    over: tuple[Whole | None, ...]
    name: str  # common prefix of the parameters' paths
    stacks: Mapping[Member, Stack]  # by name within a layer
    nbytes: int

    @property
    def length(self) -> int:
        """Number of layers."""
        return self._traced["length"]

    @property
    def shown(self) -> str:
        """The prefix of the stacks' paths, for tables and messages."""
        return f"{self.name or first_names(self.stacks)}, a scan"

    @property
    def leaves(self) -> set[int]:
        """The numbers of the layers' parameters."""
        return {n for stack in self.stacks.values() for n in stack.leaves}

    @property
    def _traced(self) -> Mapping[str, PyTree]:
        assert self.equation.traced is not None
        return self.equation.traced.params

    def _refuse_elsewhere(self) -> None:
        reached = {stack.leaves[0] for stack in self.stacks.values()}
        returned = reached.intersection(values_of(self.flat.outputs))
        for e in self.flat.equations:
            operands = values_in(e)
            if reached.isdisjoint(operands) or e is self.equation:
                continue
            # Equations may prepare a stack for the scan, for example cast it.
            if len(operands) == 1 and set(e.outputs) <= self.prepared:
                reached.update(e.outputs)
                continue
            raise SplitError(
                f"parameters of layers are used outside of the scan over {self.name},"
                f" at {line_of(e)}. A layer's parameters are available only within the"
                " layer. Let each layer return other values computed from them, such"
                " as a norm. For several inputs, scan once over the layers, with all"
                " inputs in the carry."
            )
        if returned:
            raise returned_stacks(self.name)

    @property
    def prepared(self) -> set[int]:
        """Values computed from the parameters and read by the scan."""
        producer = producers_of(self.flat)
        between = set[int]()
        scanned = self.equation.inputs[-len(self.over) :]
        for x, over in zip(scanned, self.over, strict=True):
            while over is not None and not isinstance(x, Constant) and x in producer:
                between.add(x)
                (x,) = values_in(self.flat.equations[producer[x]])
        return between

    def pieces(self) -> Pieces:
        """Splits the loss: a layer is an iteration of the scan."""
        params = self._traced
        self._refuse_elsewhere()
        if params["reverse"]:
            raise SplitError(
                f"the scan over layers at {line_of(self.equation)} is in reverse:"
                " turn the stacks once, outside the loss (jnp.flip(stack, 0)), and scan"
                " forward."
            )
        called = closed_of(params["jaxpr"])
        body = Flat(called, checkpoints=False, derivatives=False)
        if [e.primitive.name for e in body.equations] == ["remat2"]:
            # A layerwise step rematerializes each layer anyway.
            body = Flat(called, checkpoints=True, derivatives=False)
        producer = producers_of(body)
        program, arguments = body.program(body.outputs, lambda _: True, producer, ())
        # The body's arguments: closed-over values, the carry, a slice of each stack.
        constants, carried = _counts(self.equation.traced)
        inputs = self.equation.inputs
        tables: list[Operand] = []
        member = {stack.leaves[0]: name for name, stack in self.stacks.items()}
        roles: list[Role] = []
        prepared: list[Whole | None] = []
        for x in arguments:
            ready = None
            if x in body.constants:
                role: Role = Fixed(body.constants[x])
            elif x < constants:
                outer = inputs[x]
                fixed = isinstance(outer, Constant)
                role = Fixed(outer.value) if fixed else Seen(outer)
            elif x < constants + carried:
                role = Carried(x - constants)
            elif (ready := self.over[x - constants - carried]) is not None:
                role = Weight(member[ready.leaf])
            else:
                role = FromTable(len(tables))
                tables.append(inputs[x])
            roles.append(role)
            prepared.append(ready)
        results = range(len(body.outputs))
        kind = LayerKind(
            _Body(program, prepared),
            tuple(roles),
            tuple(results[:carried]),
            tuple(results[carried:]),
        )
        outputs = self.equation.outputs
        after = {x: FromCarry(k) for k, x in enumerate(outputs[:carried])}
        after |= {x: FromKept(k, None) for k, x in enumerate(outputs[carried:])}
        aval = self.flat.avals
        kept = [aval[x].update(shape=aval[x].shape[1:]) for x in outputs[carried:]]
        return Pieces(
            flat=self.flat,
            kinds=(kind,),
            kind_of=(0,) * self.length,
            initial=tuple(inputs[constants : constants + carried]),
            carried=tuple(aval[x] for x in outputs[:carried]),
            tables=tuple(tables),
            kept=tuple(kept),
            after=after,
            inside=frozenset(outputs),
        )


def _counts(eqn: core.JaxprEqn | None) -> tuple[int, int]:
    """Number of values that a scan closes over, and that it carries."""
    # Scanned and stacked arrays have one axis more outside than within the body. JAX
    # renamed the scan's parameters for the counts between versions.
    assert eqn is not None
    body = closed_of(eqn.params["jaxpr"]).jaxpr
    same_shapes = lambda outer, inner: sum(
        x.aval.shape == y.aval.shape for x, y in zip(outer, inner, strict=True)
    )
    carried = same_shapes(eqn.outvars, body.outvars)
    return same_shapes(eqn.invars, body.invars) - carried, carried


def scans(flat: Flat, leaves: Sequence[tuple[bool, Names]]) -> list[Scan]:
    """Returns all scans over parameters, the largest first.

    The first values of the loss are its parameters: `leaves` holds whether each is
    frozen, and its names.
    """
    wholes = Wholes(flat, range(len(leaves)))
    for equation in flat.equations:
        wholes.follow(equation)
    results: list[Scan] = []
    for equation in flat.equations:
        if equation.primitive.name != "scan" or equation.traced is None:
            continue
        params = equation.traced.params
        scanned = equation.inputs[sum(_counts(equation.traced)) :]
        # The scanned axis is the leading one, after any transposition in the model.
        over = [
            None if isinstance(x, Constant) else wholes.whole.get(x) for x in scanned
        ]
        chosen = {x.leaf: x for x in over if x is not None}
        # Frozen stacks alone are not trained, and one iteration is no list of layers.
        if not any(not leaves[n][0] for n in chosen) or params["length"] < 2:
            continue
        common = _common([leaves[n][1] for n in chosen])
        stacks: dict[Member, Stack] = {}
        for n, x in chosen.items():
            frozen, names = leaves[n]
            stacks[frozen, names[len(common) :]] = Stack((n,), x.axes[0])
        stacks = relabeled(stacks, lambda x: len(flat.shape(x.leaves[0])) - 1)
        size = nbytes([flat.avals[n] for n in chosen])
        results.append(
            Scan(flat, equation, tuple(over), "/".join(common), stacks, size)
        )
    return sorted(results, key=lambda scan: -scan.nbytes)


def _common(names: Sequence[Names]) -> Names:
    """The common prefix of all names, without the last part of any."""
    first, shortest = names[0], min(len(each) - 1 for each in names)
    same = (k for k in range(shortest) if any(x[k] != first[k] for x in names))
    return first[: next(same, shortest)]
