"""Parameters by path: `"blocks/0/attn/q/kernel"`, or JAX's key path.

A path that leads to a group of parameters names all of them; functions of one parameter
take it where the group has one member (Flax's `.../kernel/value`).
"""

import difflib
from collections.abc import Iterable

import jax
from jaxtyping import PyTree

from paged_optax.backend.given import refuse_no_arrays
from paged_optax.backend.key_paths import Path, name_of
from paged_optax.backend.types import ArrayOrShape
from paged_optax.state.leaves import StateLeaf, leaves_of


def named_by(path: Path, known: Iterable[str], where: str) -> list[str]:
    """The parameters that a path names: one, or a group."""
    wanted, known = name_of(path), list(dict.fromkeys(known))
    found = [
        name
        for name in known
        if name == wanted or not wanted or name.startswith(f"{wanted}/")
    ]
    if not found:
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or known[:3]
        raise ValueError(
            f"path={wanted!r}: {where} has no such parameter. Close names:"
            f" {', '.join(map(repr, close)) or 'none, it has no parameters'}."
        )
    return found


def the_one_named_by(path: Path, leaves: Iterable[StateLeaf]) -> str:
    """The one parameter that a path names."""
    names = [leaf.parameter for leaf in leaves if leaf.is_moment]
    found = named_by(path, names, "the state")
    if len(found) > 1:
        raise ValueError(
            f"path={name_of(path)!r} leads to {len(found)} parameters"
            f" ({', '.join(map(repr, found[:3]))}, ...): name one."
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
    fields = [leaf.field for _, leaf in own]
    return {
        leaf.field if fields.count(leaf.field) == 1 else f"{leaf.node}/{leaf.field}": (
            position,
            leaf,
        )
        for position, leaf in own
    }


def arrays_of(state: PyTree, path: Path | None) -> list[ArrayOrShape]:
    """The arrays of a parameter's moments, or of a group's; None: all arrays."""
    refuse_no_arrays("state", state)
    if path is None:
        return jax.tree.leaves(state)
    leaves = [leaf for leaf in leaves_of(state) if leaf.is_moment]
    inside = set(named_by(path, [leaf.parameter for leaf in leaves], "the state"))
    return jax.tree.leaves([x.value for x in leaves if x.parameter in inside])
