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

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from paged_optax.analysis.equation import Constant, Operand
from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Analysis, LeafUpdate

#: Values of at most this many elements that no gradient enters are computed once
#: and shared; larger ones (noise, masks) are made anew by each leaf that needs
#: them, so that they never exist for the whole tree.
_SHARED_ELEMENTS = 1024

#: Owner of what is made of all parameters laid end to end, as `optax.flatten` does.
_JOINED = -1

#: Primitives that cut a joined leaf apart again.
_CUTS = frozenset("convert_element_type reshape slice split squeeze".split())


class CrossLeafError(ValueError):
    """The transformation mixes several parameters, so no page can be updated alone."""


def _owned(
    flat: Flat,
    owners: Sequence[int | None],
    of_moments: set[int],
    name: Callable[[int], str],
) -> tuple[list[int | None], dict[int, int], dict[int, None]]:
    """Follows each parameter's gradient through the computation.

    Returns:
      For each value the parameter it depends on; for each value made the position of
      its equation; and the values that are all parameters laid end to end.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if what is laid end to
        end is made of moments.
    """
    owner: list[int | None] = [*owners, *[None] * (len(flat.avals) - len(owners))]
    producer: dict[int, int] = {}
    joined: dict[int, None] = {}
    for index, equation in enumerate(flat.equations):
        whose = {
            o
            for x in equation.inputs
            if not isinstance(x, Constant) and (o := owner[x]) is not None
        }
        primitive = equation.primitive.name
        if _JOINED in whose:
            full = flat.shape(next(iter(joined)))
            alone = whose == {_JOINED} and (
                primitive in _CUTS or flat.is_elementwise(equation, full)
            )
        else:
            alone = len(whose) < 2
        # Laid end to end, what is made of moments would all be on the device at once.
        joins = _JOINED not in whose and of_moments.isdisjoint(equation.outputs)
        if not alone and joins and primitive == "concatenate":
            joined.update((x, None) for x in equation.outputs)
            whose = {_JOINED}
        elif not alone:
            first, second = (sorted(whose - {_JOINED}) + [None, None])[:2]
            raise CrossLeafError(
                f"this transformation cannot be paged: `{primitive}` combines values of"
                f" {'all parameters' if first is None else name(first)}"
                f"{'' if second is None else ' and ' + name(second)}, so no page can be"
                " updated without the others. Chain the part that looks across"
                " parameters outside, as in"
                " optax.chain(optax.clip_by_global_norm(1.0), paged(...)); put wrappers"
                " such as optax.MultiSteps around paged(...)."
            )
        for value in equation.outputs:
            producer[value] = index
            owner[value] = next(iter(whose), None)
    return owner, producer, joined


def analyse(
    closed: core.ClosedJaxpr,
    owners: Sequence[int | None],
    output_owners: Sequence[int | None],
    name: Callable[[int], str],
    replaced: Sequence[int] = (),
) -> Analysis:
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
      The programs.

    Raises:
      CrossLeafError: If a value depends on two parameters, or if what is laid end to
        end is made of moments.
    """
    # What is made of moments may be on the host, and pages with them.
    moments = [
        value
        for value, (whose, aval) in enumerate(zip(owners, closed.in_avals, strict=True))
        if whose is None and aval.shape and jnp.issubdtype(aval.dtype, jnp.inexact)
    ]

    def followed(flat: Flat) -> Any:
        of_moments = flat.made_of(moments)
        return flat, of_moments, *_owned(flat, owners, of_moments, name)

    try:
        flat, of_moments, owner, producer, joined = followed(Flat(closed))
    except CrossLeafError as error:
        # A conditional on all leaves, such as novograd's, may be one on each.
        try:
            flat, of_moments, owner, producer, joined = followed(
                Flat(closed, both=True)
            )
        except CrossLeafError:
            raise error from None
    is_given = lambda value: value not in producer

    def is_shared(value: int) -> bool:
        small = owner[value] is None and flat.size(value) <= _SHARED_ELEMENTS
        small = small and value not in of_moments
        return small or value in joined

    def is_direct(value: Operand, place: int | None) -> bool:
        if isinstance(value, Constant) or is_shared(value):
            return True
        # What goes elsewhere is copied as any other result: a codec may store it.
        return is_given(value) and (value == place or not flat.shape(value))

    groups: dict[Any, list[int]] = {}
    direct: list[tuple[int, Operand]] = []
    belongs: list[int | None] = []
    for position, value in enumerate(flat.outputs):
        place = replaced[position] if replaced else None
        by_place = output_owners[position]
        whose = None if isinstance(value, Constant) else owner[value]
        if whose is None and place is not None:
            whose = owners[place]  # an update, of the same leaf as its gradient
        belongs.append(by_place if whose in (None, _JOINED) else whose)
        if is_direct(value, place):
            direct.append((position, value))
            continue
        alone = (None, position) if by_place is None else (by_place, flat.shape(value))
        groups.setdefault(alone if whose is None else whose, []).append(position)

    shared: dict[int, None] = dict.fromkeys(
        x for _, x in direct if isinstance(x, int) and not is_given(x)
    )
    share = lambda inputs: shared.update(
        (x, None) for x in inputs if not is_given(x) and is_shared(x)
    )
    # Leaves laid end to end are one leaf to what follows element by element; where
    # the result is cut apart again, that leaf ends and the tail begins.
    full = flat.shape(next(iter(joined))) if joined else ()
    cut_apart = [
        position
        for position in groups.get(_JOINED, ())
        if flat.shape(flat.outputs[position]) != full
    ]

    def in_tail(value: int) -> bool:
        if owner[value] != _JOINED or value in joined:
            return False
        return not flat.is_elementwise(flat.equations[producer[value]], full)

    tail, tail_inputs = flat.program(
        [flat.outputs[p] for p in cut_apart], in_tail, producer, ()
    )
    share(tail_inputs)
    between = [x for x in tail_inputs if not is_given(x) and not is_shared(x)]

    leaves = []
    for key, positions in groups.items():
        outputs = [p for p in positions if p not in cut_apart]
        wanted = [flat.outputs[p] for p in outputs]
        if key == _JOINED:
            wanted += between
            outputs += [~x for x in between]
        shape = flat.shape(wanted[0])
        program, inputs = flat.program(
            wanted, lambda x: not is_shared(x), producer, shape
        )
        share(inputs)
        avals = tuple(
            closed.out_avals[p] if p >= 0 else flat.avals[~p] for p in outputs
        )
        own = None if key == _JOINED else belongs[positions[0]]
        leaves.append(LeafUpdate(program, inputs, tuple(outputs), avals, shape, own))
    program, inputs = flat.program(tuple(shared), lambda _: True, producer, ())
    return Analysis(
        constants=flat.constants,
        shared=program,
        shared_inputs=inputs,
        shared_outputs=tuple(shared),
        leaves=tuple(leaves),
        tail=tail,
        tail_inputs=tail_inputs,
        tail_outputs=tuple(cut_apart),
        direct=tuple(direct),
        owners=tuple(belongs),
    )
