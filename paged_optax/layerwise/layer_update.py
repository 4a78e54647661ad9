"""One transformation of a whole tree, applied to one layer after the other.

`tx.update` is traced of the whole tree, and what it computes of a stack is run on one
layer's slab of it. So masks and labels, by path or by shape, counts and schedules are
what they are in an ordinary step.

Coded moments are no arrays of the parameters' shape. Where a stack has such moments,
`tx.update` itself runs on the tree with one layer in it, in stacks of length 1. That
this comes to the same is checked on the whole tree's jaxpr.

At the end `tx.update` runs on the whole tree, for what is not updated in slabs; its
other results are dead code.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.barriers import finished
from paged_optax.backend.key_paths import keystr
from paged_optax.backend.memory import DEVICE, HOST, on_host
from paged_optax.backend.types import KeyPath
from paged_optax.codecs import Quantized
from paged_optax.engine.streamed import Stored
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.programs import Programs
from paged_optax.layerwise.slices import LayerIndex, goes_in_slabs, put, slab
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.context import current, within
from paged_optax.transform.owners import parameter_of

#: An array, or what says its shape.
Shaped = Array | jax.ShapeDtypeStruct

Leaf = TypeVar("Leaf")


class Applied:
    """A transformation and its state, taken apart into layers and the rest.

    Attributes:
      slots: What of the state is stacked like the layers' parameters.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: PyTree[Array],
        parts: Parts,
        state: PyTree[Array],
        gradients: PyTree[Array],
    ):
        """Takes it apart.

        Args:
          tx: The transformation.
          params: All parameters.
          parts: The same, parted.
          state: The state.
          gradients: One layer's gradients.
        """
        self.tx = optax.with_extra_args_support(tx)
        self.parts = parts
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        self.paths = [path for path, _ in flat]
        self.params: list[Array] = [x for _, x in flat]
        self.slabbed = [
            yes and goes_in_slabs(x)
            for yes, x in zip(parts.in_layers, self.params, strict=True)
        ]
        flat, self.state_structure = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=is_quantized
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
        self.programs = self._look(shapes, self.state, self.params)
        self.in_slabs = self.programs.not_elementwise is None
        seen = None if self.in_slabs else self._seen_through(shapes)
        for (path, x), owner, stacked in zip(
            flat, self.owners, self.stacked, strict=True
        ):
            if stacked and owner is not None:
                _refuse_other_stack(path, x, self.params[owner])
        if seen is not None:
            self._refuse_choices_by_shape(seen, shapes)
        # Scales are few, and on a TPU a part of a vector is no whole tile.
        self.slots = [
            _scales_to(x, host=False)
            for x, stacked in zip(self.state, self.stacked, strict=True)
            if stacked
        ]

    def collector(self, gradients: PyTree[Array], length: int) -> list[Array | None]:
        """Room for the gradients of small leaves, of all layers: norms, biases."""
        return [
            None if slabbed else jnp.zeros((length, *g.shape), g.dtype)
            for g, slabbed in zip(
                jax.tree.leaves(gradients), self._of_layers(self.slabbed), strict=True
            )
        ]

    @staticmethod
    def collect(
        collected: Sequence[Array | None], gradients: Sequence[Array], i: LayerIndex
    ) -> list[Array | None]:
        """Keeps the gradients of layer i's small leaves."""
        return [
            None if to is None else put(to, g, i)
            for to, g in zip(collected, gradients, strict=True)
        ]

    def layer(
        self,
        slots: Sequence[Stored],
        weights: Sequence[Array],
        gradients: Sequence[Array],
        i: LayerIndex,
    ) -> tuple[list[Stored], list[Array]]:
        """Updates layer i.

        Args:
          slots: The state's stacks.
          weights: The layer's parameters, with a leading axis of 1.
          gradients: Their gradients.
          i: Its number.

        Returns:
          The state's stacks, and the layer's parameters; those that are not updated
          layer by layer are the objects that were given.
        """
        others = [None] * self.parts.in_layers.count(False)
        tree, updates = (
            self.parts.joined(given, others) for given in (weights, gradients)
        )
        slabs = iter([slab(x, i) for x in slots])
        state = [
            next(slabs) if yes else x
            for x, yes in zip(self.state, self.stacked, strict=True)
        ]
        run = self._one_slab if self.in_slabs else self._one_layer
        new_params, new_state = finished(lambda: run(updates, state, tree, i))
        slots = [put(x, new, i) for x, new in zip(slots, new_state, strict=True)]
        done = iter(new_params)
        return slots, [
            next(done) if yes else w
            for w, yes in zip(weights, self._of_layers(self.slabbed), strict=True)
        ]

    def rest(
        self,
        stacks: Sequence[Array],
        slots: Sequence[Stored],
        small: Sequence[Array | None],
        others: Sequence[Array],
        gradients: Sequence[Array],
    ) -> tuple[list[Array], list[Array], PyTree[Array]]:
        """Updates what is not updated layer by layer.

        Args:
          stacks: The layers' parameters, the larger ones updated.
          slots: The state's stacks, updated.
          small: The collected gradients of the small ones.
          others: The other parameters.
          gradients: Their gradients.

        Returns:
          The layers' parameters, the others, and the whole state.
        """
        tree, updates = (
            [
                _blank(whole) if slabbed else x
                for x, whole, slabbed in zip(
                    self.parts.joined(*given), self.params, self.slabbed, strict=True
                )
            ]
            for given in ((stacks, others), (small, gradients))
        )
        state = [
            _blank(x) if yes else x
            for x, yes in zip(self.state, self.stacked, strict=True)
        ]
        made, new_state = self._update(updates, state, tree)
        final = iter(slots)
        new = [
            old if slabbed else x
            for old, x, slabbed in zip(
                self.parts.joined(stacks, others), made, self.slabbed, strict=True
            )
        ]
        state = [
            _scales_to(next(final), host=on_host(old)) if yes else x
            for old, x, yes in zip(self.state, new_state, self.stacked, strict=True)
        ]
        others = [
            x for x, yes in zip(new, self.parts.in_layers, strict=True) if not yes
        ]
        state = jax.tree.unflatten(self.state_structure, state)
        return self._of_layers(new), others, state

    def _one_slab(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        tree: Sequence[Array | None],
        i: LayerIndex,
    ) -> tuple[list[Array], list[Stored]]:
        """What the whole tree's update makes of one layer."""
        results = self.programs.run([*updates, *jax.tree.leaves(state), *tree], i)
        weights = [
            x
            for x, yes in zip(tree, self.slabbed, strict=True)
            if yes and x is not None
        ]
        count = len(weights)
        made = jax.tree.leaves(optax.apply_updates(weights, results[:count]))
        return made, list[Stored](results[count:])

    def _one_layer(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        tree: Sequence[Array | None],
        i: LayerIndex,
    ) -> tuple[list[Array], list[Stored]]:
        """The update of a tree with one layer in it."""
        state = [
            x if yes or owner is None else _blank(x)
            for x, yes, owner in zip(state, self.stacked, self.owners, strict=True)
        ]
        tree, updates = (
            [
                x if slabbed else _blank(whole)
                for x, whole, slabbed in zip(
                    leaves, self.params, self.slabbed, strict=True
                )
            ]
            for leaves in (tree, updates)
        )
        made, new = self._update(updates, state, tree, i)
        return (
            [x for x, yes in zip(made, self.slabbed, strict=True) if yes],
            [x for x, yes in zip(new, self.stacked, strict=True) if yes],
        )

    def _update(
        self,
        updates: Sequence[Array | None],
        state: Sequence[Stored],
        params: Sequence[Array | None],
        layer: LayerIndex | None = None,
    ) -> tuple[list[Array], list[Stored]]:
        """The leaves of new parameters and of a new state."""
        tree = jax.tree.unflatten(self.parts.structure, params)
        with within(fetched=True, layer=layer):
            made, new = self.tx.update(
                jax.tree.unflatten(self.parts.structure, updates),
                jax.tree.unflatten(self.state_structure, state),
                tree,
            )
        tree = optax.apply_updates(tree, made)
        return jax.tree.leaves(tree), jax.tree.leaves(new, is_leaf=is_quantized)

    def _of_layers(self, values: Sequence[Leaf]) -> list[Leaf]:
        return [x for x, yes in zip(values, self.parts.in_layers, strict=True) if yes]

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
        return Programs.of(
            update,
            jax.tree.unflatten(self.parts.structure, gradients),
            jax.tree.unflatten(self.state_structure, state),
            jax.tree.unflatten(self.parts.structure, params),
            [position for position, yes in enumerate(flags) if yes],
            self._name,
        )

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

    def _refuse_choices_by_shape(
        self, whole: Programs, gradients: Sequence[Shaped]
    ) -> None:
        """Refuses what one layer's update would choose otherwise than the whole's."""
        cut = lambda leaves, chosen: [
            jax.eval_shape(lambda x: slab(x, 0), x) if yes else x
            for x, yes in zip(leaves, chosen, strict=True)
        ]
        try:
            with within(seen_through=True):
                one = self._look(
                    cut(gradients, self.slabbed),
                    cut(self.state, self.stacked),
                    cut(self.params, self.slabbed),
                )
        except (TypeError, ValueError):  # from Optax, of states of two structures
            differ = sorted(whole.stacks)
        else:
            differ = whole.differences(one)
        if differ:
            raise ValueError(
                f"the update of {self._name(differ[0])} depends on the shape of the"
                " whole stack (a mask or a label computed from sizes), and where"
                " moments are coded each layer is updated in a stack of its own: give"
                " the mask as it is, a tree of bools, and labels as a tree of strings;"
                " or leave out the codec."
            )

    def _name(self, number: int) -> str:
        return f"parameter {keystr(self.paths[number])}"


def _blank(x: Leaf) -> Leaf:
    """What stands for an array whose update nobody takes: zeros, which nobody makes.

    A count remains what it is.
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if x.ndim else x, x)


def _scales_to(x: Stored, *, host: bool) -> Stored:
    if not isinstance(x, Quantized) or not on_host(x):
        return x
    return x._replace(scales=jax.device_put(x.scales, HOST if host else DEVICE))


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
