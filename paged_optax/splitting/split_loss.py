"""Traces a user's loss and splits it between its layers."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType
from jaxtyping import PyTree

from paged_optax.analysis.flat import ELEMENTWISE, Flat, trace
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import keystr
from paged_optax.backend.types import PyTreeDef, without_explicit_axes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.layerwise.loss import refuse_no_loss
from paged_optax.splitting.assembly import Assembly
from paged_optax.splitting.cuts import Cuts
from paged_optax.splitting.dependence import (
    Depends,
    SplitError,
    line_of,
    repeated_keys,
    values_in,
    values_of,
)
from paged_optax.splitting.indexed import Sliced, slices
from paged_optax.splitting.numbered import (
    Member,
    Names,
    NumberedLayers,
    matching_lists,
    numbered,
    split_names,
)
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.scans import Scan, scans
from paged_optax.splitting.stacking import Stack
from paged_optax.splitting.stages import Stages
from paged_optax.transform.context import without

#: Layers that a loss may be split into.
Candidate = NumberedLayers | Scan | Sliced

#: Advice for new random numbers in each step.
RESEED = (
    "Put a key in the batch, and begin the loss with nnx.reseed(model,"
    " dropout=batch['key']), with the streams' names (default for nnx.Rngs(0)); or"
    " fold it into the frozen key."
)

_BY_HAND = "Or write the model by hand: LayerwiseModel(prologue, layer, epilogue)."


@dataclasses.dataclass(frozen=True, eq=False)
class SplitLoss:
    """A loss split between its layers."""

    layers: Candidate
    pieces: Pieces
    stacks: Mapping[Member, Stack]
    output: PyTreeDef  # structure of the loss's result
    others: tuple[Candidate, ...] = ()  # layers that stay whole
    # Larger layers that the loss cannot be split into.
    refused: tuple[tuple[Candidate, SplitError], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A user's loss, and the types of its parameters."""

    function: jax.stages.Wrapped  # jitted
    layers: str | None  # path or prefix of the layers; None for the largest
    params: PyTree
    frozen: PyTree | None  # None if the loss has no frozen parameters

    @property
    def leaves(self) -> tuple[tuple[bool, Names], ...]:
        """Whether each parameter is frozen, and its names."""
        flat = jax.tree_util.tree_leaves_with_path
        return tuple(
            (frozen, names)
            for frozen, tree in ((False, self.params), (True, self.frozen))
            for names in split_names([path for path, _ in flat(tree)])
        )

    def _arguments(self, batch: PyTree) -> tuple[PyTree, ...]:
        frozen = () if self.frozen is None else (self.frozen,)
        return self.params, *frozen, batch

    def jaxpr(self, batch: PyTree[jax.ShapeDtypeStruct]) -> core.ClosedJaxpr:
        """JAX's cached jaxpr, identical for equal types, mesh and settings."""
        try:
            with without(), without_explicit_axes():
                return self.function.trace(*self._arguments(batch)).jaxpr
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
        self, batch: PyTree[jax.ShapeDtypeStruct], first: SplitLoss | None = None
    ) -> SplitLoss:
        """Splits the loss between its largest layers.

        Args:
          batch: The types of a batch.
          first: The loss split for another batch, whose stacks are required, or None.
        """
        with without():
            closed, shapes = trace(self.function, *self._arguments(batch))
        refuse_no_loss("loss", shapes)
        _refuse_effects(closed.jaxpr)
        self._warn_of_repeated(closed.jaxpr)
        leaves = self.leaves
        avals = [x.aval for x in closed.jaxpr.invars[: len(leaves)]]
        flat = _constants_first(Flat(closed, checkpoints=False, derivatives=False))
        lists = numbered(leaves, avals)
        all_layers: list[Candidate] = [
            *scans(flat, leaves),
            *slices(closed, leaves, lists),
            *lists,
        ]
        # Candidates are tried in order of their bytes, the largest first.
        all_layers.sort(key=lambda x: -x.nbytes)
        candidates = all_layers
        if first is not None and not isinstance(first.layers, Scan):
            candidates = [first.layers]
        elif (layers := self.layers) is not None:
            names = [x.name or "*" for x in candidates]
            chosen = matching_lists(layers, names)
            candidates = [x for x in candidates if (x.name or "*") in chosen]
            if not candidates:
                raise SplitError(
                    f"layers={layers!r} names no layers of these parameters. Layers"
                    f" that are numbered and equal, scanned over, or indexed: {names}."
                    f" {_BY_HAND}"
                )
        if not candidates:
            raise SplitError(
                "no layers are found. The parameters have no subtrees that are numbered"
                " and equal, and the loss neither scans over stacked parameters nor"
                " indexes them by literal numbers, of two layers or more. Give the"
                " layers a list of their own, or scan over their stack itself:"
                f" jax.lax.scan(layer, x, stack). {_BY_HAND}"
            )
        refused: list[tuple[Candidate, SplitError]] = []
        output = jax.tree.structure(shapes)
        for candidate in candidates:
            try:
                if isinstance(candidate, Scan):
                    pieces, stacks = candidate.pieces(), candidate.stacks
                else:
                    pieces, stacks = _cut_trained(closed, flat, len(leaves), candidate)
                _refuse_untrained(candidate, stacks)
                if first is not None:
                    _refuse_other_stacks(first, stacks)
            except SplitError as error:
                refused.append((candidate, error))
                continue
            used = {n for stack in stacks.values() for n in stack.leaves}
            # Layers without parameters in common with these stay whole.
            others: list[Candidate] = []
            for other in (*all_layers, *_parts(flat, candidate)):
                if used.isdisjoint(other.leaves):
                    others.append(other)
                    used |= other.leaves
            return SplitLoss(
                candidate,
                pieces,
                stacks,
                output,
                tuple(others),
                tuple(x for x in refused if not x[0].guess),
            )
        # Errors of layers that are not guesses are more useful.
        meant = (error for x, error in refused if not x.guess)
        raise next(meant, refused[0][1])

    def _warn_of_repeated(self, jaxpr: core.Jaxpr) -> None:
        before, fixed = jax.tree.leaves(self.params), jax.tree.leaves(self.frozen)
        given: list[int | None] = [None] * len(jaxpr.invars)
        given[len(before) : len(before) + len(fixed)] = range(len(fixed))
        repeated = repeated_keys(jaxpr, [{x} for x in given])
        for n, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(self.frozen)):
            if n in repeated and not jnp.issubdtype(x.dtype, jnp.inexact):
                warn_user(
                    f"the loss draws random numbers, such as dropout masks, from"
                    f" frozen{keystr(path)}, a count or key that no step changes. They"
                    f" are the same in each step. {RESEED}"
                )
                return


