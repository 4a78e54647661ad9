"""Candidates for the layers of a loss: stacks that are scanned over, or indexed."""

import dataclasses
import os.path
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import Array, lax
from jax.extend import core, source_info_util
from jax.typing import ArrayLike

from paged_optax.analysis.flat import ELEMENTWISE, Flat, closed_of, trace
from paged_optax.analysis.program import Constant, Equation, Operand, used_values
from paged_optax.splitting.dependence import SplitError, source_line
from paged_optax.splitting.numbered import (
    Candidate,
    Member,
    Names,
    Stack,
    relabeled,
)
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


def _find_wholes(flat: Flat, leaves: Iterable[int]) -> dict[int, Whole]:
    """Follows whole stacks through a loss up to their scans or their indexing.

    Transpositions and elementwise equations can prepare each layer separately.
    """
    wholes = {n: Whole(n, tuple(range(len(flat.shape(n))))) for n in leaves}
    for eqn in flat.eqns:
        values, name = eqn.numbers, eqn.primitive.name
        if len(values) != 1 or values[0] not in wholes:
            continue
        source = wholes[values[0]]
        axes, eqns = source.axes, (*source.eqns, eqn)
        if name == "transpose":
            axes = tuple(axes[k] for k in _numbers(eqn, "permutation"))
        elif name == "sharding_constraint":
            eqns = source.eqns
        elif (
            name not in ELEMENTWISE
            or len(eqn.outputs) != 1
            or not flat.is_elementwise(eqn, flat.shape(values[0]))
        ):
            continue
        wholes[eqn.outputs[0]] = Whole(source.leaf, axes, eqns)
    return wholes


def _slices(
    flat: Flat, wholes: Mapping[int, Whole], eqn: Equation
) -> dict[int, Sequence[int]]:
    """Axes along which an equation slices a stack into layers.

    Maps each axis to the numbers of the layers that are the equation's results.
    """
    values, name = eqn.numbers, eqn.primitive.name
    if len(values) != 1 or values[0] not in wholes:
        return {}
    axes, shape = wholes[values[0]].axes, flat.shape(values[0])
    if name == "slice":
        starts, limits = _numbers(eqn, "start_indices"), _numbers(eqn, "limit_indices")
        bounds = zip(axes, starts, limits, strict=True)
        return {axis: [start] for axis, start, stop in bounds if stop - start == 1}
    if name in ("split", "unstack"):
        (axis,) = _numbers(eqn, "axis")
        if len(eqn.outputs) == shape[axis]:
            return {axes[axis]: range(shape[axis])}
    return {}


def _numbers(eqn: Equation, name: str) -> list[int]:
    """Numbers among an equation's parameters; empty for None."""
    value = dict(eqn.params)[name]
    return [value] if isinstance(value, int) else list(value or ())  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def _candidate(
    flat: Flat,
    leaves: Sequence[tuple[bool, Names]],
    axes: Mapping[int, int],
    common: Names,
    words: str,
) -> Candidate:
    """Layers of stacks, given each stack's axis and the prefix of their names."""
    stacks = {
        (leaves[n][0], leaves[n][1][len(common) :]): Stack((n,), axis)
        for n, axis in axes.items()
    }
    n, axis = next(iter(axes.items()))
    name, length = "/".join(common), flat.shape(n)[axis]
    shown = f"{name or 'stacks'}, {words}"
    return Candidate(name, shown, relabeled(stacks, flat.avals), length)


def scans(flat: Flat, leaves: Sequence[tuple[bool, Names]]) -> list[Candidate]:
    """Returns all scans over parameters.

    The first values of the loss are its parameters: `leaves` holds whether each is
    frozen, and its names.
    """
    wholes, results = _find_wholes(flat, range(len(leaves))), list[Candidate]()
    for eqn in flat.eqns:
        if eqn.primitive.name != "scan" or eqn.traced is None:
            continue
        scanned = eqn.inputs[sum(_counts(eqn.traced)) :]
        subset = [wholes[x] for x in used_values(scanned) if x in wholes]
        # Frozen stacks alone are not trained, and one iteration is no list of layers.
        if all(leaves[x.leaf][0] for x in subset) or eqn.traced.params["length"] < 2:
            continue
        names = [leaves[x.leaf][1] for x in subset]
        common = tuple(os.path.commonprefix([x[:-1] for x in names]))
        # The scanned axis is the leading one, after any transposition.
        axes = {x.leaf: x.axes[0] for x in subset}
        layers = _candidate(flat, leaves, axes, common, "a scan")
        results.append(dataclasses.replace(layers, scan=eqn))
    return results


