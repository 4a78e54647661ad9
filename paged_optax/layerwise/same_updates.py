"""Finds layers with the same update, in a trace of the tree of all layers.

A layer's signature has the program of each of its leaves, and the program's inputs.
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
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
from paged_optax.backend.text import dtype_and_shape, keystr
from paged_optax.backend.types import KeyPath, is_traced
from paged_optax.layerwise.layer_tree import LayerNumbers, LayerTree, tree_leaves
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.transform.context import within
from paged_optax.transform.trees import leaf_paths, parameter_of


class CrossLayerError(CrossLeafError):
    """Raised if `tx` mixes several parameters."""

    def __str__(self) -> str:
        return (
            f"layerwise_step updates each layer alone, and in tx {self.args[0]}: leave"
            " that out of tx. max_norm= clips by the global norm, and accumulate=True"
            " adds up micro-batches. Wrappers that skip steps, as MultiSteps and"
            " apply_if_finite do, need all gradients first; paged_optax.apply_if_finite"
            " may be around the whole of tx."
        )


def tree_shapes(
    tree: LayerTree,
    stacked: Sequence[Array | jax.ShapeDtypeStruct],
    layers: Sequence[int | None] | None = None,
) -> PyTree:
    """Returns the shapes of the own tree."""

    def of_layer(x: jax.ShapeDtypeStruct, i: int) -> PyTree:
        if layers is not None and i not in layers:
            return optax.MaskedNode()
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stacked]
    return tree.structure.unflatten(tree_leaves(tree.stacked[0], shapes, of_layer))


_WAY_OUT = (
    "If a mask or labels are computed from shapes, give the mask as it is, a tree of"
    " bools, and labels as a tree of strings."
)

#: A leaf's kind, its node, and its parameter: the same in all layers.
_Name = tuple[str, str, Hashable]

#: A leaf's name and layer; None outside the layers.
_Role = tuple[_Name, int | None]


class Signatures(NamedTuple):
    """The computations of a traced function's results, by name.

    Attributes:
      rest: The results outside the layers.
      layers: The results of each layer.
      state: The types of the leaves of the state.
    """

    rest: dict[_Name, object]
    layers: list[dict[_Name, object]]
    state: list[str]

    def agrees(self, other: "Signatures", layer: int | None) -> bool:
        """True if one layer's computations, and the rest's, equal another's."""
        one = layer is None or self.layers[layer] == other.layers[layer]
        return one and self.rest == other.rest


class _Computation(NamedTuple):
    """The computation of one result, without the shapes of filled arrays."""

    elementwise: bool
    eqns: object
    inputs: object
    result: int


def _equations(program: Program) -> tuple[object, ...]:
    params = lambda e: () if e.primitive.name in FILLS else e.params
    eqns = [(e.primitive, params(e), e.inputs, e.outputs) for e in program.eqns]
    return tuple(eqns), program.outputs


class Roles:
    """Names and layers of the leaves of parameters and of a state.

    Attributes:
      paths: The parameters' paths.
      param_indices: For each leaf of the state, the number of its parameter, or None.
      of_state: The roles of the leaves of the state.
    """

    def __init__(self, tree: LayerTree, params: PyTree, state: PyTree):
        members, _ = tree.stacked
        stacks = [(n, x) for n, x in enumerate(members) if isinstance(x, LayerNumbers)]
        layers = {o: (n, layer) for n, x in stacks for layer, o in enumerate(x)}
        entries = tree.structure.flatten_up_to(params)
        there = [n for n, x in enumerate(entries) if jax.tree.leaves(x)]
        self._layers = {k: layers[n] for k, n in enumerate(there) if n in layers}
        self.paths, _ = leaf_paths(params)
        state_paths, _ = leaf_paths(state)
        self.param_indices = parameter_of(state_paths, self.paths)
        pairs = zip(state_paths, self.param_indices, strict=True)
        self.of_state = [self._role("state", *pair) for pair in pairs]

    def of_parameters(self, kind: str) -> list[_Role]:
        """The roles of the parameters, or of their updates."""
        return [self._role(kind, path, n) for n, path in enumerate(self.paths)]

    def _role(self, kind: str, path: KeyPath, param_index: int | None) -> _Role:
        if param_index is None:
            return (kind, keystr(path), None), None
        node = path[: len(path) - len(self.paths[param_index])]
        index, layer = self._layers.get(
            param_index, (keystr(self.paths[param_index]), None)
        )
        return (kind, keystr(node), index), layer


