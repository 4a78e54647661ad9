"""Which layers are updated alike, read off a trace of the tree of all layers.

A layer's signature has the program of each of its leaves, and what that is given.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import trace
from paged_optax.analysis.per_leaf import CrossLeafError, analyse
from paged_optax.analysis.program import FILLS, Analysis, Constant, Program
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, is_traced
from paged_optax.engine.paged_array import Stored
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.programs import CrossLayerError
from paged_optax.transform.context import within
from paged_optax.transform.trees import parameter_of, paths_of

#: Leaves by the numbers of the stacked tree; None: zeros, whose update nobody takes.
Leaves = Sequence[Stored | None]


def tree_shapes(
    tree: LayerTree,
    stacked: Sequence[Array | jax.ShapeDtypeStruct],
    layers: Sequence[int | None] | None = None,
) -> PyTree:
    """The own tree of the shapes of stacked leaves.

    Args:
      tree: The own tree.
      stacked: The leaves.
      layers: The layers that the tree has; None: all.
    """
    members, _ = tree.stacked
    leaves: dict[int, PyTree] = {}
    for member, x in zip(members, stacked, strict=True):
        if isinstance(member, int):
            leaves[member] = jax.ShapeDtypeStruct(x.shape, x.dtype)
            continue
        shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for i, n in enumerate(member):
            there = layers is None or i in layers
            leaves[n] = shape if there else optax.MaskedNode()
    return tree.structure.unflatten([leaves[n] for n in range(len(leaves))])


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

    def __init__(self, tree: LayerTree, params: PyTree, state: PyTree):
        members, _ = tree.stacked
        stacks = [(n, x) for n, x in enumerate(members) if isinstance(x, LayerNumbers)]
        layers = {o: (n, layer) for n, x in stacks for layer, o in enumerate(x)}
        entries = tree.structure.flatten_up_to(params)
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
class TracedUpdates:
    """Traces a transformation in an own tree, as if nothing was paged.

    Attributes:
      tx: The transformation.
      tree: The own tree.
      numbers: What is computed for all leaves, numbered.
    """

    tx: optax.GradientTransformationExtraArgs
    tree: LayerTree
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
        roles = _Roles(self.tree, params, state)
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
        shared = analysis.shared.program
        inside = dict(enumerate(known[n] for n in analysis.shared.inputs))
        inner = lambda x: x if isinstance(x, Constant) else inside[x]
        for e in shared.equations:
            key = e.primitive, e.params, tuple(map(inner, e.inputs))
            number = self.numbers.setdefault(key, len(self.numbers))
            inside |= {x: (number, k) for k, x in enumerate(e.outputs)}
        pairs = zip(analysis.shared.outputs, shared.outputs, strict=True)
        known |= {number: inner(x) for number, x in pairs}
        signatures = _Signatures({}, [{} for _ in range(self.tree.length)])

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
        for output in analysis.tail.outputs:
            add(output, "cut from what is laid end to end")
        return signatures


def refuse_chunks(
    traced: TracedUpdates,
    whole: _Signatures,
    layered: LayeredState,
    gradients: Sequence[jax.ShapeDtypeStruct],
) -> None:
    """Refuses parameters outside the layers whose rows do not update alone."""
    tree, chunks = traced.tree, set(layered.chunked)
    chunk = lambda n, x: (
        jax.ShapeDtypeStruct((x.shape[0] // layered.length, *x.shape[1:]), x.dtype)
        if n in chunks
        else x
    )
    trees = [
        tree_shapes(tree, [chunk(n, x) for n, x in enumerate(leaves)])
        for leaves in (gradients, layered.params)
    ]
    members, _ = tree.stacked
    paths, _ = paths_of(tree_shapes(tree, layered.params))
    names = {
        keystr(paths[m])
        for n, m in enumerate(members)
        if n in chunks and isinstance(m, int)
    }
    made = [x for (*_, owner), x in whole.rest.items() if owner in names]
    by_rows = all(x.elementwise for x in made if isinstance(x, _Made))
    if not by_rows or traced.update(*trees).rest != whole.rest:
        raise ValueError("a parameter outside the layers is not updated row by row")


def alike(signatures: Sequence[object]) -> tuple[int, ...]:
    """Numbers that are equal where signatures are."""
    numbers: list[int] = []
    for i, signature in enumerate(signatures):
        same = (numbers[k] for k in range(i) if signatures[k] == signature)
        numbers.append(next(same, max(numbers, default=-1) + 1))
    return tuple(numbers)
