"""A loss that is traced, and the layers that are found in it."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.extend import core
from jax.sharding import AxisType
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, trace
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.backend.types import PyTreeDef
from paged_optax.layerwise.loss import refuse_no_loss
from paged_optax.splitting.assemble import assembled
from paged_optax.splitting.cut import Cuts
from paged_optax.splitting.depends import Depends, SplitError
from paged_optax.splitting.find import (
    Layers,
    Member,
    Names,
    named,
    nbytes_of,
    numbered,
    split_names,
)
from paged_optax.splitting.lines import line_of
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.scanned import Scan, scans
from paged_optax.splitting.sliced import Sliced, slices
from paged_optax.splitting.stacking import Stack
from paged_optax.splitting.stages import Stages

#: Layers that may be taken apart.
Candidate = Layers | Scan | Sliced

_BY_HAND = "Or write the model by hand: LayerwiseModel(prologue, layer, epilogue)."


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The layers of a loss.

    Attributes:
      layers: Their parameters in the tree.
      pieces: The loss, cut.
      stacks: Their parameters, by what they are within a layer.
      output: The structure of what the loss returns.
      others: Layers that are found besides: they stay whole.
      refused: Larger ones that cannot be cut, and why.
    """

    layers: Candidate
    pieces: Pieces
    stacks: Mapping[Member, Stack]
    output: PyTreeDef
    others: tuple[Candidate, ...] = ()
    refused: tuple[tuple[Candidate, SplitError], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A user's loss, and what it is given.

    Attributes:
      function: The loss.
      params: Shapes of the parameters.
      frozen: Shapes of those that are not trained; None: the loss takes none.
    """

    function: Callable[..., PyTree]
    params: PyTree
    frozen: PyTree | None

    @property
    def leaves(self) -> tuple[tuple[bool, Names], ...]:
        """For each parameter whether it is frozen, and its names."""
        flat = jax.tree_util.tree_leaves_with_path
        return tuple(
            (frozen, names)
            for frozen, tree in ((False, self.params), (True, self.frozen))
            for names in split_names([path for path, _ in flat(tree)])
        )

    def _traced(
        self, batch: PyTree
    ) -> tuple[core.ClosedJaxpr, PyTree[jax.ShapeDtypeStruct]]:
        frozen = () if self.frozen is None else (self.frozen,)
        try:
            return trace(self.function, self.params, *frozen, batch)
        except Exception as error:
            if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
                error.add_note(
                    "split_layers traces loss without the explicit axes of the mesh"
                    " around. A loss that says itself how arrays are divided, by"
                    " out_sharding= or jax.sharding.reshard, is written by hand:"
                    " LayerwiseModel(prologue, layer, epilogue)."
                )
            raise

    def found(self, batch: PyTree, layers: str | None, stacked: bool | None) -> Found:
        """Traces the loss, and finds its layers.

        Args:
          batch: A batch, or its shapes.
          layers: The path or prefix of the layers; None: the largest.
          stacked: Whether their parameters are stacked, and scanned over or taken by
            their numbers; None: whichever are larger.

        Raises:
          SplitError: If there are none, or if they cannot be cut.
          ValueError: If the loss is not one number.
          TypeError: If the loss has no gradient.
        """
        closed, shapes = self._traced(batch)
        refuse_no_loss("loss", shapes)
        _refuse_effects(closed.jaxpr)
        leaves = self.leaves
        avals = [x.aval for x in closed.jaxpr.invars[: len(leaves)]]
        flat = _constants_first(Flat(closed, checkpoints=False, derivatives=False))
        lists = numbered(leaves, avals)
        found: list[Candidate] = []
        if stacked is not False:
            found += [*scans(flat, leaves), *slices(closed, leaves, lists)]
        found += [] if stacked else lists
        found.sort(key=lambda x: -x.nbytes)
        candidates = found
        if layers is not None:
            names = [x.name for x in candidates]
            chosen = named(layers, names)
            candidates = [x for x in candidates if x.name in chosen]
            if not candidates:
                raise SplitError(
                    f"layers={layers!r} names no layers of these parameters: those that"
                    f" are numbered and alike, scanned over, or indexed are {names}."
                    f" {_BY_HAND}"
                )
        if not candidates:
            raise SplitError(
                "no layers are found: neither are there subtrees of the parameters that"
                " are numbered and alike, nor does the loss scan over stacked ones, or"
                " index them by numbers of the program, of two layers or more. Give the"
                " layers a list of their own, or scan over their stack itself, as in"
                f" jax.lax.scan(layer, x, stack). {_BY_HAND}"
            )
        refused: list[tuple[Candidate, SplitError]] = []
        output = jax.tree.structure(shapes)
        for candidate in candidates:
            try:
                if isinstance(candidate, Scan):
                    pieces, stacks = candidate.pieces(), candidate.stacks
                else:
                    pieces, stacks = _cut_with(closed, flat, len(leaves), candidate)
                _refuse_untrained(candidate, stacks)
            except SplitError as error:
                refused.append((candidate, error))
                continue
            taken = {n for stack in stacks.values() for n in stack.leaves}
            others: list[Candidate] = []
            beside = _parts(flat, candidate)
            for other in (*found, *beside):
                if taken.isdisjoint(other.leaves):
                    others.append(other)
                    taken |= other.leaves
            return Found(
                candidate,
                pieces,
                stacks,
                output,
                tuple(others),
                tuple(x for x in refused if not x[0].guess),
            )
        meant = (error for x, error in refused if not x.guess)
        raise next(meant, refused[0][1])


def _cut_with(
    closed: core.ClosedJaxpr, flat: Flat, count: int, layers: Layers | Sliced
) -> tuple[Pieces, Mapping[Member, Stack]]:
    """A loss, cut; without frozen layers of the same names if these run elsewhere.

    So does a frozen model of the same structure that a loss sees the output of.
    """
    try:
        return _cut(closed, flat, count, layers)
    except SplitError:
        for trained in _parts(flat, layers)[:1]:
            with contextlib.suppress(SplitError):
                return _cut(closed, flat, count, trained)
        raise


def _parts(flat: Flat, layers: Candidate) -> tuple[Layers, ...]:
    """The trained and the frozen parameters of layers that have both."""
    size = lambda n: nbytes_of(flat.avals[n])
    return layers.parts(size) if isinstance(layers, Layers) else ()


def _refuse_untrained(layers: Candidate, stacks: Mapping[Member, Stack]) -> None:
    """Refuses layers all of whose parameters are frozen."""
    if all(frozen for frozen, _ in stacks):
        raise SplitError(
            f"the layers of {layers.shown} have no parameters that are trained, so that"
            " there is nothing to do layer by layer. If they have adapters, number"
            " these as the layers are, such as params['layers'][i]['lora_a'];"
            " otherwise train by jax.grad."
        )


def _constants_first(flat: Flat) -> Flat:
    """The same, where sums and products have their constants first.

    `total + loss` adds to a number of the program in the first layer, and to a value in
    those after it. JAX writes the operands down in another order then.
    """
    flat.equations = [
        dataclasses.replace(e, inputs=e.inputs[::-1])
        if e.primitive.name in ("add", "mul") and isinstance(e.inputs[1], Constant)
        else e
        for e in flat.equations
    ]
    return flat


class _WithoutOuterCheckpoints(Flat):
    """A loss whose layers are not computed again as a whole: a step does that."""

    def __init__(self, closed: core.ClosedJaxpr, layers: Layers):
        self.members = [set(each.values()) for each in layers.members]
        super().__init__(closed, checkpoints=False, derivatives=False)

    def _inlines(self, eqn: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
        if eqn.primitive.name != "remat2" or eqn.params["policy"] is not None:
            return super()._inlines(eqn, operands)
        values = {x for x in operands if not isinstance(x, Constant)}
        return any(2 * len(values & each) > len(each) for each in self.members)


def _cut(
    closed: core.ClosedJaxpr, flat: Flat, count: int, layers: Layers | Sliced
) -> tuple[Pieces, Mapping[Member, Stack]]:
    """A loss, cut between layers that have parameters of their own.

    Where a layer ends or begins with what keeps its size, either may be cut: the cut
    that leaves fewer kinds of layers is taken.
    """
    if isinstance(layers, Sliced):
        flat, each = layers.apart(closed)
        flat = _constants_first(flat)
    else:
        each = layers.members
        if any(e.primitive.name == "remat2" for e in flat.equations):
            flat = _constants_first(_WithoutOuterCheckpoints(closed, layers))
    members = [list(x.values()) for x in each]
    weights = {*range(count), *(n for x in members for n in x)}
    depends = Depends.of(flat, sorted(weights), members)
    member = {n: name for x in each for name, n in x.items()}
    cut = lambda **how: assembled(Stages.found(Cuts.of(depends, **how), member))
    found = [cut(latest=latest) for latest in (True, False)]
    if all(len(pieces.carried) > 1 for pieces in found):
        for latest in (True, False):
            with contextlib.suppress(SplitError):
                found.append(cut(latest=latest, abreast=True))
    saved = lambda pieces: sum(map(nbytes_of, pieces.carried))
    best = min(found, key=lambda pieces: (len(pieces.kinds), saved(pieces)))
    turn = lambda x: depends.layer[min(x.values())]
    if isinstance(layers, Sliced):
        layers.refuse_other_order([turn(x) for x in each])
        return best, layers.stacks
    turns = sorted(each, key=turn)
    return best, {name: Stack(tuple(x[name] for x in turns)) for name in each[0]}


def _refuse_effects(jaxpr: core.Jaxpr) -> None:
    """Refuses what a loss does besides returning values."""
    for eqn in jaxpr.eqns:
        if {type(x).__name__ for x in eqn.effects} - {"NamedAxisEffect"}:
            # Of a scan or a call, what has the effect within it.
            for inner in core.jaxprs_in_params(eqn.params):
                _refuse_effects(inner)
            where = line_of(Equation(eqn.primitive, (), (), (), eqn))
            raise SplitError(
                f"the loss has an effect besides its results, `{eqn.primitive.name}` at"
                f" {where}: a print, a callback or a check would run twice for each"
                " layer, or not at all. Leave it out of the loss that is trained."
            )
