"""The layers' parameters, stacked, and fetched a layer at a time."""

import copy
from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.layerwise.slices import FETCHES_AHEAD, LayerIndex, slab
from paged_optax.layerwise.stacks import length_of

#: One layer of the stacks, and of the frozen stacks.
Slabs = tuple[list[Array], list[Array]]

#: What of them is fetched ahead of the layer's turn; None for what need not be.
Fetched = tuple[list[Array | None], list[Array | None]]


class Weights:
    """The layers' parameters, stacked.

    Attributes:
      stacks: Those that are trained. Loops carry them, and write them.
      frozen: The others. Loops close over them.
      structure: The structure of what is trained.
      length: How many layers there are.
    """

    def __init__(self, layers: PyTree[Array], frozen: PyTree[Array] = None):
        self.stacks: list[Array]
        self.frozen: list[Array]
        self.stacks, self.structure = jax.tree.flatten(layers)
        self.frozen, self._frozen_structure = jax.tree.flatten(frozen)
        self.length = length_of(layers)

    def holding(self, stacks: Sequence[Array]) -> "Weights":
        """The same layers with other values of what is trained."""
        held = copy.copy(self)
        held.stacks = [*stacks]
        return held

    @property
    def ahead(self) -> bool:
        """Whether weights are fetched while the layer before is computed."""
        hosted = any(map(on_host, [*self.stacks, *self.frozen]))
        return FETCHES_AHEAD and self.length > 1 and hosted

    def fetched(self, stacks: Sequence[Array], i: LayerIndex | None) -> Fetched:
        """What is fetched ahead of layer i's turn."""
        if i is None or not self.ahead:
            return [None] * len(stacks), [None] * len(self.frozen)
        return (
            [slab(x, i) if on_host(x) else None for x in stacks],
            [slab(x, i) if on_host(x) else None for x in self.frozen],
        )

    def slabs(
        self, stacks: Sequence[Array], i: LayerIndex, ahead: Fetched | None = None
    ) -> Slabs:
        """Layer i, of which `ahead` has been fetched; None: nothing has."""
        here, frozen_here = ahead or self.fetched(stacks, None)
        both = (
            zip(stacks, here, strict=True),
            zip(self.frozen, frozen_here, strict=True),
        )
        trained, frozen = (
            [slab(x, i) if ahead is None else ahead for x, ahead in part]
            for part in both
        )
        return trained, frozen

    def of(self, slabs: Slabs) -> tuple[PyTree[Array], PyTree[Array]]:
        """One layer's parameters, trained and frozen, as the model sees them."""
        trained, frozen = ([x[0] for x in part] for part in slabs)
        return (
            jax.tree.unflatten(self.structure, trained),
            jax.tree.unflatten(self._frozen_structure, frozen),
        )
