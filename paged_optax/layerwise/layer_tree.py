"""The loss's own tree of parameters, beside the stacks that a step trains."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import optax
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure, fixed_variables
from paged_optax.backend.types import PyTreeDef
from paged_optax.state.leaves import is_quantized


class LayerNumbers(tuple[int, ...]):
    """The number of a leaf in each layer, or -1; to JAX a leaf, and no container."""

    __slots__ = ()

    @classmethod
    def of(cls, numbers: Sequence[int | None]) -> "LayerNumbers":
        """The numbers, with -1 for None."""
        return cls(-1 if n is None else n for n in numbers)


#: The leaves of an own tree that are one leaf of the stacked tree, by number: those of
#: all layers for a stack, else one.
Members = LayerNumbers | int


#: Combines the leaves of all layers; None stands for that of a layer that has none.
Together = Callable[[Sequence[PyTree | None]], PyTree]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stack"], meta_fields=["present"]
)
@dataclasses.dataclass(frozen=True)
class SomeLayers:
    """A stack of moments that only some layers have, as where others are frozen.

    Attributes:
      stack: The stack, with zeros for the other layers.
      present: For each layer whether it has the moment.
    """

    stack: PyTree
    present: tuple[bool, ...]


def is_stored(node: PyTree) -> bool:
    """Whether a node of a stacked state is one leaf of it, maybe of several arrays."""
    return is_quantized(node) or isinstance(node, SomeLayers)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTree:
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

    @functools.cached_property
    def _pure(self) -> PyTreeDef:
        numbers = range(self.structure.num_leaves)
        return jax.tree.structure(as_pure(self.structure.unflatten(numbers)))

    @property
    def length(self) -> int:
        """The number of layers."""
        members, _ = self.stacked
        return next(len(x) for x in members if isinstance(x, LayerNumbers))

    def stack(self, tree: PyTree, together: Together) -> PyTree:
        """Stacks the trees of the own structure within a tree, as a state's moments.

        Args:
          tree: The tree.
          together: Combines the leaves of all layers into one; None where a layer has
            none.

        Returns:
          The tree, in which stacked trees replace these.
        """

        def combine(entries: Sequence[PyTree]) -> PyTree:
            members, structure = self.stacked
            return structure.unflatten(
                entries[x] if isinstance(x, int) else self._joined(entries, x, together)
                for x in members
            )

        # A state may have variables of its own, unlike the parameters'.
        return _replace(as_pure(tree), self._pure, combine)

    def members_of(self, structure: PyTreeDef) -> list[Members]:
        """For each leaf of a stacked state the leaves of the own state.

        Args:
          structure: The structure of the own state.
        """
        numbers = structure.unflatten(range(structure.num_leaves))
        stacked = jax.tree.leaves(
            self.stack(numbers, LayerNumbers.of), is_leaf=is_stored
        )
        return [x.stack if isinstance(x, SomeLayers) else x for x in stacked]

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
                present = (True,) * len(member)
                if isinstance(entry, SomeLayers):
                    entry, present = entry.stack, entry.present
                arrays, inner = jax.tree.flatten(entry)
                by_layer = zip(*map(apart, arrays), strict=True) if arrays else ()
                layers = [inner.unflatten(x) for x in by_layer] or [entry] * len(member)
                for n, x, there in zip(member, layers, present, strict=True):
                    leaves[n] = x if there else optax.MaskedNode()
            return self.structure.unflatten(leaves)

        # Flax's variables hold what a codec stores one by one.
        return fixed_variables(_replace(tree, self.stacked[1], combine))

    def _joined(
        self,
        entries: Sequence[PyTree],
        members: LayerNumbers,
        together: Together,
    ) -> PyTree:
        layers = [entries[n] for n in members]
        present = tuple(not isinstance(x, optax.MaskedNode) for x in layers)
        if not any(present):
            return layers[0]
        structure = jax.tree.structure(layers[present.index(True)])
        leaves = [
            structure.flatten_up_to(x) if there else [None] * structure.num_leaves
            for x, there in zip(layers, present, strict=True)
        ]
        stack = structure.unflatten(map(together, zip(*leaves, strict=True)))
        return stack if all(present) else SomeLayers(stack, present)


def _replace(
    tree: PyTree,
    structure: PyTreeDef,
    combine: Callable[[Sequence[PyTree]], PyTree],
) -> PyTree:
    """Replaces each subtree of a structure by what `combine` makes of its leaves."""
    if is_stored(tree):
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
    leaf = isinstance(x, optax.MaskedNode) or is_stored(x)
    return leaf or jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