def indexed(
    flat: Flat, leaves: Sequence[tuple[bool, Names]], lists: Sequence[Candidate]
) -> list[Candidate]:
    """Returns all layers that a loss indexes from stacks, as `stack[n]`.

    An array that is indexed within one of the numbered `lists` has parts, not layers.
    """
    wholes = _find_wholes(flat, range(len(leaves)))
    by_leaf = defaultdict[int, list[dict[int, Sequence[int]]]](list)
    for eqn in flat.eqns:
        if layers := _slices(flat, wholes, eqn):
            by_leaf[wholes[eqn.numbers[0]].leaf].append(layers)
    groups = defaultdict[tuple[Names, int], dict[int, int]](dict)
    for n, item in by_leaf.items():
        # The axis along which most layers are indexed.
        counts = {
            axis: len({k for layers in item for k in layers[axis]})
            for axis in range(len(flat.shape(n)))
            if all(axis in layers for layers in item)
        }
        axis = max(counts, key=lambda axis: counts[axis], default=0)
        if counts.get(axis, 0) > 1:
            names = leaves[n][1]
            for k in range(len(names)):
                groups[names[:k], flat.shape(n)[axis]][n] = axis
    # Several prefixes may have the same stacks. The longest prefix wins.
    subset = {tuple(axes): (common, axes) for (common, _), axes in groups.items()}
    results: list[Candidate] = []
    for common, axes in subset.values():
        within = [x for x in lists if x.leaves >= set(axes)]
        parts = any(
            axes.keys() <= set(layer.values()) for x in within for layer in x.members
        )
        if not parts and not all(leaves[n][0] for n in axes):
            layers = _candidate(flat, leaves, axes, common, "by their numbers")
            results.append(dataclasses.replace(layers, guess=bool(within)))
    return results


def by_layer(flat: Flat, layers: Candidate) -> tuple[Flat, list[dict[Member, int]]]:
    """Traces a loss again, with parameters of single layers instead of stacks.

    Returns the loss, and the numbers of each layer's parameters.
    """
    axes = {x.leaves[0]: x.axis or 0 for x in layers.stacks.values()}
    wholes = _find_wholes(flat, axes)

    def layers_of(eqn: Equation) -> Sequence[int]:
        leaf = wholes[x].leaf if (x := eqn.numbers[0]) in wholes else -1
        return _slices(flat, wholes, eqn).get(axes.get(leaf, -1), ())

    _check_not_whole(flat, layers, wholes, lambda eqn: bool(layers_of(eqn)))

    def run(
        args: Sequence[ArrayLike], parts: Mapping[int, Sequence[ArrayLike]]
    ) -> list[ArrayLike]:
        values = {**dict(enumerate(args)), **flat.constants}
        read = lambda x: x.value if isinstance(x, Constant) else values[x]
        for eqn in flat.eqns:
            if not wholes.keys().isdisjoint(eqn.outputs):
                continue
            assert eqn.traced is not None
            with source_info_util.user_context(eqn.traced.source_info.traceback):
                if wholes.keys().isdisjoint(eqn.numbers):
                    results = eqn.bind(list(map(read, eqn.inputs)), None)
                else:
                    source, shape = wholes[eqn.numbers[0]], flat.shape(eqn.outputs[0])
                    stack = parts[source.leaf]
                    results = [
                        _part(eqn, source, axes[source.leaf], stack[n], shape)
                        for n in layers_of(eqn)
                    ]
            values.update(zip(eqn.outputs, results, strict=True))
        return list(map(read, flat.outputs))

    def typed(n: int, axis: int | None) -> jax.ShapeDtypeStruct:
        aval = flat.avals[n]
        shape = [size for k, size in enumerate(aval.shape) if k != axis]
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)

    args = [typed(n, None) for n in range(flat.inputs)]
    parts = {n: [typed(n, axis)] * layers.length for n, axis in axes.items()}
    closed, _ = trace(run, args, parts)
    numbers = {n: len(args) + k * layers.length for k, n in enumerate(sorted(axes))}
    members = [
        {name: numbers[stack.leaves[0]] + n for name, stack in layers.stacks.items()}
        for n in range(layers.length)
    ]
    return Flat(closed, checkpoints=False, derivatives=False), members


