"""What a loss is taken apart into: equations before, of each layer, and after."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.typing import ArrayLike

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Operand
from paged_optax.splitting.find import Member


class Weight(NamedTuple):
    """An argument of a layer that is a parameter of its own."""

    member: Member


class Carried(NamedTuple):
    """An argument of a layer that comes from the layer before."""

    slot: int


class Seen(NamedTuple):
    """An argument of a layer that is the same for all."""

    value: int


class FromTable(NamedTuple):
    """An argument of a layer that each has another one of."""

    table: int


class Fixed(NamedTuple):
    """An argument of a layer that is a constant of the program."""

    value: ArrayLike


#: What a layer's argument is.
Role = Weight | Carried | Seen | FromTable | Fixed


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """What layers compute that are alike.

    Attributes:
      program: Computes the results, of the arguments.
      roles: What each of its arguments is.
      carried: For each value that goes from layer to layer the number of the result
        that it becomes; None where it stays what it is.
      kept: For each value that is kept the number of the result; None where layers of
        this kind keep nothing.
    """

    program: Callable[[Sequence[ArrayLike]], Sequence[ArrayLike]]
    roles: tuple[Role, ...]
    carried: tuple[int | None, ...]
    kept: tuple[int | None, ...]


class FromCarry(NamedTuple):
    """What the equations after the layers find in the last layer's output."""

    slot: int


class FromKept(NamedTuple):
    """What they find among what the layers kept: of one layer, or (None) of all."""

    number: int
    layer: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A loss, taken apart.

    Attributes:
      flat: Its equations.
      kinds: What the kinds of layers compute.
      kind_of: The kind of each layer.
      initial: What the first layer gets, for each value that goes from layer to layer;
        None: zeros.
      carried: Their shapes and dtypes.
      tables: What each layer has one of: an operand a layer (None where it needs
        none), or one operand that has all on its leading axis.
      kept: Shapes and dtypes of what each layer keeps.
      after: What the equations after the layers find, by its number.
      inside: The values that are made in layers.
    """

    flat: Flat
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    initial: tuple[Operand | None, ...]
    carried: tuple[ShapedArray, ...]
    tables: tuple[Sequence[Operand | None] | Operand, ...]
    kept: tuple[ShapedArray, ...]
    after: Mapping[int, FromCarry | FromKept]
    inside: frozenset[int]
