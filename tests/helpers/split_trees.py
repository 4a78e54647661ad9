"""Trees that random models keep their parameters in, by name: in and out."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: The weights of a layer, or of the rest of a model, by name.
Named = dict[str, Any]


class Tree(NamedTuple):
    """A way to keep parameters.

    Attributes:
      pack: Makes the tree of each layer's weights and the rest.
      unpack: Gives both back.
      name: What `split_layers` may be told the layers are called.
      axis: If the layers are stacked, the axis that is theirs.
    """

    pack: Callable[[Sequence[Named], Named], Any]
    unpack: Callable[[Any], tuple[Any, Named]]
    name: str
    axis: int | None = None


def _nest(named: Named) -> dict[str, Any]:
    """Nested dicts of names that slashes part."""
    tree: dict[str, Any] = {}
    for name, x in named.items():
        *before, last = name.split("/")
        at = tree
        for key in before:
            at = at.setdefault(key, {})
        at[last] = x
    return tree


def _flat(tree: Mapping[str, Any]) -> Named:
    found = {}
    for key, x in tree.items():
        if isinstance(x, dict):
            found |= {f"{key}/{name}": y for name, y in _flat(x).items()}
        else:
            found[key] = x
    return found


def _in_list(kind: Callable[..., Any] = list, nest: bool = True) -> Tree:
    into, out = (_nest, _flat) if nest else (dict, dict)
    return Tree(
        lambda layers, rest: {"layers": kind(map(into, layers)), **rest},
        lambda tree: (
            [out(x) for x in tree["layers"]],
            {name: x for name, x in tree.items() if name != "layers"},
        ),
        "layers",
    )


def _numbered(prefix: str, *path: str) -> Tree:
    """A dict of names such as `h_0`, as Flax Linen makes it."""

    def pack(layers: Sequence[Named], rest: Named) -> Any:
        tree: Any = {f"{prefix}{n}": _nest(x) for n, x in enumerate(layers)}
        for key in reversed(path):
            tree = {key: tree}
        return tree | {"others": rest}

    def unpack(tree: Any) -> Any:
        rest = tree["others"]
        for key in path:
            tree = tree[key]
        count = sum(name.startswith(prefix) and name != "others" for name in tree)
        return [_flat(tree[f"{prefix}{n}"]) for n in range(count)], rest

    return Tree(pack, unpack, "/".join((*path, f"{prefix}*")))


def _slashed(pattern: str, whole: bool) -> Tree:
    """Numbers in names that have slashes; of whole paths, or of layers as in Haiku.

    Args:
      pattern: The name of a layer, by `{}`; Haiku's first one has no number.
      whole: Whether each array has a name of its own.
    """
    haiku = "{}" not in pattern
    name_of = lambda n: (
        pattern.format(n) if not haiku else pattern + (f"_{n}" if n else "")
    )

    def pack(layers: Sequence[Named], rest: Named) -> Any:
        tree: dict[str, Any] = {f"others/{name}": x for name, x in rest.items()}
        for n, layer in enumerate(layers):
            if whole:
                tree |= {f"{name_of(n)}/{name}": x for name, x in layer.items()}
            else:
                tree[name_of(n)] = dict(layer)
        return tree

    def unpack(tree: Any) -> Any:
        rest = {
            name.removeprefix("others/"): x
            for name, x in tree.items()
            if name.startswith("others/")
        }
        layers: list[Named] = []
        while True:
            start = name_of(len(layers))
            if whole:
                start += "/"
                found = {
                    name.removeprefix(start): x
                    for name, x in tree.items()
                    if name.startswith(start)
                }
            else:
                found = tree.get(start)
            if not found:
                return layers, rest
            layers.append(found)

    return Tree(pack, unpack, pattern.replace("{}", "*"))


def _plain(name: str) -> str:
    return name.replace("/", "__")


@functools.cache
def _named_tuple(what: str, names: tuple[str, ...]) -> Any:
    return collections.namedtuple(what, names)


@functools.cache
def _dataclass(what: str, names: tuple[str, ...]) -> Any:
    made = dataclasses.make_dataclass(what, names)
    return jax.tree_util.register_dataclass(made, names, [])


def _records(make: Callable[[str, tuple[str, ...]], Any]) -> Tree:
    """Layers, and the whole, as records with fields."""

    def record(what: str, named: Named) -> Any:
        fields = {_plain(name): x for name, x in named.items()}
        return make(what, tuple(fields))(**fields)

    def fields(of: Any) -> Named:
        names = getattr(of, "_fields", None) or [x.name for x in dataclasses.fields(of)]
        return {name.replace("__", "/"): getattr(of, name) for name in names}

    def pack(layers: Sequence[Named], rest: Named) -> Any:
        blocks = tuple(record("Layer", x) for x in layers)
        return record("Model", {"blocks": blocks, **rest})

    def unpack(tree: Any) -> Any:
        rest = fields(tree)
        return [fields(x) for x in rest.pop("blocks")], rest

    return Tree(pack, unpack, "blocks")


def _stacked(axis: int, *path: str) -> Tree:
    """All layers in each leaf, along an axis."""

    def pack(layers: Sequence[Named], rest: Named) -> Any:
        stack = {
            name: jnp.stack([x[name] for x in layers], min(axis, layers[0][name].ndim))
            for name in layers[0]
        }
        tree: Any = _nest(stack)
        for key in reversed(path):
            tree = {key: tree}
        return tree | {"others": rest}

    def unpack(tree: Any) -> Any:
        rest = tree["others"]
        for key in path:
            tree = tree[key]
        return _flat(tree), rest

    return Tree(pack, unpack, "/".join(path), axis)


#: By name.
TREES: dict[str, Tree] = {
    "list": _in_list(),
    "list, flat": _in_list(nest=False),
    "tuple": _in_list(tuple),
    "h_0": _numbered("h_", "model"),
    "Block_0": _numbered("Block_", "params", "decoder"),
    "layer0": _numbered("layer", "model"),
    "digits": _numbered("", "blocks"),
    "slashed": _slashed("model/layers/{}", True),
    "slashed layers": _slashed("model/h_{}", False),
    "haiku": _slashed("model/~/block", False),
    "named tuple": _records(_named_tuple),
    "dataclass": _records(_dataclass),
    "stacked": _stacked(0, "layers"),
    "stacked, deep": _stacked(0, "params", "decoder", "layers"),
    "stacked, axis 1": _stacked(1, "params", "layers"),
}

STACKED = [name for name, tree in TREES.items() if tree.axis is not None]
LISTED = [name for name in TREES if name not in STACKED]
