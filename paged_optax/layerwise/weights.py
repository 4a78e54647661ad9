"""The layers' parameters, stacked, and fetched a layer at a time."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.meshes import on_one_device
from paged_optax.layerwise.slices import FETCHES_AHEAD, LayerIndex, slab
from paged_optax.layerwise.stacks import length_of

#: One layer of the stacks, and of the frozen stacks.
Slabs = tuple[list[Array], list[Array]]

#: What of them is fetched ahead of the layer's turn; None for what need not be.
Fetched = tuple[Sequence[Array | None], Sequence[Array | None]]

#: Where the vectors of all layers are read, by their stacks' positions: an array of
#: several stacks, [layers, stacks, width], and the stack's number in it.
Vectors = Mapping[int, tuple[Array, int]]

# Bytes of an array of several stacks, which are held twice. Two norms of 80 layers that
# are 8192 wide have 2.5 MiB.
_JOINED = 4 * 2**20


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

    @staticmethod
    def vectors(stacks: Sequence[Array]) -> Vectors:
        """The trained vectors, norms and biases, those of one shape in one array.

        A loop that reads them there has one small copy a layer, not one for each. It
        may write the stacks meanwhile, as each layer is read before it is written.
        """
        if any(map(on_host, stacks)):
            return {}  # XLA:GPU packs what is held less well: 32 MiB more on an L4
        alike = defaultdict[tuple[tuple[int, ...], DTypeLike], list[int]](list)
        for n, x in enumerate(stacks):
            if x.ndim == 2 and not on_host(x):
                alike[x.shape, x.dtype].append(n)
        made = {}
        for numbers in alike.values():
            group = [stacks[n] for n in numbers]
            small = sum(map(nbytes, group)) <= _JOINED
            if len(group) > 1 and small and on_one_device(group):
                joined = jnp.stack(group, axis=1)
                made |= {n: (joined, k) for k, n in enumerate(numbers)}
        return made

    def slabs(
        self,
        stacks: Sequence[Array],
        i: LayerIndex,
        ahead: Fetched | None = None,
        vectors: Vectors | None = None,
    ) -> Slabs:
        """Layer i.

        Args:
          stacks: What is trained.
          i: The layer's number.
          ahead: What of it has been fetched; None: nothing.
          vectors: Where its vectors are read; None: in `stacks`.
        """
        trained, frozen = ahead or self.fetched(stacks, None)
        vectors = vectors or {}
        return (
            [
                _row(*vectors[n], i) if n in vectors else _here(x, there, i)
                for n, (x, there) in enumerate(zip(stacks, trained, strict=True))
            ],
            [_here(x, there, i) for x, there in zip(self.frozen, frozen, strict=True)],
        )

    def of(self, slabs: Slabs) -> tuple[PyTree[Array], PyTree[Array]]:
        """One layer's parameters, trained and frozen, as the model sees them."""
        trained, frozen = ([x[0] for x in part] for part in slabs)
        return (
            jax.tree.unflatten(self.structure, trained),
            jax.tree.unflatten(self._frozen_structure, frozen),
        )


def _row(joined: Array, k: int, i: LayerIndex) -> Array:
    return slab(joined, i)[:, k]


def _here(x: Array, fetched: Array | None, i: LayerIndex) -> Array:
    return slab(x, i) if fetched is None else fetched
