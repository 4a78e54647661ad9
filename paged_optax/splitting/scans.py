"""Candidates for the layers of a loss: scans over stacked parameters."""

from collections.abc import Sequence

from jax.extend import core
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat, closed_of
from paged_optax.analysis.program import Constant, Operand
from paged_optax.splitting.dependence import (
    SplitError,
    find_sources,
    source_line,
    used_values,
)
from paged_optax.splitting.indexed import Whole, Wholes, used_whole
from paged_optax.splitting.numbered import (
    Candidate,
    Member,
    Names,
    Stack,
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


def scans(flat: Flat, leaves: Sequence[tuple[bool, Names]]) -> list[Candidate]:
    """Returns all scans over parameters.

    The first values of the loss are its parameters: `leaves` holds whether each is
    frozen, and its names.
    """
    wholes = Wholes(flat, range(len(leaves)))
    for eqn in flat.eqns:
        wholes.follow(eqn)
    results: list[Candidate] = []
    for eqn in flat.eqns:
        if eqn.primitive.name != "scan" or eqn.traced is None:
            continue
        scanned = eqn.inputs[sum(_counts(eqn.traced)) :]
        subset = [wholes.whole[x] for x in used_values(scanned) if x in wholes.whole]
        length = eqn.traced.params["length"]
        # Frozen stacks alone are not trained, and one iteration is no list of layers.
        if all(leaves[x.leaf][0] for x in subset) or length < 2:
            continue
        names = [leaves[x.leaf][1] for x in subset]
        # The common prefix of all names, without the last part of any.
        common = names[0][: min(map(len, names)) - 1]
        while any(x[: len(common)] != common for x in names):
            common = common[:-1]
        stacks: dict[Member, Stack] = {}
        for x in subset:
            frozen, path = leaves[x.leaf]
            # The scanned axis is the leading one, after any transposition.
            stacks[frozen, path[len(common) :]] = Stack((x.leaf,), x.axes[0])
        name, stacks = "/".join(common), relabeled(stacks, flat.avals)
        label = f"{name or 'stacks'}, a scan"
        results.append(Candidate(name, label, stacks, length, scan=eqn))
    return results


def _counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Number of values that a scan closes over, and that it carries."""
    # Scanned and stacked arrays have one axis more outside than within the body. JAX
    # renamed the scan's parameters for the counts between versions.
    body = closed_of(eqn.params["jaxpr"]).jaxpr
    same_shapes = lambda outer, inner: sum(
        x.aval.shape == y.aval.shape for x, y in zip(outer, inner, strict=True)
    )
    carried = same_shapes(eqn.outvars, body.outvars)
    return same_shapes(eqn.invars, body.invars) - carried, carried


def scanned_pieces(flat: Flat, layers: Candidate) -> Pieces:
    """Splits a loss at a scan, whose iterations are the layers."""
    eqn = layers.scan
    assert eqn is not None and eqn.traced is not None
    params = eqn.traced.params
    constants, carried = _counts(eqn.traced)
    inputs, outputs = eqn.inputs, eqn.outputs
    over = _scanned_stacks(flat, layers, inputs[constants + carried :])
    if params["reverse"]:
        raise SplitError(
            f"the scan over layers at {source_line(eqn)} is in reverse: turn the"
            " stacks once, outside the loss (jnp.flip(stack, 0)), and scan forward."
        )
    called = closed_of(params["jaxpr"])
    body = Flat(called, checkpoints=False, derivatives=False)
    if [e.primitive.name for e in body.eqns] == ["remat2"]:
        # A layerwise step rematerializes each layer anyway.
        body = Flat(called, checkpoints=True, derivatives=False)
    results, source = body.outputs, find_sources(body)
    program, args = body.program(results, lambda _: True, source, ())
    # The body's arguments: closed-over values, the carry, a slice of each stack.
    tables: list[Operand] = []
    members = {stack.leaves[0]: name for name, stack in layers.stacks.items()}
    roles: list[Role] = []
    stacks: list[Whole | None] = []
    for x in args:
        scanned = x >= constants + carried and x not in body.constants
        stacks.append(over[x - constants - carried] if scanned else None)
        if x in body.constants:
            roles.append(Fixed(body.constants[x]))
        elif x < constants:
            outer = inputs[x]
            fixed = isinstance(outer, Constant)
            roles.append(Fixed(outer.value) if fixed else Seen(outer))
        elif x < constants + carried:
            roles.append(Carried(x - constants))
        elif (stack := stacks[-1]) is not None:
            roles.append(Weight(members[stack.leaf]))
        else:
            roles.append(FromTable(len(tables)))
            tables.append(inputs[x])

    def run(values: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
        pairs = zip(stacks, values, strict=True)
        return program(
            [stack.one(x, stack.axes[0]) if stack else x for stack, x in pairs]
        )

    places = range(len(outputs))
    after = {x: FromCarry(k) for k, x in enumerate(outputs[:carried])}
    after |= {x: FromKept(k, None) for k, x in enumerate(outputs[carried:])}
    avals = [flat.avals[x] for x in outputs]
    return Pieces(
        flat=flat,
        kinds=(
            LayerKind(
                run, tuple(roles), tuple(places[:carried]), tuple(places[carried:])
            ),
        ),
        kind_indices=(0,) * layers.length,
        initial=inputs[constants : constants + carried],
        carried=tuple(avals[:carried]),
        tables=tuple(tables),
        kept=tuple(x.update(shape=x.shape[1:]) for x in avals[carried:]),
        after=after,
        inside=frozenset(outputs),
    )


def _scanned_stacks(
    flat: Flat, layers: Candidate, scanned: Sequence[Operand]
) -> list[Whole | None]:
    """The stack that each scanned array is computed from, or None.

    Raises if another equation uses a stack whole.
    """
    wholes = Wholes(flat, layers.leaves)
    for e in flat.eqns:
        remaining = e.numbers
        if e is layers.scan:
            remaining = used_values(e.inputs[: len(e.inputs) - len(scanned)])
        if not wholes.follow(e) and any(x in wholes.whole for x in remaining):
            raise used_whole(layers, e)
    if any(x in wholes.whole for x in used_values(flat.outputs)):
        raise used_whole(layers, None)
    return [None if isinstance(x, Constant) else wholes.whole.get(x) for x in scanned]
