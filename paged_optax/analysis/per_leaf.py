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
    Operand,
    used_values,
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


class _Followed:
    """A computation, with the parameter that each value depends on."""

    def __init__(
        self, flat: Flat, owners: Sequence[int | None], name: Callable[[int], str]
    ):
        self.flat, self.owners = flat, owners  # of the arguments
        # Values computed from moments, which may be on the host.
        self.of_moments = {
            n
            for n, (owner, aval) in enumerate(zip(owners, flat.avals, strict=False))
            if owner is None and aval.shape and holds_moments(aval.dtype)
        }
        computed = len(flat.avals) - len(owners)
        self.param_index: list[int | None] = [*owners, *[None] * computed]
        # Values that are all parameters, concatenated.
        self.joined: dict[int, None] = {}
        for eqn in flat.eqns:
            self._follow(eqn, name)

    def _follow(self, eqn: Equation, name: Callable[[int], str]) -> None:
        param_indices = {
            o for x in eqn.numbers if (o := self.param_index[x]) is not None
        }
        primitive = eqn.primitive.name
        if _JOINED in param_indices:
            unmixed = param_indices == {_JOINED} and (
                primitive in _CUTS or self.flat.is_elementwise(eqn, self.full)
            )
        else:
            unmixed = len(param_indices) < 2
        if not self.of_moments.isdisjoint(eqn.numbers):
            self.of_moments.update(eqn.outputs)
        # Concatenated moments would all be on the device at the same time.
        joins = _JOINED not in param_indices and self.of_moments.isdisjoint(eqn.outputs)
        if not unmixed and joins and primitive == "concatenate":
            self.joined.update((x, None) for x in eqn.outputs)
            param_indices = {_JOINED}
        elif not unmixed:
            first, second = (sorted(param_indices - {_JOINED}) + [None, None])[:2]
            raise CrossLeafError(
                f"`{primitive}` combines values of"
                f" {'all parameters' if first is None else name(first)}"
                f"{'' if second is None else ' and ' + name(second)}"
            )
        for value in eqn.outputs:
            self.param_index[value] = next(iter(param_indices), None)

    @property
    def full(self) -> tuple[int, ...]:
        return self.flat.shape(next(iter(self.joined))) if self.joined else ()

    def is_shared(self, value: int) -> bool:
        """Returns whether a value is computed once, for all leaves."""
        unowned = self.param_index[value] is None and value not in self.of_moments
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
        return value not in self.flat.source and in_place

    def ends_joined(self, value: int) -> bool:
        if self.param_index[value] != _JOINED or value in self.joined:
            return False
        eqn = self.flat.eqns[self.flat.source[value]]
        return not self.flat.is_elementwise(eqn, self.full)

    def grouped(
        self, by_places: Sequence[int | None], replaced: Sequence[int]
    ) -> tuple[dict[Hashable, list[int]], list[tuple[int, Operand]], list[int | None]]:
        """Returns outputs by leaf, direct outputs, and the owner of each output."""
        groups: dict[Hashable, list[int]] = {}
        direct: list[tuple[int, Operand]] = []
        param_indices: list[int | None] = []
        for index, value in enumerate(self.flat.outputs):
            place = replaced[index] if replaced else None
            by_place = by_places[index]
            constant = isinstance(value, Constant)
            param_index = None if constant else self.param_index[value]
            if param_index is None and place is not None:
                # An update belongs to the leaf of its gradient.
                param_index = self.owners[place]
            param_indices.append(
                by_place if param_index in (None, _JOINED) else param_index
            )
            if self.is_direct(value, place):
                direct.append((index, value))
                continue
            key: Hashable = (None, index)
            if param_index is not None:
                key = param_index
            elif by_place is not None:
                key = (by_place, self.flat.shape(value))
            groups.setdefault(key, []).append(index)
        return groups, direct, param_indices


def analyse(
    closed: core.ClosedJaxpr,
    param_indices: Sequence[int | None],
    output_owners: Sequence[int | None],
    name: Callable[[int], str],
    replaced: Sequence[int] = (),
) -> tuple[Analysis, dict[int, ArrayLike]]:
    """Splits a traced update into one program a leaf.

    Args:
      closed: The traced function.
      param_indices: For each argument the number of the parameter it belongs to, if it
        is a gradient or a parameter. None for state and extra arguments, whose
        parameters the computation shows.
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
        followed = _Followed(Flat(closed), param_indices, name)
    except CrossLeafError as error:
        # A conditional on all leaves, such as novograd's, may be one on each.
        try:
            followed = _Followed(Flat(closed, both=True), param_indices, name)
        except CrossLeafError:
            raise error from None
    flat, source = followed.flat, followed.flat.source
    groups, outputs, result_owners = followed.grouped(output_owners, replaced)
    # In order: programs are compared, and so are the numbers of their arguments.
    shared = dict.fromkeys(
        [x for x in used_values(x for _, x in outputs) if x in source]
    )

    def find_shared(inputs: Sequence[int]) -> list[int]:
        """Adds shared values of a program's arguments, and returns computed others."""
        computed = [x for x in inputs if x in source]
        shared.update(dict.fromkeys(filter(followed.is_shared, computed)))
        return [x for x in computed if x not in shared]

    # Concatenated leaves are one leaf to element-wise equations. That leaf ends at the
    # equations that split it, where the tail begins.
    cut_apart = [
        index
        for index in groups.get(_JOINED, ())
        if flat.shape(flat.outputs[index]) != followed.full
    ]
    tail = flat.program([flat.outputs[p] for p in cut_apart], followed.ends_joined)
    of_joined = find_shared(tail.inputs)
    leaf_updates, out_avals = [], closed.out_avals  # JAX builds that list at each read
    for key, indices in groups.items():
        places = [p for p in indices if p not in cut_apart]
        between = of_joined if key == _JOINED else []
        results = [*[flat.outputs[p] for p in places], *between]
        shape = flat.shape(results[0])
        numbered = flat.program(results, lambda x: not followed.is_shared(x), shape)
        find_shared(numbered.inputs)
        avals = [out_avals[p] for p in places] + [flat.avals[x] for x in between]
        param_index = None if key == _JOINED else result_owners[indices[0]]
        outcome = tuple(places), tuple(between), tuple(avals), shape, param_index
        leaf_updates.append(LeafUpdate(numbered.program, numbered.inputs, *outcome))
    analysis = Analysis(
        shared=flat.program(tuple(shared)),
        equations=tuple(flat.eqns[i] for i in flat.needed(tuple(shared))),
        leaf_updates=tuple(leaf_updates),
        tail=dataclasses.replace(tail, outputs=tuple(cut_apart)),
        direct=tuple(outputs),
        param_indices=tuple(result_owners),
    )
    return analysis, flat.constants