@dataclasses.dataclass(frozen=True)
class TracedUpdates:
    """Traces a transformation in an own tree, without paging.

    Attributes:
      tx: The transformation.
      tree: The own tree.
      numbers: Numbers of the computations that all leaves share.
    """

    tx: optax.GradientTransformationExtraArgs
    tree: LayerTree
    numbers: dict[Hashable, int]

    def update(self, gradients: PyTree, params: PyTree) -> Signatures:
        """Traces an update, and returns its signatures.

        Raises:
          ValueError: If the update of a leaf depends on another leaf's gradient.
        """
        with within(plain=True):
            state = jax.eval_shape(lambda params: self.tx.init(params), params)
            update = lambda *args: self.tx.update(*args)
            closed, _ = trace(update, gradients, state, params)
        roles = Roles(self.tree, params, state)
        numbers = range(len(roles.paths))
        try:
            analysis, constants = analyse(
                closed,
                [*numbers, *[None] * len(roles.param_indices), *numbers],
                [*numbers, *roles.param_indices],
                lambda n: f"parameter {keystr(roles.paths[n])}",
                range(len(closed.out_avals)),
            )
        except CrossLeafError as error:
            raise CrossLayerError(*error.args) from None
        # A new state has the paths of the old one.
        results = [*roles.of_parameters("update"), *roles.of_state]
        shapes = [x.shape for x in closed.out_avals]
        _check_same_layers(analysis, results, shapes)
        args = [*results, *roles.of_parameters("parameter")]
        types = [dtype_and_shape(x) for x in jax.tree.leaves(state)]
        return self._signatures(analysis, constants, args, results, types)

    def _signatures(
        self,
        analysis: Analysis,
        constants: Mapping[int, ArrayLike],
        args: Sequence[_Role],
        results: Sequence[_Role],
        state: list[str],
    ) -> Signatures:
        known: dict[int, object] = {n: role for n, (role, _) in enumerate(args)}
        for index, value in constants.items():
            concrete = not is_traced(value)
            known[index] = (
                (np.shape(value), np.asarray(value).tobytes())
                if concrete
                else id(value)
            )
        described = lambda x: x if isinstance(x, Constant) else known[x]
        shared = analysis.shared.program
        inside = dict(enumerate(known[n] for n in analysis.shared.inputs))
        inner = lambda x: x if isinstance(x, Constant) else inside[x]
        for e in shared.eqns:
            key = e.primitive, e.params, tuple(map(inner, e.inputs))
            index = self.numbers.setdefault(key, len(self.numbers))
            inside |= {x: (index, k) for k, x in enumerate(e.outputs)}
        pairs = zip(analysis.shared.outputs, shared.outputs, strict=True)
        known |= {index: inner(x) for index, x in pairs}
        signatures = Signatures({}, [{} for _ in range(self.tree.length)], state)

        def add(output: int, what: object) -> None:
            key, layer = results[output]
            to = signatures.rest if layer is None else signatures.layers[layer]
            to[key] = what

        for output, operand in analysis.direct:
            add(output, described(operand))
        for leaf in analysis.leaf_updates:
            # Such a program reads all parameters, concatenated.
            inputs = None if leaf.between else [described(x) for x in leaf.inputs]
            program = leaf.program
            computation = _Computation(
                program.elementwise, _equations(program), inputs, 0
            )
            for k, output in enumerate(leaf.outputs):
                add(output, computation._replace(result=k))
        for output in analysis.tail.outputs:
            add(output, "cut from what is laid end to end")
        return signatures


