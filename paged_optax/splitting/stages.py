"""Assigns each equation of a loss to a layer."""

import collections
from collections.abc import Collection, Hashable, Mapping

from paged_optax.analysis.program import Operand, used_values
from paged_optax.backend.memory import nbytes
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import SplitError

# Values from before the layers of at most this many bytes are not computed in layers.
_SMALL = 4096


def find_stages(cuts: Cuts) -> dict[int, int]:
    """Returns the layer of each equation: -1 before all layers, their number after."""
    depends = cuts.depends
    stage = lambda n: -1 if depends.last_layer(n) < 0 else depends.count
    initial = {n: stage(n) for n in cuts.order}
    for layer, piece in enumerate(cuts.pieces()):
        initial.update(dict.fromkeys(piece, layer))
    _check_location(cuts, initial)
    return _with_preceding(cuts, initial)


def _check_location(cuts: Cuts, initial: Mapping[int, int]) -> None:
    """Raises if parameters are used outside their layer, directly or prepared."""
    depends = cuts.depends
    flat, eqns = depends.flat, depends.flat.eqns

    def layer_of(x: int) -> int | None:
        """The layer of a parameter, or of a value as large as its parameters."""
        layers, source = depends.pure.get(x, frozenset()), flat.source.get(x)
        if source is not None:
            operands = map(flat.size, eqns[source].numbers)
            if not 1 < flat.size(x) >= max(operands, default=0):
                return None
        return min(layers) if len(layers) == 1 else None

    for n in cuts.order:
        for layer in map(layer_of, eqns[n].numbers):
            if layer is not None and initial[n] != layer:
                after = initial[n] == depends.count
                raise SplitError(
                    f"parameters of layer {layer} are used"
                    f" {'after all layers' if after else 'in another one'}, at"
                    f" {depends.line(n)}. A layer's parameters are available only"
                    " within the layer. Move parameters that are used twice out of the"
                    " layers, to a key of their own. For a penalty of several layers,"
                    " or of gradients through them, train with jax.grad and a paged"
                    " optimizer."
                )
    for layer in map(layer_of, used_values(flat.outputs)):
        if layer is not None:
            raise SplitError(
                f"the loss returns a parameter of layer {layer}. Return a value"
                " computed from it, such as its norm; of an NNX model the state alone,"
                " nnx.state(model, nnx.Not(nnx.Param))."
            )


def _with_preceding(cuts: Cuts, initial: Mapping[int, int]) -> dict[int, int]:
    """Moves equations from before the layers into the only layer that uses them.

    This applies to an equation that several layers repeat on the same operands, such as
    a transpose of an encoder's output or the broadcast of a mask, and to an equation
    whose result is larger than its operands: a dropout mask, but not its key.
    """
    depends = cuts.depends
    flat, eqns = depends.flat, depends.flat.eqns
    users = collections.defaultdict[int, set[int]](set)
    users.update((x, {depends.count}) for x in used_values(flat.outputs))
    only: dict[int, int] = {}
    # Backward: the layers that need each equation, and the layer if it is the only one.
    for n in reversed(depends.live):
        layers = set[int]().union(*(users[x] for x in eqns[n].outputs))
        if initial.get(n, -1) >= 0:
            layers = {initial[n]}
        elif len(layers) == 1 and 0 <= min(layers) < depends.count:
            only[n] = min(layers)
        for x in eqns[n].numbers:
            users[x].update(layers)
    repeated = _repeated(cuts, only)
    stages, inner = dict(initial), set[int]()
    size = lambda xs: nbytes([flat.avals[x] for x in xs])
    # Forward, because an equation follows its operands into a layer.
    for n in depends.live:
        if initial.get(n, -1) >= 0:
            continue
        results, operands = eqns[n].outputs, eqns[n].numbers
        grows = size(results) > max(_SMALL, size(operands))
        grows = grows and not depends.is_learned(n)
        stages[n] = -1
        if n in only and (grows or n in repeated or not inner.isdisjoint(operands)):
            stages[n] = only[n]
            inner.update(results)
    return stages


def _repeated(cuts: Cuts, only: Mapping[int, int]) -> Collection[int]:
    """Equations that several layers repeat on the same operands."""
    same: dict[Operand, Hashable] = {}
    groups = collections.defaultdict[Hashable, list[int]](list)
    for n in cuts.depends.live:
        eqn = cuts.depends.flat.eqns[n]
        if n in only:
            operands = tuple(same.get(x, x) for x in eqn.inputs)
            key = eqn.primitive, eqn.params, operands
            groups[key].append(n)
            same |= {x: (key, k) for k, x in enumerate(eqn.outputs)}
    groups = (item for item in groups.values() if len({only[n] for n in item}) > 1)
    return {n for item in groups for n in item}
