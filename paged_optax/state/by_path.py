"""Parameters by path: `"blocks/0/attn/q/kernel"`, or JAX's key path.

A path that leads to a group of parameters names all of them; functions of one parameter
take it where the group has one member (Flax's `.../kernel/value`).

A string is the keys joined by `/`. Keys may have a `/` themselves, so that a string may
name several parameters or groups: then it is refused, and only a key path tells them
apart. A `/` at its ends is ignored if no key begins or ends so.
"""

import difflib
from collections.abc import Iterable

import jax
from jaxtyping import PyTree

from paged_optax.backend.text import key_names, keystr, path_name
from paged_optax.backend.types import ArrayOrShape, KeyPath, Path
from paged_optax.backend.validation import check_arrays
from paged_optax.state.leaves import StateLeaf, leaves_of


class Parameters:
    """Parameters, to be found by paths."""

    def __init__(self, known: Iterable[KeyPath], where: str):
        """Takes their paths; `where` is what has them, for messages."""
        self.where = where
        self.names: dict[KeyPath, str] = {}
        self.groups: dict[tuple[str, ...], list[KeyPath]] = {}
        self.joined: dict[str, set[tuple[str, ...]]] = {}
        for path in dict.fromkeys(known):
            self.names[path] = path_name(path)
            for n in range(len(path) + 1):
                self.groups.setdefault(key_names(path[:n]), []).append(path)
                self.joined.setdefault(path_name(path[:n]), set()).add(
                    key_names(path[:n])
                )

    def named_by(self, path: Path) -> list[KeyPath]:
        """Those that a path names: one, or a group."""
        if isinstance(path, tuple):
            found = self.groups.get(key_names(path), [])
        elif isinstance(path, str):
            found = self._named_by_text(path)
        else:
            raise TypeError(
                f"path={path!r} is no path: pass one such as 'blocks/0/kernel', or"
                " JAX's keys."
            )
        if found:
            return found
        wanted, names = path_name(path), list(self.names.values())
        close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"path={wanted!r}: {self.where} has no such parameter. Close names:"
            f" {', '.join(map(repr, close)) or 'none, it has no parameters'}."
        )

    def _named_by_text(self, text: str) -> list[KeyPath]:
        for each in (text, text.strip("/")):
            groups = {
                tuple(self.groups[keys]): str(self.groups[keys][0][: len(keys)])
                for keys in self.joined.get(each, ())
            }
            if len(groups) > 1:
                raise ValueError(
                    f"path={text!r} names {len(groups)} parameters or groups, whose"
                    " keys joined by '/' are equal: pass the keys of one as JAX has"
                    f" them, {' or '.join(sorted(groups.values()))}, where DictKey"
                    " and its like are those of jax.tree_util."
                )
            for group in groups:
                return list(group)
        # A group whose names were joined before, as by Flax's `flatten_dict`.
        begins = tuple({f"{text}/", f"{text.strip('/')}/"})
        return [path for path, name in self.names.items() if name.startswith(begins)]


def the_one_named_by(path: Path, leaves: Iterable[StateLeaf]) -> KeyPath:
    """The one parameter that a path names."""
    paths = [leaf.parameter for leaf in leaves if leaf.is_moment]
    found = Parameters(paths, "the state").named_by(path)
    if len(found) > 1:
        names = [path_name(each) for each in found]
        shown = [
            repr(name) if names.count(name) == 1 else str(each)
            for name, each in zip(names, found, strict=True)
        ]
        more = ["..."] if len(found) > 3 else []
        raise ValueError(
            f"path={path_name(path).strip('/')!r} leads to {len(found)} parameters"
            f" ({', '.join(shown[:3] + more)}): name one."
        )
    return found[0]


def moments_of(state: PyTree, path: Path) -> dict[str, tuple[int, StateLeaf]]:
    """One parameter's moments by name, with their positions in the state."""
    leaves = leaves_of(state)
    parameter = the_one_named_by(path, leaves)
    own = [
        (position, leaf)
        for position, leaf in enumerate(leaves)
        if leaf.is_moment and leaf.parameter == parameter
    ]
    names = [leaf.field for _, leaf in own]
    for spelled in (path_name, keystr):
        names = [
            name if names.count(name) == 1 else f"{spelled(leaf.node)}/{leaf.field}"
            for name, (_, leaf) in zip(names, own, strict=True)
        ]
    return dict(zip(names, own, strict=True))


def arrays_of(state: PyTree, path: Path | None) -> list[ArrayOrShape]:
    """The arrays of a parameter's moments, or of a group's; None: all arrays."""
    check_arrays("state", state)
    if path is None:
        return jax.tree.leaves(state)
    leaves = [leaf for leaf in leaves_of(state) if leaf.is_moment]
    inside = within(path, leaves)
    return jax.tree.leaves([x.value for x in leaves if x.parameter in inside])


def within(path: Path, leaves: Iterable[StateLeaf]) -> set[KeyPath]:
    """The parameters, of those that have moments, that a path names."""
    paths = [leaf.parameter for leaf in leaves if leaf.is_moment]
    return set(Parameters(paths, "the state").named_by(path))