def _check_same_layers(
    analysis: Analysis, results: Sequence[_Role], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raises if a result is not computed from one layer's gradients alone."""
    merged = {n for x in analysis.leaf_updates if x.between for n in x.outputs}
    for n, ((kind, node, index), layer) in enumerate(results):
        param_index = analysis.param_indices[n]
        # The first results are the parameters' updates.
        other = param_index is not None and results[param_index][1] != layer
        if n in merged or other:
            raise CrossLayerError(
                f"the new {kind}{node} is computed from parameters of several layers"
            )
        if index is None and param_index is not None and shapes[n]:
            raise ValueError(
                f"state{node} is updated with a parameter, and nothing in its path says"
                " so, so that no layer's part of it is known: keep moments in trees of"
                " the parameters' structure."
            )


@dataclasses.dataclass(frozen=True)
class SameUpdates:
    """Kinds of layers with the same update.

    Attributes:
      traced: Traces the transformation.
      whole: The signatures of an update of the whole own tree.
      kinds: For each layer, the number of its kind.
      pruned: True if a layer has the same update in a tree without the other layers.
        `optax.MaskedNode`s then replace them, which take no time to trace.
    """

    traced: TracedUpdates
    whole: Signatures
    kinds: tuple[int, ...]
    pruned: bool

    @classmethod
    def create(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        tree: LayerTree,
        params: Sequence[Array],
        gradients: Sequence[jax.ShapeDtypeStruct],
    ) -> "SameUpdates":
        """Traces the update of the whole own tree, then of one layer of each kind."""
        traced = TracedUpdates(tx, tree, {})
        update = lambda *layers: traced.update(
            tree_shapes(tree, gradients, *layers), tree_shapes(tree, params, *layers)
        )
        whole = update()
        if not tree.length:  # the stacks are the own tree
            return cls(traced, whole, (), False)
        kinds = _numbered(whole.layers)
        firsts = [None, *map(kinds.index, range(max(kinds) + 1))]
        try:
            pruned = all(whole.agrees(update((k,)), k) for k in firsts)
        except Exception:  # `tx` captures a tree of all layers
            pruned = False
        return cls(traced, whole, kinds, pruned)

    def check_complete(
        self,
        layered: LayeredState,
        gradients: Sequence[jax.ShapeDtypeStruct],
        numbers: Collection[int],
    ) -> None:
        """Raises if a part of a parameter's rows cannot be updated alone.

        Args:
          layered: The parameters, of which a part is updated with each layer.
          gradients: The gradients of whole parameters.
          numbers: The parameters that are updated in parts.

        Raises:
          ValueError: If a parameter's update is not element by element, or if it
            depends on the parameter's shape.
        """
        tree, length = self.traced.tree, layered.length
        members, _ = tree.stacked
        paths, _ = leaf_paths(tree_shapes(tree, layered.params))
        outside = {m: n for n, m in enumerate(members) if isinstance(m, int)}
        names = [keystr(paths[m]) for m, n in outside.items() if n in numbers]
        results = [(x[2], y) for x, y in self.whole.rest.items() if x[2] in names]
        for name, x in results:
            if isinstance(x, _Computation) and not x.elementwise:
                raise ValueError(
                    f"the update of parameter {name} is not element by element (a norm,"
                    " a factored moment, a matrix product, noise), so that one layer's"
                    " part of the stack cannot be updated without the others: with"
                    " layerwise_step use a transformation such as paged_adamw,"
                    " paged_lion or paged_sgd."
                )
        cut = lambda n, x: (
            jax.ShapeDtypeStruct((x.shape[0] // length, *x.shape[1:]), x.dtype)
            if n in numbers
            else x
        )
        layers = (None,) if self.pruned else None
        trees = [
            tree_shapes(tree, [cut(n, x) for n, x in enumerate(leaves)], layers)
            for leaves in (gradients, layered.params)
        ]
        try:
            parts = self.traced.update(*trees).rest
        except (TypeError, ValueError) as error:
            raise ValueError(
                "each layer is updated in a stack of its own, and tx.update refuses a"
                f" stack of one layer: {error} {_WAY_OUT}"
            ) from error
        for name, x in self.whole.rest.items():
            if parts.get(name) != x:
                raise ValueError(
                    f"the update of parameter {name[2]} depends on the shape of the"
                    " whole stack, and each layer is updated in a stack of its own."
                    f" {_WAY_OUT}"
                )


def _numbered(signatures: Sequence[object]) -> tuple[int, ...]:
    """Numbers signatures; equal signatures have one number."""
    numbers: list[int] = []
    for i, signature in enumerate(signatures):
        same = (numbers[k] for k in range(i) if signatures[k] == signature)
        numbers.append(next(same, max(numbers, default=-1) + 1))
    return tuple(numbers)
