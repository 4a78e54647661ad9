"""Traces a user's loss and splits it between its layers."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.extend import core
from jax.sharding import AxisType
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, effectful
from paged_optax.analysis.program import Constant, Equation, Operand, used_values
from paged_optax.backend.memory import nbytes
from paged_optax.backend.types import PyTreeDef, without_explicit_axes
from paged_optax.layerwise.loss import check_loss, has_metrics
from paged_optax.splitting.assembly import Assembly
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import Depends, SplitError, source_line
from paged_optax.splitting.lost_state import warn_of_lost_state
from paged_optax.splitting.numbered import (
    Candidate,
    Names,
    Stack,
    matching_lists,
    numbered,
    split_names,
)
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.scans import by_layer, indexed, scanned_pieces, scans
from paged_optax.transform.context import without

_BY_HAND = "Or write the model by hand: LayerwiseModel(prologue, layer, epilogue)."


@dataclasses.dataclass(frozen=True, eq=False)
class SplitLoss:
    """A loss split between its layers."""

    layers: Candidate  # in the order of computation
    pieces: Pieces
    output: PyTreeDef  # structure of the loss's result
    remaining: Sequence[Candidate] = ()  # layers that stay whole
    # Larger layers that the loss cannot be split into.
    refused: Sequence[tuple[Candidate, SplitError]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A user's loss, and the types of its parameters."""

    function: jax.stages.Wrapped  # jitted
    layers: str | None  # path or prefix of the layers; None for the largest
    params: PyTree
    frozen: PyTree | None  # None if the loss has no frozen parameters

    @functools.cached_property
    def leaves(self) -> list[tuple[bool, Names]]:
        """Whether each parameter is frozen, and its names."""
        flat = jax.tree_util.tree_leaves_with_path
        return [
            (frozen, names)
            for frozen, tree in ((False, self.params), (True, self.frozen))
            for names in split_names([path for path, _ in flat(tree)])
        ]

    def traced(self, batch: PyTree[jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """JAX's trace; its jaxpr is cached for equal types, mesh and settings."""
        frozen = () if self.frozen is None else (self.frozen,)
        try:
            with without(), without_explicit_axes():
                return self.function.trace(self.params, *frozen, batch)
        except Exception as error:
            if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
                error.add_note(
                    "split_layers traces loss without the explicit axes of the ambient"
                    " mesh. Write a loss that sets shardings itself, with"
                    " out_sharding= or jax.sharding.reshard, by hand:"
                    " LayerwiseModel(prologue, layer, epilogue)."
                )
            raise

    def split(
        self, batch: PyTree[jax.ShapeDtypeStruct], first: Candidate | None = None
    ) -> SplitLoss:
        """Splits the loss between its largest layers, or those of the first batch."""
        traced = self.traced(batch)
        closed, shapes = traced.jaxpr, traced.out_info
        check_loss("loss", shapes)
        for eqn in effectful(closed.jaxpr):
            where = source_line(Equation(eqn.primitive, (), (), (), eqn))
            raise SplitError(
                f"the loss has a side effect, `{eqn.primitive.name}` at {where}. A"
                " print, a callback or a check would run twice for each layer, or not"
                " at all. Leave it out of the training loss."
            )
        flat = _constants_first(Flat(closed, checkpoints=False, derivatives=False))
        inlined, leaves = Flat(closed, derivatives=False), self.leaves
        args = ("params", self.params), ("frozen", self.frozen), ("batch", batch)
        losses = len(jax.tree.leaves(shapes[0] if has_metrics(shapes) else shapes))
        warn_of_lost_state(inlined, args, losses)
        lists = numbered(leaves, flat.avals)
        known = [*scans(flat, leaves), *indexed(inlined, leaves, lists), *lists]
        known.sort(key=lambda x: -x.nbytes(flat.avals))
        candidates = self._named(known)
        if first is not None:
            same = [x for x in candidates if x.stacks == first.stacks and x.scan]
            candidates = same or [dataclasses.replace(first, scan=None)]
        refused: list[tuple[Candidate, SplitError]] = []
        # A frozen model of the same structure, whose output the loss uses, has layers
        # of the same names outside of the trained ones.
        for candidate in (y for x in candidates for y in (x, *x.parts()[:1])):
            try:
                layers, pieces = _split(closed, flat, len(leaves), candidate)
                if first is not None:
                    _check_same_stacks(first, layers)
            except SplitError as error:
                refused.append((candidate, error))
                continue
            # Layers without parameters in common with these stay whole.
            used, remaining = layers.leaves, list[Candidate]()
            same = [x for x in known if x.shown == layers.shown]
            for other in (*known, *(y for x in same for y in x.parts())):
                if used.isdisjoint(other.leaves):
                    remaining.append(other)
                    used |= other.leaves
            refused = [
                (x, error)
                for x, error in refused
                if not x.guess and x.shown != layers.shown
            ]
            output = jax.tree.structure(shapes)
            return SplitLoss(layers, pieces, output, remaining, refused)
        # Errors of layers that are not guesses are more useful.
        raise min(refused, key=lambda x: x[0].guess)[1]

    def _named(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates that `layers` names, of one or more."""
        if not candidates:
            raise SplitError(
                "no layers are found. The parameters have no subtrees that are numbered"
                " and equal, and the loss neither scans over stacked parameters nor"
                " indexes them by literal numbers, of two layers or more. Give the"
                " layers a list of their own, or scan over their stack itself:"
                f" jax.lax.scan(layer, x, stack). {_BY_HAND}"
            )
        if self.layers is None:
            return candidates
        names = [x.name or "*" for x in candidates]
        subset = matching_lists(self.layers, names)
        if not subset:
            raise SplitError(
                f"layers={self.layers!r} names no layers of these parameters. Layers"
                f" that are numbered and equal, scanned over, or indexed: {names}."
                f" {_BY_HAND}"
            )
        return [x for x in candidates if (x.name or "*") in subset]


def _split(
    closed: core.ClosedJaxpr, flat: Flat, count: int, layers: Candidate
) -> tuple[Candidate, Pieces]:
    """Splits a loss of `count` parameters between layers, or raises `SplitError`."""
    if all(frozen for frozen, _ in layers.stacks):
        raise SplitError(
            f"the layers of {layers.shown} have no parameters that are trained, and so"
            " no layerwise gradients. If they have adapters, number these like the"
            " layers, such as params['layers'][i]['lora_a']. Otherwise train with"
            " jax.grad."
        )
    if layers.scan is not None:
        return layers, scanned_pieces(flat, layers)
    if any(e.primitive.name == "remat2" for e in flat.eqns):
        flat = _constants_first(_WithoutCheckpoints(closed, layers))
    members, is_stacked = layers.members, layers.length > len(layers.members)
    if is_stacked:
        flat, members = by_layer(flat, layers)
    depends = Depends.create(flat, count, members)
    layer_of = lambda n: depends.layer[next(iter(members[n].values()))]
    order = sorted(range(layers.length), key=layer_of)
    if not is_stacked:
        stacks = {
            name: Stack(tuple(stack.leaves[n] for n in order))
            for name, stack in layers.stacks.items()
        }
        layers = dataclasses.replace(layers, stacks=stacks)
    cut = lambda latest, interleaved=False: Assembly(
        Cuts(depends, latest=latest, interleaved=interleaved)
    ).pieces()
    # If a layer ends or begins with equations that keep the size of the carry, several
    # cuts are equally good. The cut with the fewest kinds of layers wins.
    cuts = [cut(latest) for latest in (True, False)]
    # A carry of several values may be due to towers, for example of two inputs.
    if all(len(pieces.carried) > 1 for pieces in cuts):
        for latest in (True, False):
            with contextlib.suppress(SplitError):
                cuts.append(cut(latest, interleaved=True))
    if is_stacked and order != sorted(order):
        raise SplitError(
            f"the layers of {layers.name or 'all parameters'} are computed in the order"
            f" {order} of their numbers. Stack them once, outside the loss, in the"
            " order of computation."
        )
    best = min(cuts, key=lambda x: (len(x.kinds), nbytes([*x.carried])))
    return layers, best


class _WithoutCheckpoints(Flat):
    """A loss without checkpoints around layers, which a step rematerializes anyway."""

    def __init__(self, closed: core.ClosedJaxpr, layers: Candidate):
        self.layers = [{*item.values()} for item in layers.members]
        super().__init__(closed, checkpoints=False, derivatives=False)

    def _inlines(self, eqn: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
        if eqn.primitive.name != "remat2" or eqn.params["policy"] is not None:
            return super()._inlines(eqn, operands)
        leaves = set(map(self._leaf, used_values(operands)))
        # The checkpoint reads most parameters of a layer.
        return any(2 * len(layer & leaves) > len(layer) for layer in self.layers)

    def _leaf(self, x: int) -> int:
        """The only value that a value is computed from, such as a parameter."""
        while x in self.source and len(self.eqns[self.source[x]].numbers) == 1:
            (x,) = self.eqns[self.source[x]].numbers
        return x


def _constants_first(flat: Flat) -> Flat:
    """Puts the constants of sums and products first, in place."""
    # `total + loss` adds to a literal in the first layer, and to a value in the others.
    # JAX then reverses the operands, and the first layer would differ from the others.
    flat.eqns = [
        dataclasses.replace(e, inputs=e.inputs[::-1])
        if e.primitive.name in ("add", "mul") and isinstance(e.inputs[1], Constant)
        else e
        for e in flat.eqns
    ]
    return flat


def _check_same_stacks(first: Candidate, layers: Candidate) -> None:
    """Raises if layers differ from the first batch's stacks, or in their order."""
    if layers.stacks == first.stacks:
        return
    known, item = (next(iter(x.stacks.values())).leaves for x in (first, layers))
    order = [known.index(n) for n in item]
    raise SplitError(
        f"loss takes its layers in the order {order} of the stacks of {first.shown},"
        " for parameters and a batch of these types. The batch of split_layers"
        " determines the stacks. Call split_layers with such a batch for a second"
        " model, and stack parameters with that model; or use the layers in one order."
    )
