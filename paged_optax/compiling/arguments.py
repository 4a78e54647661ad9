"""A step's arguments, by their positions or names."""

import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, PyTreeDef

#: The position of an argument, or the name of one that has none.
Key = int | str

Keys = tuple[Key, ...]


def several(keys: Key | Iterable[Key]) -> Keys:
    """One position or name, or several, each once."""
    if isinstance(keys, int | str):
        return (keys,)
    found = tuple(dict.fromkeys(keys)) if isinstance(keys, Iterable) else (keys,)
    for key in found:
        if not isinstance(key, int | str):
            raise TypeError(
                f"{key!r} names no argument: pass positions in donate_argnums and"
                " static_argnums, and names in donate_argnames."
            )
    return found


def label(key: Key) -> str:
    """An argument, as messages name it."""
    return f"argument {key}"


def signature(step: Callable[..., PyTree]) -> inspect.Signature | None:
    """A step's own signature, not that of what it wraps; None if it has none."""
    try:
        return inspect.signature(step, follow_wrapped=False)
    except ValueError:
        return None


def names_by_position(signature: inspect.Signature | None) -> list[str]:
    """The names of arguments that have a position; `""` for one without a name."""
    every = signature.parameters.values() if signature else ()
    named, bare = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return [x.name if x.kind == named else "" for x in every if x.kind in (named, bare)]


class Call(NamedTuple):
    """What a step is called with.

    Attributes:
      keys: The arguments that are arrays.
      values: Their values.
      static: Those that are not, and their values.
    """

    keys: Keys
    values: tuple[PyTree, ...]
    static: dict[Key, Hashable]

    @property
    def kind(self) -> "Kind":
        """What a program is compiled for, beside the places of arrays."""
        leaves, structure = jax.tree.flatten(self.values)
        # By itself `jax.typeof` takes milliseconds of each call for 1000 arrays.
        types = [getattr(x, "aval", None) or jax.typeof(x) for x in leaves]
        static = {key: (type(x), x) for key, x in self.static.items()}
        return Kind(
            self.keys,
            static,
            structure,
            [(x.shape, x.dtype, x.weak_type) for x in types],
        )


class Kind(NamedTuple):
    """A kind of calls that share a program.

    `jax.jit` tells the same kinds apart: 1, 1.0 and True are three constants, and an
    array of a strong type is no Python number.

    Attributes:
      keys: The arguments that are arrays.
      static: The types and values of the others.
      structure: The tree of the arrays.
      types: Their shapes and dtypes, and whether the dtypes are weak.
    """

    keys: Keys
    static: dict[Key, tuple[type, Hashable]]
    structure: PyTreeDef
    types: list[tuple[tuple[int, ...], np.dtype, bool]]


def differences(call: Call, kind: Kind) -> list[str]:
    """Where a call is of another structure or type than a program, for messages."""
    found, given = call.kind, zip(call.keys, call.values, strict=True)
    if found.keys != kind.keys:
        return list(map(label, kind.keys))
    others = [
        f"{label(key)} of another structure"
        for (key, value), wanted in zip(given, kind.structure.children(), strict=True)
        if jax.tree.structure(value) != wanted
    ]
    if others:
        return others
    flat = jax.tree_util.tree_flatten_with_path(call.values)[0]
    return [
        f"{place_of(call.keys, path)} of {dtype}{list(shape)}"
        for (path, _), own, (shape, dtype, weak) in zip(
            flat, found.types, kind.types, strict=True
        )
        if own != (shape, dtype, weak)
    ]


def place_of(keys: Keys, path: KeyPath) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{label(keys[path[0].idx])}{keystr(path[1:])}"
