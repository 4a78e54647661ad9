"""JAX's key paths as text: as code in messages, as names where users write them."""

import fnmatch
from collections.abc import Iterable

import jax

from paged_optax.backend.types import KeyPath

#: A path string, or a JAX key path.
Path = str | KeyPath


def keystr(path: KeyPath) -> str:
    """A key path as Python would write it.

    Example:
      >>> keystr((jax.tree_util.DictKey("block"), jax.tree_util.SequenceKey(0)))
      "['block'][0]"
    """
    return jax.tree_util.keystr(path)


def slashed(path: KeyPath) -> str:
    """A key path as a name.

    Example:
      >>> slashed((jax.tree_util.DictKey("block"), jax.tree_util.SequenceKey(0)))
      'block/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def names_of(path: KeyPath) -> tuple[str, ...]:
    """The names of a path's keys, one by one.

    They tell what a path leads to, whatever containers it leads through. Joined to a
    text they would not: of `{"a/b": ..., "a": {"b": ...}}` both are `"a/b"`.

    Example:
      >>> names_of((jax.tree_util.DictKey("a/b"), jax.tree_util.SequenceKey(0)))
      ('a/b', '0')
    """
    return tuple(slashed((key,)) for key in path)


def name_of(path: Path) -> str:
    """A path as users write it, in messages."""
    return path if isinstance(path, str) else slashed(path)


def chosen(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a pattern chooses.

    A name chooses itself, and nothing else, whatever characters it has.

    Example:
      >>> sorted(chosen("w[0]", ["w0", "w[0]"])), sorted(chosen("w[0]", ["w0", "w1"]))
      (['w[0]'], ['w0'])
    """
    names = set(names)
    if pattern in names:
        return {pattern}
    return {name for name in names if fnmatch.fnmatchcase(name, pattern)}
