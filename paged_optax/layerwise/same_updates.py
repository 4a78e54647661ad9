"""Finds layers with the same update, in a trace of the tree of all layers.

A layer's signature has the program of each of its leaves, and the program's inputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import trace
from paged_optax.analysis.per_leaf import CrossLeafError, analyse
from paged_optax.analysis.program import FILLS, Analysis, Constant, Operand
from paged_optax.backend.text import keystr
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
            " that out of tx, or use an ordinary step if it is the optimizer itself."
            " max_norm= clips by the global norm, and accumulate=True adds up"
            " micro-batches. Wrappers that skip steps, as MultiSteps and"
            " apply_if_finite do, need all gradients first; paged_optax.apply_if_finite"
            " may be around the whole of tx."
        )


def contents(x: ArrayLike) -> Hashable:
    """Returns the shape and the bytes of a constant."""
    if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    return array.shape, array.tobytes()


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

#: The computations of a traced function's results, by layer and name.
Signatures = dict[int | None, dict[_Name, object]]


class _Computation(NamedTuple):
    """The computation of one result, without the shapes of filled arrays."""

    elementwise: bool
    eqns: object
    inputs: object
    result: int


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


def _signatures(
    tx: optax.GradientTransformationExtraArgs,
    tree: LayerTree,
    numbers: dict[Hashable, int],
    gradients: PyTree,
    params: PyTree,
) -> Signatures:
    """Traces an update of an own tree, without paging.

    Shared computations of all traces are numbered in `numbers`.

    Raises:
      ValueError: If the update of a leaf depends on another leaf's gradient.
    """
    with within(plain=True):
        state = jax.eval_shape(lambda params: tx.init(params), params)
        try:
            closed, _ = trace(lambda *args: tx.update(*args), gradients, state, params)
        except Exception as error:
            error.add_note(
                "layerwise_step passes tx.update no value, nor other arguments."
            )
            raise
    roles = Roles(tree, params, state)
    count = range(len(roles.paths))
    try:
        analysis, constants = analyse(
            closed,
            [*count, *[None] * len(roles.param_indices), *count],
            [*count, *roles.param_indices],
            lambda n: f"parameter {keystr(roles.paths[n])}",
            range(len(closed.out_avals)),
        )
    except CrossLeafError as error:
        raise CrossLayerError(*error.args) from None
    # A new state has the paths of the old one.
    results = [*roles.of_parameters("update"), *roles.of_state]
    _check_same_layers(analysis, results, [x.shape for x in closed.out_avals])
    args = enumerate([*results, *roles.of_parameters("parameter")])
    known: dict[Operand, object] = {n: role for n, (role, _) in args}
    for index, x in constants.items():
        known[index] = id(x) if is_traced(x) else contents(x)
    _add_shared(known, analysis, numbers)
    described = lambda x: x if isinstance(x, Constant) else known[x]
    computed: dict[int, object] = {n: described(x) for n, x in analysis.direct}
    for leaf in analysis.leaf_updates:
        # A program of concatenated leaves reads all parameters.
        inputs = None if leaf.between else [described(x) for x in leaf.inputs]
        program = leaf.program
        params_of = lambda e: () if e.primitive.name in FILLS else e.params
        eqns = [(e.primitive, params_of(e), e.inputs, e.outputs) for e in program.eqns]
        for k, n in enumerate(leaf.outputs):
            key = tuple(eqns), program.outputs
            computed[n] = _Computation(program.elementwise, key, inputs, k)
    cut = [n for n in analysis.tail.outputs if isinstance(n, int)]
    computed |= dict.fromkeys(cut, "cut from concatenated leaves")
    signatures: Signatures = {x: {} for x in (None, *range(tree.length))}
    for n, x in computed.items():
        name, layer = results[n]
        signatures[layer][name] = x
    return signatures


def _add_shared(
    known: dict[Operand, object], analysis: Analysis, numbers: dict[Hashable, int]
) -> None:
    """Describes the shared values by the numbers of their computations."""
    shared = analysis.shared.program
    inside = dict(enumerate(known[n] for n in analysis.shared.inputs))
    inner = lambda x: x if isinstance(x, Constant) else inside[x]
    for e in shared.eqns:
        key = e.primitive, e.params, tuple(map(inner, e.inputs))
        index = numbers.setdefault(key, len(numbers))
        inside |= {x: (index, k) for k, x in enumerate(e.outputs)}
    known |= dict(zip(analysis.shared.outputs, map(inner, shared.outputs), strict=True))


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
      update: Traces the update of gradients and parameters of the own tree.
      full: The signatures of an update of the whole own tree.
      kinds: For each layer, the number of its kind.
      pruned: True if a layer has the same update in a tree without the other layers.
        `optax.MaskedNode`s then replace them, which take no time to trace.
    """

    update: Callable[[PyTree, PyTree], Signatures]
    full: Signatures
    kinds: tuple[int, ...]
    pruned: bool

    @classmethod
    def create(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        tree: LayerTree,
        layered: LayeredState,
    ) -> "SameUpdates":
        """Traces the update of the whole own tree, then of one layer of each kind."""
        update = functools.partial(_signatures, tx, tree, {})
        trees = lambda *layers: [
            tree_shapes(tree, x, *layers) for x in (layered.gradients, layered.params)
        ]
        full = update(*trees())
        if not tree.length:  # the stacks are the own tree
            return cls(update, full, (0,) * layered.length, False)
        kinds: list[int] = []
        for i in range(tree.length):
            same = (kinds[k] for k in range(i) if full[k] == full[i])
            kinds.append(next(same, max(kinds, default=-1) + 1))
        firsts = [None, *map(kinds.index, range(max(kinds) + 1))]
        agrees = lambda k, one: one[k] == full[k] and one[None] == full[None]
        try:
            pruned = all(agrees(k, update(*trees((k,)))) for k in firsts)
        except Exception:  # `tx` captures a tree of all layers
            pruned = False
        return cls(update, full, tuple(kinds), pruned)

    def check_complete(
        self, tree: LayerTree, layered: LayeredState, numbers: Collection[int]
    ) -> None:
        """Raises if a part of a parameter's rows cannot be updated alone.

        A part of each parameter in `numbers` is updated with each layer.

        Raises:
          ValueError: If a parameter's update is not element by element, or if it
            depends on the parameter's shape.
        """
        members, _ = tree.stacked
        paths, _ = leaf_paths(tree_shapes(tree, layered.params))
        outside = {m: n for n, m in enumerate(members) if isinstance(m, int)}
        names = [keystr(paths[m]) for m, n in outside.items() if n in numbers]
        rest = self.full[None]
        for name, x in rest.items():
            elementwise = not isinstance(x, _Computation) or x.elementwise
            if name[2] in names and not elementwise:
                raise ValueError(
                    f"the update of parameter {name[2]} is not element by element (a"
                    " norm, a factored moment, a matrix product, noise), so that one"
                    " layer's part of the stack cannot be updated without the others:"
                    " with layerwise_step use a transformation such as paged_adamw,"
                    " paged_lion or paged_sgd, or split a loss whose layers are a list."
                )
        cut = lambda n, x: (
            jax.ShapeDtypeStruct((x.shape[0] // layered.length, *x.shape[1:]), x.dtype)
            if n in numbers
            else x
        )
        layers = (None,) if self.pruned else None
        trees = [
            tree_shapes(tree, [cut(n, x) for n, x in enumerate(leaves)], layers)
            for leaves in (layered.gradients, layered.params)
        ]
        try:
            parts = self.update(*trees)[None]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "each layer is updated in a stack of its own, and tx.update refuses a"
                f" stack of one layer: {error} {_WAY_OUT}"
            ) from error
        for name, x in rest.items():
            if parts.get(name) != x:
                raise ValueError(
                    f"the update of parameter {name[2]} depends on the shape of the"
                    " whole stack, and each layer is updated in a stack of its own."
                    f" {_WAY_OUT}"
                )
