"""The page granularity of a transformation, read off its jaxpr.

`inner.update` is traced once, for the whole tree. The flattened computation splits into
one program a parameter, and a few scalars that all of them share (step counts, learning
rates, bias corrections):

| dependence between leaves | a page is |
| --- | --- |
| element by element | a block of rows |
| within one leaf (a norm, a factored moment, a matrix product) | the whole leaf |
| across leaves (a global norm) | refused: `CrossLeafError` |

A program computes the results of a page, and nothing else. Transformations with other
effects (a print, a callback, a check) are refused.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jax.extend import core
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import (
    Analysis,
    Constant,
    Equation,
    LeafUpdate,
    NumberedProgram,
    Operand,
)
from paged_optax.backend.types import holds_moments, in_shard_map

#: Values of at most this many elements that no gradient enters are computed once and
#: shared. Larger ones (noise, masks) are recomputed by each leaf that needs them, and
#: never exist for the whole tree.
_SHARED_ELEMENTS = 1024

#: Owner of concatenated parameters, as in `optax.flatten`.
_JOINED = -1

#: Primitives that split concatenated leaves.
_CUTS = frozenset("convert_element_type reshape slice split squeeze".split())


class CrossLeafError(ValueError):
    """The transformation mixes several parameters, so no page can be updated alone.

    Its argument names the combined values.
    """

    def __str__(self) -> str:
        return (
            f"this transformation cannot be paged: {self.args[0]}, so no page can be"
            " updated without the others. Chain the part that looks across parameters"
            " outside, as in optax.chain(optax.clip_by_global_norm(1.0), paged(...));"
            " put wrappers such as optax.MultiSteps around paged(...)."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Followed:
    """A computation, with the parameter that each value depends on."""

    flat: Flat
    owners: Sequence[int | None]  # of each argument
    of_moments: set[int]  # values computed from moments, which may be on the host
    owner: list[int | None]  # of each value: the parameter that it depends on
    producer: dict[int, int]  # of each computed value: the position of its equation
    joined: dict[int, None]  # values that are all parameters, concatenated

    @classmethod
    def of(
        cls, flat: Flat, owners: Sequence[int | None], name: Callable[[int], str]
    ) -> "_Followed":
        """Propagates the owners of arguments through all equations."""
        moments = [
            value
            for value, owner in enumerate(owners)
            if owner is None
            and flat.avals[value].shape
            and holds_moments(flat.avals[value].dtype)
        ]
        unknown: list[int | None] = [None] * (len(flat.avals) - len(owners))
        followed = cls(
            flat, owners, flat.dependents(moments), [*owners, *unknown], {}, {}
        )
        for index, equation in enumerate(flat.equations):
            followed._follow(index, equation, name)
        return followed

    def _follow(
        self, index: int, equation: Equation, name: Callable[[int], str]
    ) -> None:
        owners = {o for x in equation.numbers if (o := self.owner[x]) is not None}
        primitive = equation.primitive.name
        if _JOINED in owners:
            unmixed = owners == {_JOINED} and (
                primitive in _CUTS or self.flat.is_elementwise(equation, self.full)
            )
        else:
            unmixed = len(owners) < 2
        # Concatenated moments would all be on the device at the same time.
        joins = _JOINED not in owners and self.of_moments.isdisjoint(equation.outputs)
        if not unmixed and joins and primitive == "concatenate":
            self.joined.update((x, None) for x in equation.outputs)
            owners = {_JOINED}
        elif not unmixed:
            first, second = (sorted(owners - {_JOINED}) + [None, None])[:2]
            raise CrossLeafError(
                f"`{primitive}` combines values of"
                f" {'all parameters' if first is None else name(first)}"
                f"{'' if second is None else ' and ' + name(second)}"
            )
        for value in equation.outputs:
            self.producer[value] = index
            self.owner[value] = next(iter(owners), None)

    @property
    def full(self) -> tuple[int, ...]:
        return self.flat.shape(next(iter(self.joined))) if self.joined else ()

    def is_shared(self, value: int) -> bool:
        """Returns whether a value is computed once, for all leaves."""
        unowned = self.owner[value] is None and value not in self.of_moments
        small = unowned and self.flat.size(value) <= _SHARED_ELEMENTS
        return small or value in self.joined

    def is_direct(self, value: Operand, place: int | None) -> bool:
        if isinstance(value, Constant):
            return True
        # Arguments in other places are copied as results: a codec may store them. A
        # shard may be as small as a shared value.
        if self.is_shared(value) and not (in_shard_map() and self.flat.shape(value)):
            return True
        in_place = value == place or not self.flat.shape(value)
        return value not in self.producer and in_place

    def ends_joined(self, value: int) -> bool:
        if self.owner[value] != _JOINED or value in self.joined:
            return False
        equation = self.flat.equations[self.producer[value]]
        return not self.flat.is_elementwise(equation, self.full)

    def grouped(
        self, by_places: Sequence[int | None], replaced: Sequence[int]
    ) -> tuple[dict[Hashable, list[int]], list[tuple[int, Operand]], list[int | None]]:
        """Returns outputs by leaf, direct outputs, and the owner of each output."""
        groups: dict[Hashable, list[int]] = {}
        direct: list[tuple[int, Operand]] = []
        owners: list[int | None] = []
        for position, value in enumerate(self.flat.outputs):
            place = replaced[position] if replaced else None
            by_place = by_places[position]
            owner = None if isinstance(value, Constant) else self.owner[value]
            if owner is None and place is not None:
                # An update belongs to the leaf of its gradient.
                owner = self.owners[place]
            owners.append(by_place if owner in (None, _JOINED) else owner)
            if self.is_direct(value, place):
                direct.append((position, value))
                continue
            key: Hashable = (None, position)
            if owner is not None:
                key = owner
            elif by_place is not None:
                key = (by_place, self.flat.shape(value))
            groups.setdefault(key, []).append(position)
        return groups, direct, owners


def analyse(
    closed: core.ClosedJaxpr,
    owners: Sequence[int | None],
    output_owners: Sequence[int | None],
    name: Callable[[int], str],
    replaced: Sequence[int] = (),
) -> tuple[Analysis, dict[int, ArrayLike]]:
    """Splits a traced update into one program a leaf.

    Args:
      closed: The traced function.
      owners: For each argument the number of the parameter it belongs to, if it is a
        gradient or a parameter. None for state and extra arguments, whose owners the
        computation shows.
      output_owners: For each output the parameter of its position, used if no gradient
        enters it; None: no single one.
      name: A readable name of a parameter's number, for messages.
      replaced: For each output the number of the argument that it replaces; empty if
        all are new.

    Returns:
      The programs, and the values that they close over, by number.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if concatenated leaves
        depend on moments.
    """
    try:
        followed = _Followed.of(Flat(closed), owners, name)
    except CrossLeafError as error:
        # A conditional on all leaves, such as novograd's, may be one on each.
        try:
            followed = _Followed.of(Flat(closed, both=True), owners, name)
        except CrossLeafError:
            raise error from None
    flat, producer = followed.flat, followed.producer
    groups, outputs, owner_of = followed.grouped(output_owners, replaced)
    # In order: programs are compared, and so are the numbers of their arguments.
    shared = dict.fromkeys(
        [x for _, x in outputs if isinstance(x, int) and x in producer]
    )
    # Concatenated leaves are one leaf to element-wise equations. That leaf ends at the
    # equations that split it, where the tail begins.
    cut_apart = [
        position
        for position in groups.get(_JOINED, ())
        if flat.shape(flat.outputs[position]) != followed.full
    ]
    results = [flat.outputs[p] for p in cut_apart]
    tail, tail_inputs = flat.program(results, followed.ends_joined, producer, ())
    computed = [x for x in tail_inputs if x in producer]
    shared |= dict.fromkeys(filter(followed.is_shared, computed))
    of_joined = [x for x in computed if x not in shared]
    leaf_updates, out_avals = [], closed.out_avals  # JAX builds that list at each read
    for key, positions in groups.items():
        places = [p for p in positions if p not in cut_apart]
        between = of_joined if key == _JOINED else []
        results = [*[flat.outputs[p] for p in places], *between]
        shape = flat.shape(results[0])
        program, inputs = flat.program(
            results, lambda x: not followed.is_shared(x), producer, shape
        )
        computed = [x for x in inputs if x in producer]
        shared |= dict.fromkeys(filter(followed.is_shared, computed))
        avals = [out_avals[p] for p in places] + [flat.avals[x] for x in between]
        owner = None if key == _JOINED else owner_of[positions[0]]
        outcome = tuple(places), tuple(between), tuple(avals), shape, owner
        leaf_updates.append(LeafUpdate(program, inputs, *outcome))
    program, inputs = flat.program(tuple(shared), lambda _: True, producer, ())
    analysis = Analysis(
        shared=NumberedProgram(program, inputs, tuple(shared)),
        leaf_updates=tuple(leaf_updates),
        tail=NumberedProgram(tail, tail_inputs, tuple(cut_apart)),
        direct=tuple(outputs),
        owners=tuple(owner_of),
    )
    return analysis, flat.constants
