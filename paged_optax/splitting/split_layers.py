"""A user's loss, taken apart into prologue, layer and epilogue."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.equation import Operand
from paged_optax.analysis.flat import Flat, trace
from paged_optax.backend.types import PyTreeDef
from paged_optax.splitting.assemble import assembled
from paged_optax.splitting.build import Functions
from paged_optax.splitting.cut import Cuts
from paged_optax.splitting.depends import Depends, SplitError
from paged_optax.splitting.find import Layers, Member, named, numbered, split_names
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.stacking import Stack, Stacking
from paged_optax.splitting.stages import Stages


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A loss that is traced, and whose parameters are numbered.

    Attributes:
      flat: Its equations. The parameters are its first values.
      leaves: For each parameter whether it is frozen, and its names.
      output: The structure of what it returns.
      shapes: The batch that it was traced with, or its shapes.
    """

    flat: Flat
    leaves: tuple[tuple[bool, tuple[str, ...]], ...]
    output: PyTreeDef


def _try(traced: Traced, layers: Layers, latest: bool) -> Pieces:
    flat = traced.flat
    members = [list(each.values()) for each in layers.members]
    depends = Depends.of(flat, range(len(traced.leaves)), members)
    cuts = Cuts.of(depends, latest=latest)
    member = {n: name for each in layers.members for name, n in each.items()}
    return assembled(Stages.found(cuts, member))
