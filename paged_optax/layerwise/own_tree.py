"""The loss's own tree of parameters, beside the stacks that a step trains."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import optax
from jaxtyping import PyTree

from paged_optax.backend.types import PyTreeDef
from paged_optax.state.leaves import is_quantized


class Layers(tuple[int, ...]):
    """The numbers of one leaf of all layers; to JAX a leaf, and no container."""

    __slots__ = ()


#: The leaves of an own tree that are one leaf of the stacked tree, by number: those of
#: all layers for a stack, else one.
Members = Layers | int


@dataclasses.dataclass(frozen=True, eq=False)
class OwnTree:
    """How the leaves of a tree of layers correspond to a tree of stacks.

    Attributes:
      structure: The structure of the own tree.
      members: The stacked tree: nested dicts whose leaves are `Members`.
    """

    structure: PyTreeDef
    members: PyTree

    @functools.cached_property
    def stacked(self) -> tuple[list[Members], PyTreeDef]:
        """The members of each stacked leaf, and the structure of the stacked tree."""
        return jax.tree.flatten(self.members)

    @property
    def length(self) -> int:
        """The number of layers."""
        members, _ = self.stacked
        return next(len(x) for x in members if isinstance(x, Layers))

    def stack(
        self, tree: PyTree, together: Callable[[Sequence[PyTree]], PyTree]
    ) -> PyTree:
        """Stacks every tree of the own structure within a tree, such as a state's moments.

        Args:
          tree: The tree.
          together: Combines the leaves of all layers into one.

        Returns:
          The tree, in which stacked trees replace these.

        Raises:
          ValueError: If a leaf is present for some layers only.
        """

        def combine(entries: Sequence[PyTree]) -> PyTree:
            members, structure = self.stacked
            return structure.unflatten(
                entries[x] if isinstance(x, int) else self._joined(entries, x, together)
                for x in members
            )

        return _replace(tree, self.structure, combine)

    def unstack(
        self, tree: PyTree, apart: Callable[[PyTree], Sequence[PyTree]]
    ) -> PyTree:
        """Undoes `stack`; `apart` gives the leaves of all layers of one stack."""

        def combine(entries: Sequence[PyTree]) -> PyTree:
            members, _ = self.stacked
            leaves: list[PyTree] = [None] * self.structure.num_leaves
            for member, entry in zip(members, entries, strict=True):
                if isinstance(member, int):
                    leaves[member] = entry
                    continue
                arrays, inner = jax.tree.flatten(entry)
                by_layer = zip(*map(apart, arrays), strict=True) if arrays else ()
                layers = [inner.unflatten(x) for x in by_layer] or [entry] * len(member)
                for n, x in zip(member, layers, strict=True):
                    leaves[n] = x
            return self.structure.unflatten(leaves)

        return _replace(tree, self.stacked[1], combine)

    def _joined(
        self,
        entries: Sequence[PyTree],
        members: Layers,
        together: Callable[[Sequence[PyTree]], PyTree],
    ) -> PyTree:
        layers = [entries[n] for n in members]
        structures = {jax.tree.structure(x) for x in layers}
        if len(structures) > 1:
            paths = jax.tree_util.tree_leaves_with_path(
                self.structure.unflatten(range(self.structure.num_leaves))
            )
            first, last = (
                jax.tree_util.keystr(paths[n][0]) for n in (members[0], members[-1])
            )
            raise ValueError(
                f"the state has moments of some of the layers {first} to {last} only:"
                " a mask or label differs between layers. Give all layers one label,"
                " and scale what is to stay by 0, as with optax.stateless."
            )
        return jax.tree.map(lambda *xs: together(xs), *layers)


def _replace(
    tree: PyTree,
    structure: PyTreeDef,
    combine: Callable[[Sequence[PyTree]], PyTree],
) -> PyTree:
    """Replaces each subtree of a structure by what `combine` makes of its leaves."""
    if is_quantized(tree):
        return tree
    try:
        entries = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        entries = None
    if entries is not None and all(map(_is_entry, entries)):
        return combine(entries)
    children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    if jax.tree_util.treedef_is_leaf(outer):
        return tree
    return outer.unflatten([_replace(x, structure, combine) for x in children])


def _is_entry(x: PyTree) -> bool:
    """Whether a node may be what a tree of moments has of one parameter."""
    leaf = isinstance(x, optax.MaskedNode) or is_quantized(x)
    return leaf or jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
