"""Finds layers with the same computation, in a trace of the tree of all layers."""

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat, trace
from paged_optax.analysis.per_leaf import CrossLeafError, analyse
from paged_optax.analysis.program import FILLS
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


_WAY_OUT = (
    "If a mask or labels are computed from shapes, give the mask as it is, a tree of"
    " bools, and labels as a tree of strings."
)


#: A leaf's kind, its node, and the number of its stack: the same in all layers.
Name = tuple[str, str, int | None]


class Role(NamedTuple):
    """A leaf of parameters, updates or a state."""

    name: Name
    layer: int | None  # None outside the layers
    param_index: int | None  # the number of its parameter


class Roles:
    """Names the leaves of parameters, updates and states of an own tree."""

    def __init__(self, tree: LayerTree, params: PyTree):
        members, _ = tree.stacked
        numbers = [
            n if isinstance(m, LayerNumbers) else (n, None)
            for n, m in enumerate(members)
        ]
        places = tree_leaves(members, numbers, lambda n, layer: (n, layer))
        entries = tree.structure.flatten_up_to(params)
        pairs = zip(places, entries, strict=True)
        self._places = [place for place, x in pairs if jax.tree.leaves(x)]
        self.paths, _ = leaf_paths(params)

    def of(self, kind: str, tree: PyTree) -> list[Role]:
        """The roles of the leaves of a tree."""
        paths, _ = leaf_paths(tree)

        def role(path: KeyPath, n: int | None) -> Role:
            if n is None:
                return Role((kind, keystr(path), None), None, None)
            node = path[: len(path) - len(self.paths[n])]
            index, layer = self._places[n]
            return Role((kind, keystr(node), index), layer, n)

        return list(map(role, paths, parameter_of(paths, self.paths)))


def computations(
    flat: Flat, roles: Sequence[Role]
) -> Iterator[tuple[object, list[Role]]]:
    """Yields each result's computation, and the arguments that it reads.

    Computations are equal whatever the shapes of the arrays that they fill.
    """
    known = {n: role.name for n, role in enumerate(roles)}
    known |= {n: _contents(x) for n, x in flat.constants.items()}
    for x in flat.outputs:
        numbered = flat.program([x])
        program, read = numbered.program, numbered.inputs
        params = lambda e: () if e.primitive.name in FILLS else e.params
        eqns = [(e.primitive, params(e), e.inputs, e.outputs) for e in program.eqns]
        computed = eqns, program.outputs, [known[n] for n in read]
        yield computed, [roles[n] for n in read if n not in flat.constants]


def _contents(x: ArrayLike) -> Hashable:
    if is_traced(x):
        return id(x)
    if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    return array.shape, array.tobytes()


#: For each result of a layer, by its name: true if it is element-wise, and its
#: computation.
Signature = dict[Name, tuple[bool, object]]


