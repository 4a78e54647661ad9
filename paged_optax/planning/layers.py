"""A model's layers, found in its parameters: stacked, or numbered by name."""

import collections
import dataclasses
import re

import jax
from jaxtyping import PyTree

from paged_optax.backend.key_paths import slashed
from paged_optax.backend.memory import nbytes


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a model, all alike.

    Attributes:
      largest: Bytes of one layer's parameters.
      rest: Bytes of all parameters that are no layer's.
      numbered: How the first one is named, as in `"model.layers.0"`; empty if they are
        stacked.
    """

    largest: int
    rest: int
    numbered: str = ""


def find_layers(params: PyTree, key: str) -> Layers | None:
    """Finds the layers.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      key: The key under which layers are stacked on the leading axis.

    Returns:
      The stack under `key`. If there is none, the largest family of alike layers that
      differ by a number in their names; None if there is no such family.
    """
    leaves = [
        (slashed(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    total = nbytes(params)
    inside = [x for path, x in leaves if key in path.split("/")]
    lengths = {x.shape[:1] for x in inside}
    if len(lengths) == 1 and lengths != {()}:
        ((length,),) = lengths
        return Layers(nbytes(inside) // max(1, length), total - nbytes(inside))
    numbered: dict[tuple[str, int], dict[str, jax.ShapeDtypeStruct]] = {}
    for path, x in leaves:
        match = re.match(r"(\D*)(\d+)([^\d].*)", path)  # with something inside it
        if match:
            layer = numbered.setdefault((match[1], int(match[2])), {})
            layer[match[3]] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    families: dict[object, list[tuple[str, int]]] = collections.defaultdict(list)
    for (prefix, number), layer in numbered.items():
        families[prefix, frozenset(layer.items())].append((prefix, number))
    size = lambda family: sum(nbytes(numbered[layer]) for layer in family)
    several = (family for family in families.values() if len(family) > 1)
    most = max(several, key=size, default=None)
    if most is None:
        return None
    first = min(most)
    return Layers(nbytes(numbered[first]), total - size(most), f"{first[0]}{first[1]}")
