"""A model's layers, found in its parameters: stacked, or numbered by name."""

import collections
import dataclasses
import re
from collections.abc import Sequence

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
      largest_of_rest: Bytes of the largest of them.
      numbered: How the first one is named, as in `"model.layers.0"`; empty if they are
        stacked.
    """

    largest: int
    rest: int
    largest_of_rest: int
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
    inside = [x for path, x in leaves if key in path.split("/")]
    lengths = {x.shape[:1] for x in inside}
    if len(lengths) == 1 and lengths != {()}:
        ((length,),) = lengths
        outside = [x for path, x in leaves if key not in path.split("/")]
        largest = nbytes(inside) // max(1, length)
        return Layers(largest, nbytes(outside), _largest(outside))
    numbered: dict[tuple[str, int], dict[str, jax.ShapeDtypeStruct]] = {}
    of = lambda path: re.match(r"(\D*)(\d+)([^\d].*)", path)  # with something inside
    for path, x in leaves:
        if match := of(path):
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
    in_family = lambda match: match and (match[1], int(match[2])) in most
    outside = [x for path, x in leaves if not in_family(of(path))]
    (prefix, number), largest = min(most), nbytes(numbered[min(most)])
    return Layers(largest, nbytes(outside), _largest(outside), f"{prefix}{number}")


def _largest(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes of the largest of some arrays."""
    return max(map(nbytes, leaves), default=0)
