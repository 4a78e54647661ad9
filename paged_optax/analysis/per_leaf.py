"""What a page of a transformation may be, read off its jaxpr.

`inner.update` is traced once, for the whole tree. The flattened computation falls
apart into one program a parameter, and a few scalars that all of them share (step
counts, learning rates, bias corrections):

| dependence between leaves | a page is |
| --- | --- |
| element by element | a block of rows |
| within one leaf (a norm, a factored moment, a matrix product) | the whole leaf |
| across leaves (a global norm) | refused: `CrossLeafError` |

What is computed is what a page's results need. A transformation with an effect besides
its results (a print, a callback, a check) is refused.
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
    Operand,
)
from paged_optax.backend.types import holds_moments, in_shard_map

#: Values of at most this many elements that no gradient enters are computed once
#: and shared; larger ones (noise, masks) are made anew by each leaf that needs
#: them, so that they never exist for the whole tree.
_SHARED_ELEMENTS = 1024

#: Owner of what is made of all parameters laid end to end, as `optax.flatten` does.
_JOINED = -1

#: Primitives that cut a joined leaf apart again.
_CUTS = frozenset("convert_element_type reshape slice split squeeze".split())


class CrossLeafError(ValueError):
    """The transformation mixes several parameters, so no page can be updated alone.

    Its argument says what is mixed.
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
    """A computation in which each parameter's gradient has been followed.

    Attributes:
      flat: The computation.
      owners: For each argument the parameter it belongs to, or None.
      of_moments: Values that are made of moments. They may be on the host.
      owner: For each value the parameter that it depends on, or None.
      producer: For each value that is made the position of its equation.
      joined: Values that are all parameters laid end to end.
    """

    flat: Flat
    owners: Sequence[int | None]
    of_moments: set[int]
    owner: list[int | None]
    producer: dict[int, int]
    joined: dict[int, None]

    @classmethod
    def of(
        cls, flat: Flat, owners: Sequence[int | None], name: Callable[[int], str]
    ) -> "_Followed":
        """Follows the gradients.

        Raises:
          CrossLeafError: If a value depends on two parameters, or if what is laid end
            to end is made of moments.
        """
        moments = [
            value
            for value, whose in enumerate(owners)
            if whose is None
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
        """Finds out on which parameter an equation's results depend."""
        whose = {
            o
            for x in equation.inputs
            if not isinstance(x, Constant) and (o := self.owner[x]) is not None
        }
        primitive = equation.primitive.name
        if _JOINED in whose:
            unmixed = whose == {_JOINED} and (
                primitive in _CUTS or self.flat.is_elementwise(equation, self.full)
            )
        else:
            unmixed = len(whose) < 2
        # Laid end to end, what is made of moments would all be on the device at once.
        joins = _JOINED not in whose and self.of_moments.isdisjoint(equation.outputs)
        if not unmixed and joins and primitive == "concatenate":
            self.joined.update((x, None) for x in equation.outputs)
            whose = {_JOINED}
        elif not unmixed:
            first, second = (sorted(whose - {_JOINED}) + [None, None])[:2]
            raise CrossLeafError(
                f"`{primitive}` combines values of"
                f" {'all parameters' if first is None else name(first)}"
                f"{'' if second is None else ' and ' + name(second)}"
            )
        for value in equation.outputs:
            self.producer[value] = index
            self.owner[value] = next(iter(whose), None)

    @property
    def full(self) -> tuple[int, ...]:
        """The shape of all parameters laid end to end."""
        return self.flat.shape(next(iter(self.joined))) if self.joined else ()

    def is_shared(self, value: int) -> bool:
        """Whether a value is computed once, for all leaves."""
        small = self.owner[value] is None
        small = small and self.flat.size(value) <= _SHARED_ELEMENTS
        small = small and value not in self.of_moments
        return small or value in self.joined

    def is_direct(self, value: Operand, place: int | None) -> bool:
        """Whether an output is no leaf's: shared, or an argument in its own place."""
        if isinstance(value, Constant):
            return True
        # What goes elsewhere is copied as any other result: a codec may store it. That
        # of a device's part may be as small as what is shared.
        if self.is_shared(value) and not (in_shard_map() and self.flat.shape(value)):
            return True
        in_place = value == place or not self.flat.shape(value)
        return value not in self.producer and in_place

    def ends_joined(self, value: int) -> bool:
        """Whether a value is cut from what was laid end to end."""
        if self.owner[value] != _JOINED or value in self.joined:
            return False
        equation = self.flat.equations[self.producer[value]]
        return not self.flat.is_elementwise(equation, self.full)


def _followed(
    closed: core.ClosedJaxpr,
    owners: Sequence[int | None],
    name: Callable[[int], str],
) -> _Followed:
    """Follows the gradients, through conditionals where they do not fall apart."""
    try:
        return _Followed.of(Flat(closed), owners, name)
    except CrossLeafError as error:
        # A conditional on all leaves, such as novograd's, may be one on each.
        try:
            return _Followed.of(Flat(closed, both=True), owners, name)
        except CrossLeafError:
            raise error from None


@dataclasses.dataclass(eq=False)
class _Outputs:
    """The outputs of a computation, grouped by leaf.

    Attributes:
      groups: Positions of the outputs of each leaf.
      direct: Outputs that are no leaf's: position to operand.
      owners: For each output the parameter it belongs to, or None.
    """

    groups: dict[Hashable, list[int]]
    direct: list[tuple[int, Operand]]
    owners: list[int | None]

    @classmethod
    def of(
        cls,
        followed: _Followed,
        by_places: Sequence[int | None],
        replaced: Sequence[int],
    ) -> "_Outputs":
        """Groups them; the arguments are those of `analyse`."""
        outputs = cls({}, [], [])
        for position, value in enumerate(followed.flat.outputs):
            place = replaced[position] if replaced else None
            by_place = by_places[position]
            whose = None if isinstance(value, Constant) else followed.owner[value]
            if whose is None and place is not None:
                # An update, of the same leaf as its gradient.
                whose = followed.owners[place]
            outputs.owners.append(by_place if whose in (None, _JOINED) else whose)
            if followed.is_direct(value, place):
                outputs.direct.append((position, value))
                continue
            key_of_place = (None, position)
            if by_place is not None:
                key_of_place = (by_place, followed.flat.shape(value))
            key = key_of_place if whose is None else whose
            outputs.groups.setdefault(key, []).append(position)
        return outputs


def analyse(
    closed: core.ClosedJaxpr,
    owners: Sequence[int | None],
    output_owners: Sequence[int | None],
    name: Callable[[int], str],
    replaced: Sequence[int] = (),
) -> tuple[Analysis, dict[int, ArrayLike]]:
    """Takes a traced update apart into one program a leaf.

    Args:
      closed: The traced function.
      owners: For each argument the number of the parameter it belongs to: its
        gradient and the parameter itself. None for state and extra arguments:
        whose they are shows in the computation.
      output_owners: For each output the parameter it belongs to by its place, which
        counts where no gradient enters it; None: no single one.
      name: A readable name of a parameter's number, for messages.
      replaced: For each output the number of the argument in whose place it goes; empty
        where all are new.

    Returns:
      The programs, and the values that they close over, by number.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if what is laid end to
        end is made of moments.
    """
    followed = _followed(closed, owners, name)
    flat, producer = followed.flat, followed.producer
    outputs = _Outputs.of(followed, output_owners, replaced)
    # In order: programs are compared, and so are the numbers of their arguments.
    direct = [x for _, x in outputs.direct if isinstance(x, int)]
    shared = dict.fromkeys([x for x in direct if x in producer])
    # Leaves laid end to end are one leaf to what follows element by element; where
    # the result is cut apart again, that leaf ends and the tail begins.
    cut_apart = [
        position
        for position in outputs.groups.get(_JOINED, ())
        if flat.shape(flat.outputs[position]) != followed.full
    ]
    wanted = [flat.outputs[p] for p in cut_apart]
    tail, tail_inputs = flat.program(wanted, followed.ends_joined, producer, ())
    computed = [x for x in tail_inputs if x in producer]
    shared |= dict.fromkeys(filter(followed.is_shared, computed))
    of_joined = [x for x in computed if x not in shared]
    leaf_updates, out_avals = [], closed.out_avals  # JAX makes that list at every look
    for key, positions in outputs.groups.items():
        places = [p for p in positions if p not in cut_apart]
        between = of_joined if key == _JOINED else []
        wanted = [*[flat.outputs[p] for p in places], *between]
        shape = flat.shape(wanted[0])
        program, inputs = flat.program(
            wanted, lambda x: not followed.is_shared(x), producer, shape
        )
        computed = [x for x in inputs if x in producer]
        shared |= dict.fromkeys(filter(followed.is_shared, computed))
        avals = [out_avals[p] for p in places] + [flat.avals[x] for x in between]
        owner = None if key == _JOINED else outputs.owners[positions[0]]
        leaf_updates.append(
            LeafUpdate(
                program,
                inputs,
                tuple(places),
                tuple(between),
                tuple(avals),
                shape,
                owner,
            )
        )
    program, inputs = flat.program(tuple(shared), lambda _: True, producer, ())
    analysis = Analysis(
        shared=program,
        shared_inputs=inputs,
        shared_outputs=tuple(shared),
        leaf_updates=tuple(leaf_updates),
        tail=tail,
        tail_inputs=tail_inputs,
        tail_outputs=tuple(cut_apart),
        direct=tuple(outputs.direct),
        owners=tuple(outputs.owners),
    )
    return analysis, flat.constants
