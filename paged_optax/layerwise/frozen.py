"""Parameters that are used and not trained.

Nothing writes them, so that they wait for nothing: loops close over the stacks, and
fetch each layer of those that are on the host when there is time.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes, on_host
from paged_optax.backend.text import keystr
from paged_optax.backend.validation import check_arrays
from paged_optax.layerwise.groups import grouped
from paged_optax.layerwise.parts import by_name
from paged_optax.layerwise.slices import LayerIndex, slab
from paged_optax.layerwise.stacks import refuse_one_by_one


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The frozen parameters of a model.

    Attributes:
      layers: Those of the layers, stacked; None: there are none.
      rest: All others, by name.
    """

    layers: PyTree[Array]
    rest: Mapping[Hashable, PyTree[Array]]

    @classmethod
    def of(cls, frozen: PyTree, key: str, length: int) -> "Frozen":
        """Takes frozen parameters apart.

        Args:
          frozen: The frozen parameters.
          key: The key of the layers' parameters.
          length: How many layers are trained.

        Raises:
          TypeError: If they are no mapping of arrays.
          ValueError: If those of the layers are not so many layers, stacked.
        """
        given = by_name(frozen)
        if given is None:
            raise TypeError(
                f"frozen is of type {type(frozen).__name__}: pass a dict or another"
                " mapping that JAX knows as a pytree, with what is frozen of the layers"
                f" stacked on a leading axis under the key {key!r}."
            )
        layers = given.pop(key, None)
        name = f"frozen[{key!r}]"
        check_arrays(name, layers)
        refuse_one_by_one(layers)
        for path, x in jax.tree_util.tree_flatten_with_path(layers)[0]:
            if x.shape[:1] != (length,):
                raise ValueError(
                    f"{name}{keystr(path)} has shape {x.shape}, and params[{key!r}] has"
                    f" {length} layers: stack what is frozen of them on a leading axis"
                    f" of {length}. What all layers share goes into frozen beside"
                    f" {key!r}, and to the layers as the prologue's context."
                )
        return cls(layers, given)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Frozen stacks, of which a share is fetched beside each segment of a computation.

    Attributes:
      stacks: The stacks.
      count: How many shares, of about equal travel.
    """

    stacks: Sequence[Array]
    count: int

    @property
    def numbers(self) -> list[tuple[int, ...]]:
        """For each share the positions of its stacks, all of which are on the host."""
        hosted = [n for n, x in enumerate(self.stacks) if on_host(x)]
        travel = [nbytes(self.stacks[n]) for n in hosted]
        found = [group.leaves for group in grouped(hosted, (), travel, self.count)]
        return found + [()] * (self.count - len(found))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each share, of all layers."""
        return [sum(nbytes(self.stacks[n]) for n in share) for share in self.numbers]

    def fetched(self, k: int, i: LayerIndex) -> dict[int, Array]:
        """Begins to fetch share k of layer i; by the positions of the stacks."""
        return {n: slab(self.stacks[n], i) for n in self.numbers[k]}

    def slabs(self, fetched: Mapping[int, Array], i: LayerIndex) -> list[Array]:
        """Layer i, all shares of which have been fetched."""
        return [
            fetched[n] if n in fetched else slab(x, i)
            for n, x in enumerate(self.stacks)
        ]