def _cut_trained(
    closed: core.ClosedJaxpr, flat: Flat, count: int, layers: NumberedLayers | Sliced
) -> tuple[Pieces, Mapping[Member, Stack]]:
    """Cuts a loss between layers, or between their trained parameters alone."""
    # A frozen model of the same structure, whose output the loss uses, has layers of
    # the same names outside of these.
    try:
        return _cut(closed, flat, count, layers)
    except SplitError:
        for trained in _parts(flat, layers)[:1]:
            with contextlib.suppress(SplitError):
                return _cut(closed, flat, count, trained)
        raise


def _parts(flat: Flat, layers: Candidate) -> tuple[NumberedLayers, ...]:
    size = lambda n: nbytes(flat.avals[n])
    return layers.parts(size) if isinstance(layers, NumberedLayers) else ()


def _refuse_untrained(layers: Candidate, stacks: Mapping[Member, Stack]) -> None:
    if all(frozen for frozen, _ in stacks):
        raise SplitError(
            f"the layers of {layers.shown} have no parameters that are trained, and so"
            " no layerwise gradients. If they have adapters, number these like the"
            " layers, such as params['layers'][i]['lora_a']. Otherwise train with"
            " jax.grad."
        )


def _refuse_other_stacks(first: SplitLoss, stacks: Mapping[Member, Stack]) -> None:
    """Raises if layers differ from the first batch's stacks, or in their order."""
    if stacks == first.stacks:
        return
    known, each = (next(iter(x.values())).leaves for x in (first.stacks, stacks))
    other = "other parameters than"
    if sorted(known) == sorted(each) and known != each:
        other = f"its layers in the order {[known.index(n) for n in each]} of"
    raise SplitError(
        f"loss takes {other} the stacks of {first.layers.shown}, for parameters and a"
        " batch of these types. The batch of split_layers determines the stacks. Call"
        " split_layers with such a batch for a second model, and stack parameters with"
        " that model; or use the layers in one order."
    )


def _constants_first(flat: Flat) -> Flat:
    """Puts the constants of sums and products first, in place."""
    # `total + loss` adds to a literal in the first layer, and to a value in the others.
    # JAX then reverses the operands, and the first layer would differ from the others.
    flat.equations = [
        dataclasses.replace(e, inputs=e.inputs[::-1])
        if e.primitive.name in ("add", "mul") and isinstance(e.inputs[1], Constant)
        else e
        for e in flat.equations
    ]
    return flat