@dataclasses.dataclass(frozen=True)
class SameUpdates:
    """Kinds of layers with the same update.

    Attributes:
      full: The signatures of an update of the whole own tree, by layer.
      kinds: The layers of each kind.
      pruned: True if a layer has the same update in a tree without the other layers.
        `optax.MaskedNode`s then replace them, which take no time to trace.
    """

    tx: optax.GradientTransformationExtraArgs
    tree: LayerTree
    full: dict[int | None, Signature]
    kinds: list[list[int]]
    pruned: bool

    @classmethod
    def create(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        tree: LayerTree,
        layered: LayeredState,
    ) -> "SameUpdates":
        """Traces the update of the whole own tree, then of one layer of each kind."""
        stacks = layered.gradients, layered.params
        full = _signatures(tx, tree, *map(tree.shapes, stacks))
        if not tree.length:  # the stacks are the own tree
            return cls(tx, tree, full, [list(range(layered.length))], False)
        layers = [full[i] for i in range(tree.length)]
        firsts = [layers.index(x) for x in layers]
        kinds = [[i for i, x in enumerate(firsts) if x == k] for k in sorted({*firsts})]

        def agrees(k: int | None) -> bool:
            one = _signatures(tx, tree, *(tree.shapes(x, (k,)) for x in stacks))
            return one[k] == full[k] and one[None] == full[None]

        try:
            pruned = all(map(agrees, (None, *[layers[0] for layers in kinds])))
        except Exception:  # `tx` captures a tree of all layers
            pruned = False
        return cls(tx, tree, full, kinds, pruned)

    def check_complete(self, layered: LayeredState, numbers: Collection[int]) -> None:
        """Raises if a part of a parameter's rows cannot be updated alone.

        A part of each parameter in `numbers` is updated with each layer.

        Raises:
          ValueError: If a parameter's update is not element by element, or if it
            depends on the parameter's shape.
        """
        members, rest = self.tree.stacked[0], self.full[None]
        paths, _ = leaf_paths(self.tree.shapes(layered.params))
        text = lambda name: (
            f"state{name[1]}"
            if name[2] is None
            else f"parameter {keystr(paths[members[name[2]]])}"
        )
        moved = {n for n, m in enumerate(members) if m in self.tree.moved}
        for name, (elementwise, _) in rest.items():
            if name[2] in moved.difference(numbers) and not elementwise:
                raise ValueError(
                    f"the update of {text(name)} is not element by element, and its"
                    " stack has the layers' axis first here, and elsewhere in the"
                    " loss's own tree: stack the layers on the first axis, or leave"
                    " this parameter to an element-wise transformation, as paged_adamw"
                    " is."
                )
            if name[2] in numbers and not elementwise:
                raise ValueError(
                    f"the update of {text(name)} is not element by element (a norm, a"
                    " factored moment, a matrix product, noise), so that one layer's"
                    " part of the stack cannot be updated without the others: with"
                    " layerwise_step use a transformation such as paged_adamw,"
                    " paged_lion or paged_sgd, or split a loss whose layers are a list."
                )

        def cut(
            n: int, x: Array | jax.ShapeDtypeStruct
        ) -> Array | jax.ShapeDtypeStruct:
            if n not in numbers:
                return x
            rows = x.shape[0] // layered.length
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        layers = (None,) if self.pruned else None
        trees = [
            self.tree.shapes([cut(n, x) for n, x in enumerate(leaves)], layers)
            for leaves in (layered.gradients, layered.params)
        ]
        try:
            parts = _signatures(self.tx, self.tree, *trees)[None]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "each layer is updated in a stack of its own, and tx.update refuses a"
                f" stack of one layer: {error} {_WAY_OUT}"
            ) from error
        for name, x in rest.items():
            if parts.get(name) != x:
                raise ValueError(
                    f"the update of {text(name)} depends on the shape of the whole"
                    " stack, and each layer is updated in a stack of its own."
                    f" {_WAY_OUT}"
                )


def _signatures(
    tx: optax.GradientTransformationExtraArgs,
    tree: LayerTree,
    gradients: PyTree,
    params: PyTree,
) -> dict[int | None, Signature]:
    """Traces an update of an own tree, without paging.

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
    roles = Roles(tree, params)
    # A new state has the paths of the old one.
    results = roles.of("update", params) + roles.of("state", state)
    count = range(len(roles.paths))
    owners = [role.param_index for role in results]
    try:
        analysis, _ = analyse(
            closed,
            [*count, *[None] * (len(results) - len(count)), *count],
            owners,
            lambda n: f"parameter {keystr(roles.paths[n])}",
            range(len(results)),
        )
    except CrossLeafError as error:
        raise CrossLayerError(*error.args) from None
    signatures: dict[int | None, Signature] = {None: {}}
    signatures |= {i: {} for i in range(tree.length)}
    flat = Flat(closed, both=True)
    computed = computations(flat, results + roles.of("parameter", params))
    for n, (role, (value, read)) in enumerate(zip(results, computed, strict=True)):
        elementwise = n in analysis.elementwise
        if n in analysis.tail.outputs:  # whose computation reads all parameters
            elementwise, value = True, "cut from concatenated leaves"
        else:
            _check_alone(role, read, flat.shape(flat.outputs[n]))
        signatures[role.layer][role.name] = elementwise, value
    return signatures


def _check_alone(role: Role, read: Sequence[Role], shape: tuple[int, ...]) -> None:
    """Raises if a result is not computed from its own parameter's leaves alone."""
    if not {x.param_index for x in read} - {None, role.param_index}:
        return
    kind, node, index = role.name
    if index is None and shape:
        raise ValueError(
            f"state{node} is updated with a parameter, and nothing in its path says"
            " so, so that no layer's part of it is known: keep moments in trees of"
            " the parameters' structure."
        )
    raise CrossLayerError(
        f"the new {kind}{node} is computed from parameters of several layers"
    )
