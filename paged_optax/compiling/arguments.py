"""A step's arguments, by their positions or names."""

import inspect
from collections.abc import Callable
from typing import Any

from paged_optax.backend.key_paths import keystr

#: The position of an argument, or the name of one that has none.
Key = int | str

Keys = tuple[Key, ...]


def several(keys: Any) -> Keys:
    """One position or name, or several, each once."""
    return (keys,) if isinstance(keys, int | str) else tuple(dict.fromkeys(keys))


def label(key: Key) -> str:
    """An argument, as messages name it."""
    return f"argument {key}"


def same_constants(one: dict[Key, Any], other: dict[Key, Any]) -> bool:
    """Whether two programs have the same constants: 1, 1.0 and True are three."""
    kinds = lambda static: {key: (type(x), x) for key, x in static.items()}
    return kinds(one) == kinds(other)


def signature(step: Callable[..., Any]) -> inspect.Signature | None:
    """What it takes itself, whatever it wraps; None if Python does not know."""
    try:
        return inspect.signature(step, follow_wrapped=False)
    except ValueError:
        return None


def names_by_position(signature: inspect.Signature | None) -> list[str]:
    """The names of arguments that have a position; empty where it is all they have."""
    every = signature.parameters.values() if signature else ()
    named, bare = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return [x.name if x.kind == named else "" for x in every if x.kind in (named, bare)]


def place_of(keys: Keys, path: Any) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{label(keys[path[0].idx])}{keystr(path[1:])}"
