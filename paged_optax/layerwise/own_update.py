"""One layer's update, as `tx.update` computes it in the loss's own tree.

`tx.update` runs on the own tree with one layer's parameters, gradients and moments in
the place of a layer that is updated alike. All other leaves are zeros, whose updates
are dead code. Masks, labels, norms and factors are then those of Optax on that tree.

Which layers are updated alike is read off a trace of the whole own tree: each leaf's
program, and what it is given.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import trace
from paged_optax.analysis.per_leaf import CrossLeafError, analyse
from paged_optax.analysis.program import FILLS, Analysis, Constant, Program
from paged_optax.backend.memory import PINNED_HOST, on_host, typed_by_memory
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, PyTreeDef, is_traced
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.own_tree import Layers, Members, OwnTree
from paged_optax.layerwise.programs import CrossLayerError
from paged_optax.layerwise.slabs import LayerIndex
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import within
from paged_optax.transform.trees import parameter_of, paths_of

#: Leaves by the numbers of the stacked tree; None: zeros, whose update nobody takes.
Leaves = Sequence[Stored | None]

Value = TypeVar("Value")

#: New parameters, and new leaves of the state, None where they were not given. Those
#: that were given are arrays: a caller reads no others.
Updated = tuple[list[Any], list[Any]]

#: Applies updates to parameters.
Add = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnUpdate:
    """The update of one layer, and of what is outside the layers.

    Attributes:
      tx: The transformation.
      own: The loss's own tree.
      layered: The parameters and the state, stacked.
      state_structure: The structure of the own state.
      state_members: For each leaf of the stacked state those of the own state.
      kinds: For each layer the number of its kind, of layers that are updated alike.
      pruned: Whether a layer is updated alike in a tree that has no other layers: they
        are `optax.MaskedNode`s, and take no time to trace.
    """

    tx: optax.GradientTransformationExtraArgs
    own: OwnTree
    layered: LayeredState
    state_structure: PyTreeDef
    state_members: Sequence[Members]
    kinds: tuple[int, ...]
    pruned: bool

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        own: OwnTree,
        layered: LayeredState,
        dtypes: Sequence[np.dtype],
    ) -> "OwnUpdate":
        """Traces the update.

        Args:
          tx: The transformation.
          own: The loss's own tree.
          layered: The parameters and the state, stacked.
          dtypes: For each parameter the dtype of its gradient.
        """
        params = own_shapes(own, layered.params)
        members, structure = own_state(tx, own, params)
        gradients = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(layered.params, dtypes, strict=True)
        ]
        traced = _Traced(tx, own, {})
        whole = traced.update(own_shapes(own, gradients), params)
        kinds = _alike(whole.layers)
        firsts = [None, *map(kinds.index, range(max(kinds) + 1))]
        # Zeros of other layers take time to trace.
        try:
            pruned = all(
                whole.agrees(
                    traced.update(
                        own_shapes(own, gradients, (k,)),
                        own_shapes(own, layered.params, (k,)),
                    ),
                    k,
                )
                for k in firsts
            )
        except Exception:  # `tx` has a tree of its own, of all layers
            pruned = False
        if layered.chunked:
            _refuse_chunks(traced, whole, layered, gradients)
        return cls(tx, own, layered, structure, members, kinds, pruned)

    @functools.cached_property
    def by_kind(self) -> list[list[int]]:
        """The layers of each kind."""
        return [
            [i for i, kind in enumerate(self.kinds) if kind == k]
            for k in range(max(self.kinds) + 1)
        ]

    def layer(
        self,
        i: LayerIndex,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
    ) -> Updated:
        """Updates layer i.

        Args:
          i: The layer.
          updates: The gradients, those of the layer with a leading axis of 1.
          state: The leaves of the state, those of the layer likewise.
          params: The parameters, likewise.

        Returns:
          The parameters, and the leaves of the state; None where they were not given.
        """
        runs = [functools.partial(self._as_layer, layers[0]) for layers in self.by_kind]
        if len(runs) == 1:
            return runs[0](i, updates, state, params)
        if isinstance(i, int | np.integer):
            return runs[self.kinds[i]](i, updates, state, params)
        which = jnp.asarray(np.asarray(self.kinds, np.int32))[i]
        return lax.switch(which, runs, i, updates, state, params)

    def rest(
        self,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        """Updates what is outside the layers, and whole stacks of small leaves.

        Args:
          updates: The gradients, those of stacks with all layers.
          state: The leaves of the state, those of stacks likewise.
          params: The parameters, likewise.
          add: Applies updates outside the layers.

        Returns:
          As `layer` does.
        """
        members, _ = self.own.stacked
        apart = lambda stacks: (
            only(updates, members, stacks),
            only(state, self.state_members, stacks),
            only(params, members, stacks),
        )
        new_params, new_state = self._updated(None, None, *apart(False), add=add)
        if all(x is None for x in apart(True)[2]):
            return new_params, new_state
        of_stacks = [self._of_kind(layers, *apart(True)) for layers in self.by_kind]
        order = np.argsort(np.concatenate(self.by_kind))
        joined = of_stacks[0]
        if len(of_stacks) > 1:
            join = lambda *xs: jnp.concatenate(xs)[order]
            joined = jax.tree.map(join, *of_stacks)
        return _merged(new_params, joined[0]), _merged(new_state, joined[1])

    def _shared(self, state: Leaves) -> list[Stored | None]:
        """The leaves of a state that belong to no parameter."""
        owners = zip(state, self.layered.owners, strict=True)
        return [x if owner is None else None for x, owner in owners]

    def _of_kind(
        self, layers: Sequence[int], updates: Leaves, state: Leaves, params: Leaves
    ) -> Updated:
        """Updates layers of one kind, all at once."""
        numbers = np.asarray(layers, np.int32)
        # Counts and rates belong to no layer.
        shared = self._shared(self.layered.state)
        trees = list(updates), list(state), list(params)
        if len(layers) < self.layered.length:
            trees = jax.tree.map(lambda x: x[numbers], trees)
        run = functools.partial(self._as_layer, layers[0])

        def one(i: Array, trees: PyTree) -> PyTree:
            updates, state, params = jax.tree.map(lambda x: x[None], trees)
            new_params, new_state = run(i, updates, _merged(state, shared), params)
            # Nobody takes what becomes of what is shared.
            new = new_params, only(new_state, self.state_members, True)
            return jax.tree.map(lambda x: x[0], new)

        return jax.vmap(one)(jnp.asarray(numbers), trees)

    def _as_layer(
        self,
        place: int,
        i: LayerIndex,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
    ) -> Updated:
        """Updates layer i in the place of layer `place`."""
        return self._updated(place, i, updates, state, params)

    def _updated(
        self,
        place: int | None,
        i: LayerIndex | None,
        updates: Leaves,
        state: Leaves,
        params: Leaves,
        add: Add = optax.apply_updates,
    ) -> Updated:
        members, _ = self.own.stacked
        zeros = _Zeros()
        fill = functools.partial(_placed, place, zeros, self.pruned)
        layered, structure = self.layered, self.own.structure
        own_params = fill(members, params, layered.params)
        arguments = (
            structure.unflatten(fill(members, updates, layered.params)),
            self.state_structure.unflatten(
                fill(self.state_members, state, layered.state)
            ),
            structure.unflatten(own_params),
        )
        with within(layer=i):
            changes, new_state = self.tx.update(*arguments)
        own_changes = structure.flatten_up_to(changes)
        new_leaves = self.state_structure.flatten_up_to(new_state)
        in_place = lambda m: m if isinstance(m, int) else m[place or 0]
        of_state = lambda m, x: (
            # A layer of this kind has no such moment.
            x if in_place(m) < 0 else as_stack(m, new_leaves[in_place(m)])
        )
        as_stack = lambda m, x: (
            x if isinstance(m, int) else jax.tree.map(lambda x: x[None], x)
        )

        def new_param(m: Members, x: Stored | None) -> Array | None:
            if x is None:
                return None
            old, change = own_params[in_place(m)], own_changes[in_place(m)]
            return as_stack(m, add([old], [change])[0])

        return (
            [new_param(m, x) for m, x in zip(members, params, strict=True)],
            [
                None if x is None else of_state(m, x)
                for m, x in zip(self.state_members, state, strict=True)
            ],
        )


def only(
    leaves: Leaves, members: Sequence[Members], stacks: bool
) -> list[Stored | None]:
    """The leaves that are stacks of layers, or the others."""
    pairs = zip(leaves, members, strict=True)
    return [x if isinstance(m, Layers) == stacks else None for x, m in pairs]


def _merged(
    leaves: Sequence[Value | None], others: Sequence[Value | None]
) -> list[Value | None]:
    pairs = zip(leaves, others, strict=True)
    return [y if x is None else x for x, y in pairs]


class _Zeros(dict[Hashable, Array]):
    """Zeros by shape and dtype: each are made once."""

    def __missing__(self, key: tuple[tuple[int, ...], np.dtype]) -> Array:
        self[key] = jnp.zeros(*key)
        return self[key]


def _placed(
    place: int | None,
    zeros: _Zeros,
    pruned: bool,
    members: Sequence[Members],
    leaves: Leaves,
    like: Sequence[Stored],
) -> list[Stored]:
    """The own tree's leaves, one layer's in the place of layer `place`."""
    of_own: dict[int, Stored] = {}
    for member, x, old in zip(members, leaves, like, strict=True):
        if isinstance(member, int):
            blank = jax.tree.map(lambda x: zeros[x.shape, x.dtype], old)
            of_own[member] = blank if x is None else x
            continue
        blank: PyTree = optax.MaskedNode()
        if not pruned:
            blank = jax.tree.map(lambda x: zeros[x.shape[1:], x.dtype], old)
        of_own |= {n: blank for n in member if n >= 0}
        if x is not None and place is not None and member[place] >= 0:
            of_own[member[place]] = jax.tree.map(lambda x: x[0], x)
    return [of_own[n] for n in range(len(of_own))]


def own_shapes(
    own: OwnTree,
    stacked: Sequence[Array | jax.ShapeDtypeStruct],
    layers: Sequence[int | None] | None = None,
) -> PyTree:
    """The own tree of the shapes of stacked leaves.

    Args:
      own: The own tree.
      stacked: The leaves.
      layers: The layers that the tree has; None: all.
    """
    members, _ = own.stacked
    leaves: dict[int, PyTree] = {}
    for member, x in zip(members, stacked, strict=True):
        if isinstance(member, int):
            leaves[member] = jax.ShapeDtypeStruct(x.shape, x.dtype)
            continue
        shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for i, n in enumerate(member):
            there = layers is None or i in layers
            leaves[n] = shape if there else optax.MaskedNode()
    return own.structure.unflatten([leaves[n] for n in range(len(leaves))])


def stacked_shape(layers: Sequence[Array | None]) -> jax.ShapeDtypeStruct:
    """The shape of a stack of these leaves."""
    first = next(x for x in layers if x is not None)
    return jax.ShapeDtypeStruct((len(layers), *first.shape), first.dtype)


def one_layer(own: OwnTree, tree: PyTree) -> PyTree:
    """The own tree of stacks whose layers are all like the first; types alone."""

    def apart(stack: Array) -> list[jax.ShapeDtypeStruct]:
        kind = jax.typeof(stack)
        layer = jax.ShapeDtypeStruct(kind.shape[1:], kind.dtype)
        if on_host(stack):
            place = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED_HOST)
            layer = jax.ShapeDtypeStruct(
                layer.shape, layer.dtype, sharding=typed_by_memory(place)
            )
        return [layer] * own.length

    return own.unstack(tree, apart)


def own_state(
    tx: optax.GradientTransformation, own: OwnTree, params: PyTree
) -> tuple[list[Members], PyTreeDef]:
    """For each leaf of a stacked state those of the own state, and its structure."""
    with within(types_only=True):
        state = jax.eval_shape(lambda params: tx.init(params), params)
    structure = jax.tree.structure(state, is_leaf=is_quantized)
    return own.members_of(structure), structure


#: What a leaf is: its kind, its node, and its parameter.
_Name = tuple[str, str, Hashable]

#: A name that is the same in all layers, and the layer; None: no layer.
_Role = tuple[_Name, int | None]


class _Signatures(NamedTuple):
    """What makes the results of a traced function, by the results' roles.

    Attributes:
      rest: Those of no layer.
      layers: Those of each layer.
    """

    rest: dict[_Name, object]
    layers: list[dict[_Name, object]]

    def agrees(self, other: "_Signatures", layer: int | None) -> bool:
        """Whether another has the same of one layer, and of what is in no layer."""
        one = layer is None or self.layers[layer] == other.layers[layer]
        return one and self.rest == other.rest


class _Made(NamedTuple):
    """What makes a leaf.

    Attributes:
      elementwise: Whether each element is made of the same element of the inputs.
      equations: What is computed. Shapes that arrays are filled to do not count.
      inputs: What it is given.
      result: Which of the results the leaf is.
    """

    elementwise: bool
    equations: object
    inputs: object
    result: int


def _equations(program: Program) -> tuple[object, ...]:
    params = lambda e: () if e.primitive.name in FILLS else e.params
    each = [(e.primitive, params(e), e.inputs, e.outputs) for e in program.equations]
    return tuple(each), program.outputs


class _Roles:
    """Whose each leaf is of a tree of parameters, and of a state of theirs.

    Attributes:
      paths: The parameters' paths.
      owners: For each leaf of the state the number of its parameter, or None.
      of_state: The roles of the leaves of the state.
    """

    def __init__(self, own: OwnTree, params: PyTree, state: PyTree):
        members, _ = own.stacked
        stacks = [(n, x) for n, x in enumerate(members) if isinstance(x, Layers)]
        layers = {o: (n, layer) for n, x in stacks for layer, o in enumerate(x)}
        entries = own.structure.flatten_up_to(params)
        there = [n for n, x in enumerate(entries) if jax.tree.leaves(x)]
        self._layers = {k: layers[n] for k, n in enumerate(there) if n in layers}
        self.paths, _ = paths_of(params)
        state_paths, _ = paths_of(state)
        self.owners = parameter_of(state_paths, self.paths)
        pairs = zip(state_paths, self.owners, strict=True)
        self.of_state = [self._role("state", *pair) for pair in pairs]

    def of_parameters(self, kind: str) -> list[_Role]:
        """The roles of the parameters, or of their updates."""
        return [self._role(kind, path, n) for n, path in enumerate(self.paths)]

    def _role(self, kind: str, path: KeyPath, owner: int | None) -> _Role:
        if owner is None:
            return (kind, keystr(path), None), None
        node = path[: len(path) - len(self.paths[owner])]
        number, layer = self._layers.get(owner, (keystr(self.paths[owner]), None))
        return (kind, keystr(node), number), layer


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Traces a transformation in an own tree, as if nothing was paged.

    Attributes:
      tx: The transformation.
      own: The own tree.
      numbers: What is computed for all leaves, numbered.
    """

    tx: optax.GradientTransformationExtraArgs
    own: OwnTree
    numbers: dict[Hashable, int]

    def update(self, gradients: PyTree, params: PyTree) -> _Signatures:
        """What makes the results of an update.

        Raises:
          ValueError: If the update of a leaf depends on the gradients of another one.
        """
        with within(plain=True):
            state = jax.eval_shape(lambda params: self.tx.init(params), params)
            update = lambda *arguments: self.tx.update(*arguments)
            closed, _ = trace(update, gradients, state, params)
        roles = _Roles(self.own, params, state)
        numbers = range(len(roles.paths))
        try:
            analysis, constants = analyse(
                closed,
                [*numbers, *[None] * len(roles.owners), *numbers],
                [*numbers, *roles.owners],
                lambda n: f"parameter {keystr(roles.paths[n])}",
                range(len(closed.out_avals)),
            )
        except CrossLeafError as error:
            raise CrossLayerError(*error.args) from None
        # A new state has the paths of the old one.
        results = [*roles.of_parameters("update"), *roles.of_state]
        arguments = [*results, *roles.of_parameters("parameter")]
        return self._signatures(analysis, constants, arguments, results)

    def _signatures(
        self,
        analysis: Analysis,
        constants: Mapping[int, ArrayLike],
        arguments: Sequence[_Role],
        results: Sequence[_Role],
    ) -> _Signatures:
        known: dict[int, object] = {n: role for n, (role, _) in enumerate(arguments)}
        for number, value in constants.items():
            concrete = not is_traced(value)
            known[number] = (
                (np.shape(value), np.asarray(value).tobytes())
                if concrete
                else id(value)
            )
        described = lambda x: x if isinstance(x, Constant) else known[x]
        shared = analysis.shared
        inside = dict(enumerate(known[n] for n in analysis.shared_inputs))
        inner = lambda x: x if isinstance(x, Constant) else inside[x]
        for e in shared.equations:
            key = e.primitive, e.params, tuple(map(inner, e.inputs))
            number = self.numbers.setdefault(key, len(self.numbers))
            inside |= {x: (number, k) for k, x in enumerate(e.outputs)}
        pairs = zip(analysis.shared_outputs, shared.outputs, strict=True)
        known |= {number: inner(x) for number, x in pairs}
        signatures = _Signatures({}, [{} for _ in range(self.own.length)])

        def add(output: int, what: object) -> None:
            key, layer = results[output]
            to = signatures.rest if layer is None else signatures.layers[layer]
            to[key] = what

        for output, operand in analysis.direct:
            add(output, described(operand))
        for leaf in analysis.leaf_updates:
            # What is between is computed of all parameters, laid end to end.
            inputs = None if leaf.between else [described(x) for x in leaf.inputs]
            program = leaf.program
            made = _Made(program.elementwise, _equations(program), inputs, 0)
            for k, output in enumerate(leaf.outputs):
                add(output, made._replace(result=k))
        for output in analysis.tail_outputs:
            add(output, "cut from what is laid end to end")
        return signatures