def _part(
    eqn: Equation, source: Whole, axis: int, x: ArrayLike, shape: tuple[int, ...]
) -> ArrayLike:
    """Computes a slice of a prepared stack from a layer's parameter."""
    place, x = source.axes.index(axis), source.one(x, axis)
    # `jnp.unstack` drops the axis.
    if np.shape(x) != shape:
        x = lax.expand_dims(x, [place])
    if np.shape(x) == shape:
        return x
    # The slice is a part of the layer, such as `stack[n, :2]`.
    starts, limits, strides = (
        _numbers(eqn, name) for name in ("start_indices", "limit_indices", "strides")
    )
    starts[place], limits[place] = 0, 1
    return lax.slice(x, starts, limits, strides or None)


def _check_not_whole(
    flat: Flat,
    layers: Candidate,
    wholes: Mapping[int, Whole],
    is_layerwise: Callable[[Equation], bool],
) -> None:
    """Raises if an equation uses stacks other than layer by layer, or the loss does."""
    for eqn in flat.eqns:
        uses = wholes.keys() & {*eqn.numbers} and wholes.keys().isdisjoint(eqn.outputs)
        if uses and not is_layerwise(eqn):
            raise SplitError(
                f"the stacked parameters of {layers.name or 'all layers'} are used"
                f" whole at {source_line(eqn)}, and also layer by layer. A layer's"
                " parameters are available only within the layer. Compute other values"
                " of them, such as a norm, in each layer. For several inputs, pass all"
                " of them through a layer at once."
            )
    if wholes.keys() & {*used_values(flat.outputs)}:
        raise SplitError(
            f"the loss returns the stacked parameters of {layers.name}. Return a value"
            " computed from them, such as a norm, and pass state in the batch."
        )


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
    params, inputs, outputs = eqn.traced.params, eqn.inputs, eqn.outputs
    constants, carried = _counts(eqn.traced)
    wholes, first = _find_wholes(flat, layers.leaves), constants + carried
    scanned_only = wholes.keys().isdisjoint(used_values(inputs[:first]))
    _check_not_whole(flat, layers, wholes, lambda e: e is eqn and scanned_only)
    if params["reverse"]:
        raise SplitError(
            f"the scan over layers at {source_line(eqn)} is in reverse: turn the"
            " stacks once, outside the loss (jnp.flip(stack, 0)), and scan forward."
        )
    called = closed_of(params["jaxpr"])
    body = Flat(called, checkpoints=False, derivatives=False)
    if [e.primitive.name for e in body.eqns] == ["remat2"]:
        # A layerwise step rematerializes each layer anyway.
        body = Flat(called, derivatives=False)
    numbered = body.program(body.outputs)
    tables: list[list[Operand]] = []
    members = {stack.leaves[0]: name for name, stack in layers.stacks.items()}
    roles: dict[int, Role] = {}  # of closed-over values, the carry, scanned slices
    stacks: dict[int, Whole] = {}
    for n in (n for n in numbered.inputs if n not in body.constants):
        x = inputs[n]
        if n < constants:
            roles[n] = Seen(x)
        elif n < first:
            roles[n] = Carried(n - constants)
        elif isinstance(x, int) and x in wholes:
            stacks[n] = wholes[x]
            roles[n] = Weight(members[wholes[x].leaf])
        else:
            roles[n] = FromTable(len(tables))
            tables.append([x])

    def run(args: Sequence[ArrayLike]) -> list[Array]:
        values = {**body.constants, **dict(zip(roles, args, strict=True))}
        for n, stack in stacks.items():
            values[n] = stack.one(values[n], stack.axes[0])
        return numbered.program([values[n] for n in numbered.inputs])

    after = {x: Carried(k) for k, x in enumerate(outputs[:carried])}
    after |= {x: Kept(k, None) for k, x in enumerate(outputs[carried:])}
    avals = [flat.avals[x] for x in outputs]
    slots = {k: k for k in range(carried)}
    kept = {k: carried + k for k in range(len(outputs) - carried)}
    return Pieces(
        flat=flat,
        kinds=[LayerKind(run, [*roles.values()], slots, kept)],
        kind_indices=[0] * layers.length,
        initial=inputs[constants:first],
        carried=avals[:carried],
        tables=tables,
        kept=[x.update(shape=x.shape[1:]) for x in avals[carried:]],
        after=after,
        inside=frozenset(outputs),
    )
