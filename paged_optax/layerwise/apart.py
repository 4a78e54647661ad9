"""A transformation and its state, taken apart into layers and the rest.

`tx.update` is traced of the whole tree. So masks and labels, by path or by shape,
counts and schedules are what they are in an ordinary step.

Coded moments are no arrays of the parameters' shape. Where a stack has such moments,
`tx.update` itself runs on the tree with one layer in it, in stacks of length 1. That
this comes to the same is checked on the whole tree's jaxpr.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.analysis.split import CrossLeafError
from paged_optax.backend.memory import DEVICE, HOST, nbytes, on_host
from paged_optax.backend.meshes import on_one_device
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath
from paged_optax.backend.variables import as_pure
from paged_optax.codecs import Quantized
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.groups import Group, grouped
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.programs import Programs
from paged_optax.layerwise.slices import (
    FETCHES_AHEAD,
    LayerIndex,
    goes_in_slabs,
    slab,
)
from paged_optax.layerwise.stacks import length_of
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import Gate, current, within
from paged_optax.transform.trees import parameter_of


class CrossLayerError(CrossLeafError):
    """`tx` mixes several parameters, whose gradients are not there at once."""

    def __str__(self) -> str:
        return (
            f"layerwise_step updates each layer alone, and in tx {self.args[0]}: leave"
            " that out of tx. max_norm= clips by the global norm, and accumulate=True"
            " adds up micro-batches. Wrappers that skip steps, as MultiSteps and"
            " apply_if_finite do, need all gradients first; paged_optax.apply_if_finite"
            " may be around the whole of tx."
        )


_WAY_OUT = (
    "If a mask or labels are computed from shapes, give the mask as it is, a tree of"
    " bools, and labels as a tree of strings; or leave out the codec."
)

#: An array, or what says its shape.
Shaped = Array | jax.ShapeDtypeStruct

Leaf = TypeVar("Leaf")


class Apart:
    """A transformation and its state, taken apart into layers and the rest.

    Attributes:
      slots: What of the state is stacked like the layers' parameters.
      groups: What is updated in slabs, in groups that travel one after the other.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: PyTree[Array],
        parts: Parts,
        state: PyTree[Array],
        gradients: PyTree[Array],
        early: Sequence[int] = (),
        overlaps: bool = False,
        happens: Gate = True,
    ):
        """Takes it apart.

        Args:
          tx: The transformation.
          params: All parameters.
          parts: The same, parted.
          state: The state.
          gradients: One layer's gradients.
          early: The numbers of other parameters that are updated beside the layers, in
            as many parts as there are layers.
          overlaps: Whether a layer is updated while another one is computed.
          happens: Whether anything is updated at all.
        """
        self.overlaps, self.happens = overlaps, happens
        self.length, self.early = length_of(parts.layers), tuple(early)
        self.tx = optax.with_extra_args_support(tx)
        self.parts = parts
        flat, _ = jax.tree_util.tree_flatten_with_path(as_pure(params))
        self.paths = [path for path, _ in flat]
        self.params: list[Array] = [x for _, x in flat]
        self.slabbed = [
            n in early or (yes and goes_in_slabs(x))
            for n, (yes, x) in enumerate(zip(parts.in_layers, self.params, strict=True))
        ]
        self.given = state
        self.state_structure = jax.tree.structure(state, is_leaf=is_quantized)
        flat, _ = jax.tree_util.tree_flatten_with_path(
            as_pure(state), is_leaf=is_quantized
        )
        self.state: list[Stored] = [x for _, x in flat]
        self.owners = parameter_of([path for path, _ in flat], self.paths)
        self.stacked = [
            owner is not None
            and self.slabbed[owner]
            and bool(jax.tree.leaves(x)[0].ndim)
            for x, owner in zip(self.state, self.owners, strict=True)
        ]
        others = [None] * parts.in_layers.count(False)
        dtypes = parts.joined([x.dtype for x in jax.tree.leaves(gradients)], others)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype)
            for x, dtype in zip(self.params, dtypes, strict=True)
        ]
        self.programs = self._programs(shapes)
        seen = None if self.programs is not None else self._seen_through(shapes)
        self._refuse_state(flat)
        if seen is not None:
            self._refuse_choices_by_shape(seen, shapes)
        # Scales are few, and on a TPU a part of a vector is no whole tile.
        self.slots = [
            scales_to(x, host=False)
            for x, stacked in zip(self.state, self.stacked, strict=True)
            if stacked
        ]
        self.numbers = [n for n, yes in enumerate(parts.in_layers) if yes]
        self.numbers += self.early
        self.groups = self.grouped()

    def grouped(self, most: int | None = None) -> list[Group]:
        """What is updated in slabs, in groups that travel one after the other."""
        place = {number: leaf for leaf, number in enumerate(self.numbers)}
        leaves = [place[n] for n in self.numbers if self.slabbed[n]]
        owners = [
            place[owner]
            for owner, yes in zip(self.owners, self.stacked, strict=True)
            if yes and owner is not None
        ]
        weights = [(place[n], self.params[n]) for n in self.numbers]
        moving = [*zip(owners, self.slots, strict=True), *weights]
        travel = [
            sum(nbytes(x) for owner, x in moving if owner == leaf and on_host(x))
            for leaf in leaves
        ]
        together = self.programs is not None and self.programs.analysis.tail.equations
        return grouped(leaves, owners, travel, 1 if together else most)

    @property
    def can_overlap(self) -> bool:
        """Whether a layer can be updated while another one is computed.

        Not yet on many devices, where gradients are reduced beside transfers.
        """
        several = self.length > 1 and len(self.groups) > 1
        return FETCHES_AHEAD and several and on_one_device(self.slots)

    def of_layers(self, values: Sequence[Leaf]) -> list[Leaf]:
        """Those of a value for each parameter that belong to the layers."""
        return [x for x, yes in zip(values, self.parts.in_layers, strict=True) if yes]

    def _programs(self, gradients: Sequence[Shaped]) -> Programs | None:
        """What an update computes of each leaf; None if not element by element."""
        found = self._look(gradients, self.state, self.params)
        return found if found.not_elementwise is None else None

    def _look(
        self,
        gradients: Sequence[Shaped],
        state: Sequence[PyTree[Shaped]],
        params: Sequence[Shaped],
    ) -> Programs:
        """What an update computes, given the leaves of its arguments, or shapes."""

        def update(
            i: LayerIndex, gradients: PyTree, state: PyTree, params: PyTree
        ) -> tuple[PyTree, PyTree]:
            with within(fetched=True, layer=i):
                return self.tx.update(gradients, state, params)

        flags = [
            yes
            for x, yes in zip(state, self.stacked, strict=True)
            for _ in jax.tree.leaves(x)
        ]
        # What is seen through gives the state as it is computed, not as it is stored.
        flags = [*self.slabbed, *([] if current().seen_through else flags)]
        try:
            return Programs.of(
                update,
                jax.tree.unflatten(self.parts.structure, gradients),
                jax.tree.unflatten(self.state_structure, state),
                jax.tree.unflatten(self.parts.structure, params),
                [position for position, yes in enumerate(flags) if yes],
                self._name,
            )
        except CrossLeafError as error:
            raise CrossLayerError(*error.args) from None

    def _seen_through(self, gradients: Sequence[Shaped]) -> Programs:
        """What an update computes between reading and writing codes.

        Raises:
          ValueError: If one layer's slice cannot be updated by it.
        """
        with within(seen_through=True):
            whole = self._look(gradients, self.state, self.params)
        if whole.not_elementwise is not None:
            raise ValueError(
                f"the update of {self._name(whole.not_elementwise)} is not element by"
                " element (a norm, a factored moment, a matrix product, noise), so that"
                " one layer's part of the stack cannot be updated without the others:"
                " with layerwise_step use a transformation such as paged_adamw,"
                " paged_lion or paged_sgd."
            )
        return whole

    def _refuse_state(self, flat: Sequence[tuple[KeyPath, Stored]]) -> None:
        """Refuses moments of layers that cannot be cut, or told, layer by layer."""
        leaves = () if self.programs is None else self.programs.analysis.leaves
        makers = {place: leaf.owner for leaf in leaves for place in leaf.outputs}
        place = len(self.params)
        for (path, x), owner, stacked in zip(
            flat, self.owners, self.stacked, strict=True
        ):
            maker = makers.get(place)
            arrays = jax.tree.leaves(x)
            place += len(arrays)
            if stacked and owner is not None and owner not in self.early:
                _refuse_other_stack(path, x, self.params[owner])
            alone = not stacked and bool(arrays[0].ndim)
            if alone and maker is not None and self.slabbed[maker]:
                raise ValueError(
                    f"state{keystr(path)} is updated with {self._name(maker)}, and"
                    " nothing in its path says so, so that no layer's part of it is"
                    " known: keep moments in trees of the parameters' structure."
                )

    def _refuse_choices_by_shape(
        self, whole: Programs, gradients: Sequence[Shaped]
    ) -> None:
        """Refuses what one layer's update would choose otherwise than the whole's."""
        cut = lambda leaves, chosen: [
            jax.eval_shape(lambda x: slab(x, 0, self.length), x) if yes else x
            for x, yes in zip(leaves, chosen, strict=True)
        ]
        try:
            with within(seen_through=True):
                one = self._look(
                    cut(gradients, self.slabbed),
                    cut(self.state, self.stacked),
                    cut(self.params, self.slabbed),
                )
        except (TypeError, ValueError) as error:
            raise ValueError(
                "where moments are coded each layer is updated in a stack of its own,"
                f" and tx.update refuses a stack of one layer: {error} {_WAY_OUT}"
            ) from error
        if differ := whole.differences(one):
            raise ValueError(
                f"the update of {self._name(differ[0])} depends on the shape of the"
                " whole stack, and where moments are coded each layer is updated in a"
                f" stack of its own. {_WAY_OUT}"
            )

    def _name(self, number: int) -> str:
        return f"parameter {keystr(self.paths[number])}"


def scales_to(x: Stored, *, host: bool) -> Stored:
    """Moves a stack's scales, which are few, to the device or back.

    The container names no codec, as those of single layers do not.
    """
    if not isinstance(x, Quantized):
        return x
    if not on_host(x):
        return Quantized(*x)
    return Quantized(x.codes, jax.device_put(x.scales, HOST if host else DEVICE))


def _refuse_other_stack(path: KeyPath, x: Stored, parameter: Array) -> None:
    length = parameter.shape[0]
    values = parameter.size // length
    fits = (
        x.shape == parameter.shape
        if not isinstance(x, Quantized)
        else (
            x.codes.shape[0] == length
            and (x.scales.ndim == 1 or x.scales.shape[0] == length)
            and x.scales.size % length == 0
            and values % -(-values // (x.scales.size // length)) == 0
        )
    )
    if not fits:
        shapes = jax.tree.map(lambda x: x.shape, x)
        raise ValueError(
            f"state{keystr(path)} has shape {shapes}, which cannot be cut into the"
            f" {length} layers of its parameter of shape {parameter.shape}: use moments"
            " of the parameters' own shape; with a codec, layers of whole blocks."
        )
