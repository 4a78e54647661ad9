"""Maps the loss's own tree of parameters to the stacks that a step trains."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure, fixed_variables
from paged_optax.backend.text import keystr
from paged_optax.backend.types import ArrayOrShape, KeyPath, PyTreeDef
from paged_optax.state.leaves import is_quantized


class LayerNumbers(tuple[int, ...]):
    """The number of a leaf in each layer, or -1. A pytree leaf, not a container."""

    __slots__ = ()


#: The own tree's leaves that form one leaf of the stacked tree, by number: one leaf of
#: each layer for a stack, a single leaf for any other parameter.
Members = LayerNumbers | int


#: Combines the leaves of all layers; None stands for a layer without the leaf.
Together = Callable[[Sequence[PyTree | None]], PyTree]

#: Converts a leaf that is no layer's, given its number in the own tree.
Each = Callable[[int, PyTree], PyTree]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stack"], meta_fields=["present"]
)
@dataclasses.dataclass(frozen=True)
class SomeLayers:
    """A stack of moments that only some layers have, for example unfrozen layers.

    Attributes:
      stack: The stack, with zeros for the other layers.
      present: For each layer, true if it has the moment.
    """

    stack: PyTree
    present: tuple[bool, ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stacked"], meta_fields=["masked"]
)
@dataclasses.dataclass(frozen=True)
class PrefixMasked:
    """Moments of a tree of which a mask leaves out subtrees, such as whole layers.

    Attributes:
      stacked: The stacked moments, with `optax.MaskedNode`s for these subtrees.
      masked: Their key paths in the own tree, where one `optax.MaskedNode` is.
    """

    stacked: PyTree
    masked: frozenset[str]


def is_stored(node: PyTree) -> bool:
    """True if a node of a stacked state is one leaf, possibly of several arrays."""
    return is_quantized(node) or isinstance(node, SomeLayers)


def stack_of(leaf: PyTree) -> PyTree:
    """The stack of a leaf of a stacked state."""
    return leaf.stack if isinstance(leaf, SomeLayers) else leaf


def with_stack(leaf: PyTree, stack: PyTree) -> PyTree:
    """A leaf of a stacked state, with another stack."""
    return SomeLayers(stack, leaf.present) if isinstance(leaf, SomeLayers) else stack


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTree:
    """The correspondence between a tree of layers and a tree of stacks."""

    structure: PyTreeDef  # of the own tree
    members: PyTree  # the stacked tree: nested dicts whose leaves are `Members`
    # Own leaves that are stacks of layers, on another axis than the first.
    moved: frozenset[int] = frozenset()

    @functools.cached_property
    def stacked(self) -> tuple[list[Members], PyTreeDef]:
        """The members of each stacked leaf, and the structure of the stacked tree."""
        return jax.tree.flatten(self.members)

    @property
    def length(self) -> int:
        """The number of layers; 0 if the own leaves are stacks."""
        members, _ = self.stacked
        return next((len(x) for x in members if isinstance(x, LayerNumbers)), 0)

    def stacked_leaves(self, params: PyTree) -> list[PyTree]:
        """Returns the leaves of stacked parameters.

        Raises:
          ValueError: If they are not stacked.
        """
        members, _ = self.stacked
        leaves = jax.tree.leaves(params)
        pairs = zip(leaves, members, strict=False)
        lengths = {x.shape[:1] for x, m in pairs if isinstance(m, LayerNumbers)}
        if len(leaves) != len(members) or lengths - {(self.length,)}:
            raise ValueError(
                f"params has {len(leaves)} arrays, and the stacks of {self.length}"
                f" layers are {len(members)}: pass model.stack(params), or the"
                " parameters that a step returned."
            )
        return leaves

    def shapes(
        self,
        stacked: Sequence[ArrayOrShape],
        layers: Collection[int | None] | None = None,
    ) -> PyTree:
        """The shapes of the own tree, with `optax.MaskedNode`s for other layers."""

        def of_layer(x: jax.ShapeDtypeStruct, i: int) -> PyTree:
            if layers is not None and i not in layers:
                return optax.MaskedNode()
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stacked]
        return self.structure.unflatten(tree_leaves(self.stacked[0], shapes, of_layer))

    def stack(
        self, tree: PyTree, together: Together, item: Each = lambda n, x: x
    ) -> PyTree:
        """Stacks all subtrees of the own structure, such as the moments of a state.

        Raises:
          ValueError: If there are arrays, and no such subtree.
        """

        def combine(entries: Sequence[PyTree], masked: frozenset[str]) -> PyTree:
            members, structure = self.stacked
            stacked = structure.unflatten(
                item(x, entries[x])
                if isinstance(x, int)
                else self._joined(entries, x, together)
                for x in members
            )
            return PrefixMasked(stacked, masked) if masked else stacked

        # A state may have Flax variables where the parameters have none.
        numbers = self.structure.unflatten(range(self.structure.num_leaves))
        pure = jax.tree.structure(as_pure(numbers))
        return _replace(
            as_pure(tree),
            pure,
            combine,
            "a tree of the structure of split_layers' parameters: pass a state of"
            " tx.init for these parameters, after a restore without a target by"
            " paged_optax.place_state(tx, state, params), and leave optax.flatten out"
            " of tx.",
        )

    def get_members(self, structure: PyTreeDef) -> list[Members]:
        """Returns, for each leaf of a stacked state, the leaves of the own state."""
        numbers = structure.unflatten(range(structure.num_leaves))
        join = lambda numbers: LayerNumbers(-1 if n is None else n for n in numbers)
        return list(
            map(stack_of, jax.tree.leaves(self.stack(numbers, join), is_leaf=is_stored))
        )

    def unstack(
        self,
        tree: PyTree,
        apart: Callable[[PyTree], Sequence[PyTree]],
        item: Each = lambda n, x: x,
    ) -> PyTree:
        """Undoes `stack`; `apart` returns the leaves of all layers of one stack.

        Raises:
          ValueError: If there are arrays, and no such stacks.
        """

        def combine(entries: Sequence[PyTree], masked: frozenset[str]) -> PyTree:
            members, _ = self.stacked
            leaves: list[PyTree] = [None] * self.structure.num_leaves
            for member, entry in zip(members, entries, strict=True):
                if isinstance(member, int):
                    leaves[member] = item(member, entry)
                    continue
                every = (True,) * len(member)
                present = entry.present if isinstance(entry, SomeLayers) else every
                arrays, inner = jax.tree.flatten(stack_of(entry))
                by_layer = zip(*map(apart, arrays), strict=True) if arrays else ()
                layers = [inner.unflatten(x) for x in by_layer] or [entry] * len(member)
                for n, x, there in zip(member, layers, present, strict=True):
                    leaves[n] = x if there else optax.MaskedNode()
            own = self.structure.unflatten(leaves)
            if not masked:
                return own
            is_masked = lambda path, x: keystr(path) in masked
            return jax.tree_util.tree_map_with_path(
                lambda path, x: optax.MaskedNode() if is_masked(path, x) else x,
                own,
                is_leaf=is_masked,
                is_leaf_takes_path=True,
            )

        own = _replace(
            tree,
            self.stacked[1],
            combine,
            "stacks of split_layers' parameters: pass a state of model.init, of"
            " model.stack_state or of a step, after a restore without a target by"
            " model.place_state(tx, state, params).",
        )
        # Flax's variables hold each array of an encoded moment separately.
        return fixed_variables(own)

    def _joined(
        self, entries: Sequence[PyTree], members: LayerNumbers, together: Together
    ) -> PyTree:
        layers = [entries[n] for n in members]
        present = tuple(not isinstance(x, optax.MaskedNode) for x in layers)
        if not any(present):
            return layers[0]
        first = present.index(True)
        dtypes = lambda tree: [
            str(x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")
        ]
        structure = jax.tree.structure(layers[first])
        leaves: list[list[PyTree]] = []
        for n, x in enumerate(layers):
            if not present[n]:
                leaves.append([None] * structure.num_leaves)
                continue
            if dtypes(x) != dtypes(layers[first]):
                raise ValueError(
                    f"a moment of layer {n} is stored as {', '.join(dtypes(x))}, and of"
                    f" layer {first} as {', '.join(dtypes(layers[first]))}. The layers'"
                    " moments are one stack: in codec= let a key match all layers, as"
                    " in 'layers/*/up'."
                )
            leaves.append(structure.flatten_up_to(x))
        stack = structure.unflatten(map(together, zip(*leaves, strict=True)))
        return stack if all(present) else SomeLayers(stack, present)


def _replace(
    tree: PyTree,
    structure: PyTreeDef,
    combine: Callable[[Sequence[PyTree], frozenset[str]], PyTree],
    wanted: str,
) -> PyTree:
    """Replaces each tree of moments by the combination of its entries.

    Raises:
      ValueError: If there are arrays, and no tree that is `wanted`.
    """
    numbers = structure.unflatten(range(structure.num_leaves))
    is_leaf = lambda x: jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
    is_masked = lambda x: isinstance(x, optax.MaskedNode)

    def entries(node: PyTree) -> tuple[list[PyTree], frozenset[str]] | None:
        """One for each leaf of the structure, and the paths of masked subtrees."""
        found: list[PyTree] = []
        masked: set[str] = set()

        def add(path: KeyPath, x: PyTree, below: PyTree) -> None:
            if not is_leaf(below):
                if not (path and is_masked(x)):
                    raise ValueError("an array for several parameters")
                masked.add(keystr(path))
            found.extend([x] * len(jax.tree.leaves(below)))

        is_entry = lambda x: is_masked(x) or is_stored(x)
        try:
            if isinstance(node, PrefixMasked):
                return structure.flatten_up_to(node.stacked), node.masked
            jax.tree_util.tree_map_with_path(add, node, numbers, is_leaf=is_entry)
        except (TypeError, ValueError):
            return None
        return found, frozenset(masked)

    stop = lambda node: is_stored(node) or entries(node) is not None
    nodes, outer = jax.tree.flatten(tree, is_leaf=stop)
    found = [None if is_stored(node) else entries(node) for node in nodes]
    arrays = any(getattr(x, "shape", ()) for x in jax.tree.leaves(tree))
    if arrays and not any(x is not None for x in found):
        raise ValueError(f"the state has no moments in {wanted}")
    pairs = zip(nodes, found, strict=True)
    return outer.unflatten([x if y is None else combine(*y) for x, y in pairs])


def tree_leaves(
    members: Sequence[Members],
    leaves: Sequence[PyTree],
    of_layer: Callable[[PyTree, int], PyTree],
) -> list[PyTree]:
    """Lists an own tree's leaves; `of_layer(x, i)` returns layer i of a stack."""
    by_number: dict[int, PyTree] = {}
    for member, x in zip(members, leaves, strict=True):
        if isinstance(member, int):
            by_number[member] = x
        else:
            layers = enumerate(member)
            by_number |= {n: of_layer(x, i) for i, n in layers if n >= 0}
    return [by_number[n] for n in range(len(by_number))]


def stacked_shape(
    layers: Sequence[jax.ShapeDtypeStruct | None],
) -> jax.ShapeDtypeStruct:
    """The shape of a stack of these leaves. Its leading axis is not divided."""
    first = next(x for x in layers if x is not None)
    sharding = first.sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(None, *sharding.spec))
    shape = len(layers), *first.shape
    return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)
