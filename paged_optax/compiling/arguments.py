"""A step's arguments, by their positions or names."""

import inspect
from collections.abc import Callable, Hashable, Iterable

import jax
from jaxtyping import PyTree

from paged_optax.backend.key_paths import keystr
from paged_optax.backend.types import KeyPath

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


def same_constants(one: dict[Key, Hashable], other: dict[Key, Hashable]) -> bool:
    """Whether two programs have the same constants; 1, 1.0 and True differ."""
    kinds = lambda static: {key: (type(x), x) for key, x in static.items()}
    return kinds(one) == kinds(other)


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


def refuse_other_types(
    values: tuple[PyTree, ...], keys: Keys, compiled_for: PyTree
) -> None:
    """Refuses arrays of other shapes or dtypes than a step was compiled for.

    JAX does so too, but names them as `jit_step` passes them on.
    """
    flat = jax.tree_util.tree_flatten_with_path(values)[0]
    for (path, x), wanted in zip(flat, jax.tree.leaves(compiled_for), strict=True):
        found = jax.typeof(x)
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            described = lambda x: f"{x.dtype}{list(x.shape)}"
            raise TypeError(
                f"{place_of(keys, path)} is {described(found)}, and the step was"
                f" compiled for {described(wanted)}: make another step for these"
                " arguments."
            )


def place_of(keys: Keys, path: KeyPath) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{label(keys[path[0].idx])}{keystr(path[1:])}"
