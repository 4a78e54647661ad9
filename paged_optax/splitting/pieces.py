"""A loss split into prologue, layers and epilogue."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Operand
from paged_optax.splitting.numbered import Member


class Weight(NamedTuple):
    """A parameter of the layer."""

    member: Member


class Carried(NamedTuple):
    """A value of the carry."""

    slot: int


class Seen(NamedTuple):
    """A value from before the layers, the same for all layers."""

    value: int


class FromTable(NamedTuple):
    """A layer's row of a table."""

    table: int


class Fixed(NamedTuple):
    """A constant of the program."""

    value: ArrayLike


#: The role of a layer's argument.
Role = Weight | Carried | Seen | FromTable | Fixed


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """The program of equal layers."""

    program: Callable[[Sequence[ArrayLike]], Sequence[ArrayLike]]
    roles: Sequence[Role]
    # For each slot, the index of the result with its next value; None if the slot keeps
    # its value.
    carried: Sequence[int | None]
    # For each kept value, the index of its result; None if layers of this kind do not
    # compute it.
    kept: Sequence[int | None]


class FromCarry(NamedTuple):
    """A value that the epilogue reads from the last layer's carry."""

    slot: int


class FromKept(NamedTuple):
    """A value that the epilogue reads from a layer's kept values; None: all layers'."""

    number: int
    layer: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A loss split into prologue, kinds of layers, and epilogue."""

    flat: Flat
    kinds: Sequence[LayerKind]
    kind_indices: Sequence[int]  # of each layer
    # First value of each slot of the carry; None for zeros.
    initial: Sequence[Operand | None]
    carried: Sequence[ShapedArray]  # the slots' shapes and dtypes
    # Arguments that differ between layers: an operand for each layer (None if the layer
    # needs none), or one operand with layers on its leading axis.
    tables: Sequence[Sequence[Operand | None] | Operand]
    # Shapes and dtypes of the values that each layer keeps.
    kept: Sequence[ShapedArray]
    # Values of layers that the epilogue reads.
    after: Mapping[int, FromCarry | FromKept]
    inside: frozenset[int]  # values that layers compute

    @property
    def seen(self) -> list[int]:
        """The values that all layers read, without the constants of the loss."""
        roles = (role for kind in self.kinds for role in kind.roles)
        values = dict.fromkeys(role.value for role in roles if isinstance(role, Seen))
        return [x for x in values if x not in self.flat.constants]
