"""A model's layers by the shapes of its parameters: stacked, or numbered by name."""

import collections
import dataclasses
import re
from collections.abc import Collection, Sequence

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import path_name

NamedShape = tuple[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a model, all alike.

    Attributes:
      largest: Bytes of one layer's parameters.
      rest: Bytes of all parameters that are no layer's.
      largest_of_rest: Bytes of the largest of them.
      count: How many there are.
      one: The arrays of one layer, by path.
      others: All arrays that are no layer's, by path.
      numbered: How the first one is named, as in `"model.layers.0"`; empty if they are
        stacked.
    """

    largest: int
    rest: int
    largest_of_rest: int
    count: int
    one: tuple[NamedShape, ...]
    others: tuple[NamedShape, ...]
    numbered: str = ""


# Arrays of a longer leading axis have a width there, such as `dense` and `norm`.
_MOST_LAYERS = 1000


def find_layers(params: PyTree, key: str) -> Layers | None:
    """Finds the layers.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      key: The key under which layers are stacked on the leading axis.

    Returns:
      The stack under `key`. If there is none, the largest family of alike layers that
      differ by a number in their names; None if there is no such family.
    """
    leaves = _by_path(params)
    inside = _under(leaves, key)
    size = lambda chosen: nbytes([leaves[n][1] for n in chosen])

    def layers(
        count: int, one: Sequence[NamedShape], inside: Collection[int], first: str = ""
    ) -> Layers:
        others = tuple(x for n, x in enumerate(leaves) if n not in inside)
        rest = [nbytes(x) for _, x in others]
        largest = nbytes([x for _, x in one])
        return Layers(
            largest, sum(rest), max(rest, default=0), count, tuple(one), others, first
        )

    stacks = [leaves[n] for n in inside]
    if length := _stacked(stacks, key):
        cut = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return layers(length, [(path, cut(x)) for path, x in stacks], {*inside})
    numbered: dict[tuple[str, int], dict[str, int]] = {}
    for n, (path, _) in enumerate(leaves):
        for match in re.finditer(r"\d+(?=[^\d])", path):  # with something inside it
            layer = numbered.setdefault((path[: match.start()], int(match[0])), {})
            layer[path[match.end() :]] = n
    families: dict[object, list[tuple[str, int]]] = collections.defaultdict(list)
    kind = lambda x: (x.shape, x.dtype)
    for (prefix, number), layer in numbered.items():
        alike = frozenset((name, kind(leaves[n][1])) for name, n in layer.items())
        families[prefix, alike].append((prefix, number))
    of = lambda family: {n for layer in family for n in numbered[layer].values()}
    several = (family for family in families.values() if len(family) > 1)
    most = max(several, key=lambda family: size(of(family)), default=None)
    if most is None:
        return None
    (prefix, number), one = min(most), numbered[min(most)].values()
    first = [leaves[n] for n in one]
    return layers(len(most), first, of(most), f"{prefix}{number}")


def stacks_under(params: PyTree, key: str) -> frozenset[int]:
    """The positions, among all leaves, of the stacks under a key; of none if empty.

    Args:
      params: The parameters, or their `ShapeDtypeStruct`s.
      key: The key under which layers are stacked on the leading axis.
    """
    leaves = _by_path(params)
    inside = _under(leaves, key)
    length = _stacked([leaves[n] for n in inside], key)
    return frozenset(inside if length and length <= _MOST_LAYERS else ())


def _by_path(params: PyTree) -> list[NamedShape]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path_name(path), jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in leaves
    ]


def _under(leaves: Sequence[NamedShape], key: str) -> list[int]:
    return [n for n, (path, _) in enumerate(leaves) if key in path.split("/")]


def _stacked(inside: Sequence[NamedShape], key: str) -> int | None:
    """The length of the stacks under a key; None if they are none.

    Arrays of a list of layers, which may begin with one width, have fewer than three
    axes.
    """
    lengths = {x.shape[:1] for _, x in inside}
    if len(lengths) != 1 or lengths == {()}:
        return None
    number = re.compile(rf"(^|/){re.escape(key)}/[^/\d]*\d+(/|$)")
    listed = any(number.search(path) for path, _ in inside)
    if listed and max(len(x.shape) for _, x in inside) < 3:
        return None
    ((length,),) = lengths
    return length
