"""A step's arguments: their names and their kinds, and which belong on the host."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Set
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import is_mistyped, on_host, typed_by_memory
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, PyTreeDef

#: The position of an argument, or the name of one that has none.
ArgumentKey = int | str

Keys = tuple[ArgumentKey, ...]


def several(keys: ArgumentKey | Iterable[ArgumentKey]) -> Keys:
    """One position or name, or several, each once."""
    if isinstance(keys, int | str):
        return (keys,)
    unique = tuple(dict.fromkeys(keys)) if isinstance(keys, Iterable) else (keys,)
    for key in unique:
        if not isinstance(key, int | str):
            raise TypeError(
                f"{key!r} names no argument: pass positions in donate_argnums and"
                " static_argnums, and names in donate_argnames."
            )
    return unique


def label(key: ArgumentKey) -> str:
    """An argument, as messages name it."""
    return f"argument {key}"


def signature(step: Callable[..., PyTree]) -> inspect.Signature | None:
    """The signature of a step, not of what it wraps; None if it has none."""
    try:
        # A wrapper may take other arguments than what it wraps.
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
    static: dict[ArgumentKey, Hashable]

    @property
    def kind(self) -> "CallKind":
        """What a program is compiled for, beside the places of arrays."""
        leaves, structure = jax.tree.flatten(self.values)
        # By itself `jax.typeof` takes milliseconds of each call for 1000 arrays.
        types = [getattr(x, "aval", None) or jax.typeof(x) for x in leaves]
        static = {key: (type(x), x) for key, x in self.static.items()}
        return CallKind(
            self.keys,
            static,
            structure,
            [(x.shape, x.dtype, x.weak_type) for x in types],
        )


class CallKind(NamedTuple):
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
    static: dict[ArgumentKey, tuple[type, Hashable]]
    structure: PyTreeDef
    types: list[tuple[tuple[int, ...], np.dtype, bool]]


def differences(call: Call, kind: CallKind) -> list[str]:
    """Where a call is of another structure or type than a program, for messages."""
    actual, arguments = call.kind, zip(call.keys, call.values, strict=True)
    if actual.keys != kind.keys:
        return list(map(label, kind.keys))
    others = [
        f"{label(key)} of another structure"
        for (key, value), wanted in zip(
            arguments, kind.structure.children(), strict=True
        )
        if jax.tree.structure(value) != wanted
    ]
    if others:
        return others
    flat = jax.tree_util.tree_flatten_with_path(call.values)[0]
    return [
        f"{place_of(call.keys, path)} of {dtype}{list(shape)}"
        for (path, _), type_, (shape, dtype, weak) in zip(
            flat, actual.types, kind.types, strict=True
        )
        if type_ != (shape, dtype, weak)
    ]


def place_of(keys: Keys, path: KeyPath) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{label(keys[path[0].idx])}{keystr(path[1:])}"


#: An array among the arguments, as messages name it; its shape and its dtype.
ArrayKey = tuple[str, tuple[int, ...], object]


def hosted(call: Call) -> set[ArrayKey]:
    """The arrays of a call that belong in host memory."""
    return {
        _array_key(call, path, x)
        for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]
        # One that is mistyped is in host memory, whatever its type says.
        if on_host(x) or is_mistyped(x)
    }


def refuse_moved(call: Call, known: Set[ArrayKey]) -> None:
    """Refuses arrays that are typed as device memory and belong on the host."""
    for path, x in jax.tree_util.tree_flatten_with_path(call.values)[0]:
        if not on_host(x) and _array_key(call, path, x) in known:
            raise ValueError(
                f"{place_of(call.keys, path)} belongs in host memory, and has the type"
                f" of device memory ({jax.typeof(x)}): a restore or a jax.device_put"
                " without a memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


def _array_key(
    call: Call, path: KeyPath, x: ArrayLike | jax.ShapeDtypeStruct
) -> ArrayKey:
    aval = jax.typeof(x)
    return place_of(call.keys, path), aval.shape, aval.dtype


def typed(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike | jax.ShapeDtypeStruct:
    """The shape with its memory in its type, as arrays have it."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed_by_memory(x.sharding))
