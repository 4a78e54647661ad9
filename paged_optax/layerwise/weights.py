"""The layers' parameters, stacked, and fetched a layer at a time."""

from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.layerwise.slices import FETCHES_AHEAD, LayerIndex, slab
from paged_optax.layerwise.stacks import length_of


class Weights:
    """The layers' parameters, stacked."""

    def __init__(self, layers: PyTree[Array]):
        self.stacks: list[Array]
        self.stacks, self.structure = jax.tree.flatten(layers)
        self.length = length_of(layers)

    @property
    def ahead(self) -> bool:
        """Whether weights are fetched while the layer before is computed."""
        return FETCHES_AHEAD and self.length > 1 and any(map(on_host, self.stacks))

    def fetched(
        self, stacks: Sequence[Array], i: LayerIndex | None
    ) -> list[Array | None]:
        """What is fetched ahead of layer i's turn; None for what need not be."""
        if i is None or not self.ahead:
            return [None] * len(stacks)
        return [slab(x, i) if on_host(x) else None for x in stacks]

    def slabs(
        self,
        stacks: Sequence[Array],
        i: LayerIndex,
        ahead: Sequence[Array | None] | None = None,
    ) -> list[Array]:
        """Layer i, of which `ahead` has been fetched; None: nothing has."""
        return [
            slab(x, i) if here is None else here
            for x, here in zip(stacks, ahead or [None] * len(stacks), strict=True)
        ]

    def of(self, slabs: Sequence[Array]) -> PyTree[Array]:
        """One layer's parameters, as the model sees them."""
        return jax.tree.unflatten(self.structure, [x[0] for x in slabs])