def _refuse_chunks(
    traced: _Traced,
    whole: _Signatures,
    layered: LayeredState,
    gradients: Sequence[jax.ShapeDtypeStruct],
) -> None:
    """Refuses parameters outside the layers whose rows do not update alone."""
    own, chunks = traced.own, set(layered.chunked)
    chunk = lambda n, x: (
        jax.ShapeDtypeStruct((x.shape[0] // layered.length, *x.shape[1:]), x.dtype)
        if n in chunks
        else x
    )
    trees = [
        own_shapes(own, [chunk(n, x) for n, x in enumerate(leaves)])
        for leaves in (gradients, layered.params)
    ]
    members, _ = own.stacked
    paths, _ = paths_of(own_shapes(own, layered.params))
    names = {
        keystr(paths[m])
        for n, m in enumerate(members)
        if n in chunks and isinstance(m, int)
    }
    made = [x for (*_, owner), x in whole.rest.items() if owner in names]
    by_rows = all(x.elementwise for x in made if isinstance(x, _Made))
    if not by_rows or traced.update(*trees).rest != whole.rest:
        raise ValueError("a parameter outside the layers is not updated row by row")


def _alike(signatures: Sequence[object]) -> tuple[int, ...]:
    """Numbers that are equal where signatures are."""
    numbers: list[int] = []
    for i, signature in enumerate(signatures):
        same = (numbers[k] for k in range(i) if signatures[k] == signature)
        numbers.append(next(same, max(numbers, default=-1) + 1))
    return tuple(numbers)