class _WithoutCheckpoints(Flat):
    """A loss without checkpoints around layers, which a step rematerializes anyway."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        is_layer: Callable[[Sequence[Equation], Sequence[int]], bool],
    ):
        self.is_layer = is_layer
        super().__init__(closed, checkpoints=False, derivatives=False)

    def _inlines(self, eqn: core.JaxprEqn, operands: Sequence[Operand]) -> bool:
        if eqn.primitive.name != "remat2" or eqn.params["policy"] is not None:
            return super()._inlines(eqn, operands)
        return self.is_layer(self.equations, values_of(operands))


class _SlicesOfStacks:
    """Tests if values are slices of most of the layers' stacks."""

    def __init__(self, leaves: set[int]):
        self.leaves = leaves
        self.producer: dict[int, Equation] = {}
        self.known = 0

    def __call__(self, equations: Sequence[Equation], values: Sequence[int]) -> bool:
        # Equations are still being added: read the new ones since the last call.
        new, self.known = equations[self.known :], len(equations)
        for equation in new:
            self.producer.update(dict.fromkeys(equation.outputs, equation))
        stacks = {self._stack_of(x) for x in values} - {None}
        # A checkpoint of whole stacks is removed too, to see the slices within it.
        whole = any(x is not None and x[1] for x in stacks)
        return whole or 2 * len(stacks) > len(self.leaves)

    def _stack_of(self, x: int) -> tuple[int, bool] | None:
        """The only stack that a value depends on, and whether on all of it; or None."""
        whole = True
        while x not in self.leaves:
            equation = self.producer.get(x)
            if equation is None or len(values_in(equation)) != 1:
                return None
            name = equation.primitive.name
            whole = whole and (name in ELEMENTWISE or name == "transpose")
            (x,) = values_in(equation)
        return x, whole


def _cut(
    closed: core.ClosedJaxpr, flat: Flat, count: int, layers: NumberedLayers | Sliced
) -> tuple[Pieces, Mapping[Member, Stack]]:
    if isinstance(layers, Sliced):
        is_slice = _SlicesOfStacks(layers.leaves)
        flat, each = layers.per_layer(_WithoutCheckpoints(closed, is_slice))
        flat = _constants_first(flat)
    else:
        each = layers.members
        if any(e.primitive.name == "remat2" for e in flat.equations):
            parameters = [set(x.values()) for x in each]
            is_layer = lambda _, values: any(
                2 * len(known.intersection(values)) > len(known) for known in parameters
            )
            flat = _constants_first(_WithoutCheckpoints(closed, is_layer))
    members = [list(x.values()) for x in each]
    weights = {*range(count), *(n for x in members for n in x)}
    depends = Depends.of(flat, sorted(weights), members)
    member = {n: name for x in each for name, n in x.items()}
    stages = lambda **how: Stages.from_cuts(Cuts.of(depends, **how), member)
    cut = lambda **how: Assembly(stages(**how)).pieces()
    # If a layer ends or begins with equations that keep the size of the carry, several
    # cuts are equally good. The cut with the fewest kinds of layers wins.
    cuts = [cut(latest=latest) for latest in (True, False)]
    # A carry of several values may be due to towers, for example of two inputs.
    if all(len(pieces.carried) > 1 for pieces in cuts):
        for latest in (True, False):
            with contextlib.suppress(SplitError):
                cuts.append(cut(latest=latest, interleaved=True))
    saved = lambda pieces: nbytes(pieces.carried)
    best = min(cuts, key=lambda pieces: (len(pieces.kinds), saved(pieces)))
    position = lambda x: depends.layer[min(x.values())]
    if isinstance(layers, Sliced):
        layers.refuse_other_order([position(x) for x in each])
        return best, layers.stacks
    in_order = sorted(each, key=position)
    return best, {name: Stack(tuple(x[name] for x in in_order)) for name in each[0]}


def _refuse_effects(jaxpr: core.Jaxpr) -> None:
    for eqn in jaxpr.eqns:
        if {type(x).__name__ for x in eqn.effects} - {"NamedAxisEffect"}:
            # The message names the equation within a scan or a call.
            for inner in core.jaxprs_in_params(eqn.params):
                _refuse_effects(inner)
            where = line_of(Equation(eqn.primitive, (), (), (), eqn))
            raise SplitError(
                f"the loss has a side effect, `{eqn.primitive.name}` at {where}. A"
                " print, a callback or a check would run twice for each layer, or not"
                " at all. Leave it out of the training loss."
            )
