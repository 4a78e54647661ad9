"""Trees that random models keep their parameters in, by name: in and out."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: The weights of a layer, or of the rest of a model, by name.
Named = dict[str, Any]

#: Of the trees that were packed: each leaf's layer and name, and how many layers.
_NAMES: dict[Any, tuple[list[tuple[int, str]], int]] = {}


class Tree(NamedTuple):
    """A way to keep parameters."""

    #: Makes the tree of each layer's weights and the rest.
    make: Callable[[Sequence[Named], Named], Any]
    name: str  # what `split_layers` may be told the layers are called
    axis: int | None = None  # if the layers are stacked, the axis that is theirs

    def pack(self, layers: Sequence[Named], rest: Named) -> Any:
        """The tree of each layer's weights and the rest."""
        if self.axis is not None:
            at = lambda name: min(self.axis or 0, layers[0][name].ndim)
            stack = lambda name: jnp.stack([x[name] for x in layers], at(name))
            layers = [{name: stack(name) for name in layers[0]}]
        named = lambda n, layer: {name: _Leaf((n, name)) for name in layer}
        tree = self.make([named(n, x) for n, x in enumerate(layers)], named(-1, rest))
        names, structure = jax.tree.flatten(tree)
        _NAMES[structure] = [x.name for x in names], len(layers)
        return self.make(layers, rest)

    def unpack(self, tree: Any) -> tuple[Any, Named]:
        """Gives both back, stacked layers as one dict."""
        leaves, structure = jax.tree.flatten(tree)
        names, count = _NAMES[structure]
        *layers, rest = found = [dict[str, Any]() for _ in range(count + 1)]
        for (n, name), x in zip(names, leaves, strict=True):
            found[n][name] = x
        return layers if self.axis is None else layers[0], rest


@dataclasses.dataclass
class _Leaf:
    name: tuple[int, str]


def _nest(named: Named) -> dict[str, Any]:
    """Nested dicts of names that slashes part."""
    tree: dict[str, Any] = {}
    for name, x in named.items():
        *before, last = name.split("/")
        functools.reduce(lambda at, key: at.setdefault(key, {}), before, tree)[last] = x
    return tree


def _in_list(kind: Callable[..., Any] = list, into: Any = _nest) -> Tree:
    make = lambda layers, rest: {"layers": kind(map(into, layers)), **rest}
    return Tree(make, "layers")


def _beside(path: str, layers: Any, rest: Named) -> Any:
    for key in reversed(path.split("/")):
        layers = {key: layers}
    return layers | {"others": rest}


def _numbered(prefix: str, path: str) -> Tree:
    """A dict of names such as `h_0`, as Flax Linen makes it."""
    named = lambda layers: {f"{prefix}{n}": _nest(x) for n, x in enumerate(layers)}
    make = lambda layers, rest: _beside(path, named(layers), rest)
    return Tree(make, f"{path}/{prefix}*")


def _slashed(name_of: Callable[[Any], str], whole: bool = False) -> Tree:
    """Numbers in names that have slashes; of layers, or of whole paths."""

    def make(layers: Sequence[Named], rest: Named) -> Any:
        tree: dict[str, Any] = {f"others/{name}": x for name, x in rest.items()}
        for n, layer in enumerate(layers):
            if whole:
                tree |= {f"{name_of(n)}/{name}": x for name, x in layer.items()}
            else:
                tree[name_of(n)] = dict(layer)
        return tree

    return Tree(make, name_of("*"))


@functools.cache
def _dataclass(what: str, names: tuple[str, ...]) -> Any:
    made = dataclasses.make_dataclass(what, names)
    return jax.tree_util.register_dataclass(made, names, [])


def _records(kind: Callable[[str, tuple[str, ...]], Any]) -> Tree:
    """Layers, and the whole, as records with fields."""

    def record(what: str, named: Named) -> Any:
        fields = {name.replace("/", "__"): x for name, x in named.items()}
        return kind(what, tuple(fields))(**fields)

    def make(layers: Sequence[Named], rest: Named) -> Any:
        blocks = tuple(record("Layer", x) for x in layers)
        return record("Model", {"blocks": blocks, **rest})

    return Tree(make, "blocks")


def _stacked(axis: int, path: str) -> Tree:
    """All layers in each leaf, along an axis."""
    return Tree(lambda layers, rest: _beside(path, _nest(layers[0]), rest), path, axis)


#: By name.
TREES: dict[str, Tree] = {
    "list": _in_list(),
    "list, flat": _in_list(into=dict),
    "tuple": _in_list(tuple),
    "h_0": _numbered("h_", "model"),
    "Block_0": _numbered("Block_", "params/decoder"),
    "layer0": _numbered("layer", "model"),
    "digits": _numbered("", "blocks"),
    "slashed": _slashed("model/layers/{}".format, whole=True),
    "slashed layers": _slashed("model/h_{}".format),
    # Haiku's first layer has no number, nor has what they all are called.
    "haiku": _slashed(
        lambda n: "model/~/block" + (f"_{n}" if n not in (0, "*") else "")
    ),
    "named tuple": _records(functools.cache(collections.namedtuple)),
    "dataclass": _records(_dataclass),
    "stacked": _stacked(0, "layers"),
    "stacked, deep": _stacked(0, "params/decoder/layers"),
    "stacked, axis 1": _stacked(1, "params/layers"),
}

STACKED = [name for name, tree in TREES.items() if tree.axis is not None]
LISTED = [name for name in TREES if name not in STACKED]
