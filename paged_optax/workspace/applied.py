"""One transformation of a whole tree, applied to one layer after the other.

`tx.update` itself runs on the tree with one layer in it, stacks of length 1, and
nothing of the other parameters; and once, at the end, on the tree without the layers.
So masks and labels by path, counts, schedules and codecs are what they are in an
ordinary step. That the two come to the same is checked on the whole tree's jaxpr.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int

from paged_optax import granularity
from paged_optax.codecs import Quantized
from paged_optax.memory import DEVICE, HOST, fetched, on_host
from paged_optax.plan import parameter_of
from paged_optax.state import is_quantized
from paged_optax.workspace.parts import Parts
from paged_optax.workspace.stacks import finished, goes_in_slabs, put, slab

_keystr = jax.tree_util.keystr


class Applied:
    """A transformation and its state, taken apart into layers and the rest.

    Attributes:
      slots: What of the state is stacked like the layers' parameters.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        parts: Parts,
        state: optax.OptState,
    ):
        self.tx = optax.with_extra_args_support(tx)
        self.parts = parts
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        paths = [path for path, _ in flat]
        self.params = [x for _, x in flat]
        self.slabbed = [
            yes and goes_in_slabs(x)
            for yes, x in zip(parts.in_layers, self.params, strict=True)
        ]
        self._refuse_more_than_elements(params, state, paths)
        flat, self.state_structure = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=is_quantized
        )
        self.state = [x for _, x in flat]
        self.owners = parameter_of([path for path, _ in flat], paths)
        self.stacked = [
            owner is not None
            and self.slabbed[owner]
            and bool(jax.tree.leaves(x)[0].ndim)
            for x, owner in zip(self.state, self.owners, strict=True)
        ]
        for (path, x), owner, stacked in zip(
            flat, self.owners, self.stacked, strict=True
        ):
            if stacked and owner is not None:
                _refuse_other_stack(path, x, self.params[owner])
        # Scales are few, and on a TPU a part of a vector is no whole tile.
        self.slots = [
            _scales_to(x, DEVICE)
            for x, stacked in zip(self.state, self.stacked, strict=True)
            if stacked
        ]

    def collector(self, gradients: Any, length: int) -> list[Any]:
        """Room for the gradients of small leaves, of all layers: norms, biases."""
        return [
            None if slabbed else jnp.zeros((length, *g.shape), g.dtype)
            for g, slabbed in zip(
                jax.tree.leaves(gradients), self._of_layers(self.slabbed), strict=True
            )
        ]

    @staticmethod
    def collect(collected: list[Any], gradients: list[Any], i: Int[Array, ""]) -> Any:
        """Keeps the gradients of layer i's small leaves."""
        return [
            None if to is None else put(to, g, i)
            for to, g in zip(collected, gradients, strict=True)
        ]

    def layer(
        self,
        slots: list[Any],
        weights: list[Any],
        gradients: list[Any],
        i: Int[Array, ""],
    ) -> tuple[list[Any], list[Any]]:
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
        absent = [None] * self.parts.in_layers.count(False)
        tree, updates = (
            [
                x if slabbed else _nothing(whole)
                for x, whole, slabbed in zip(
                    self.parts.joined(given, absent),
                    self.params,
                    self.slabbed,
                    strict=True,
                )
            ]
            for given in (weights, gradients)
        )
        slabs = [slab(x, i) for x in slots]
        old = iter(slabs)
        state = [
            next(old) if yes else x
            for x, yes in zip(self.state, self.stacked, strict=True)
        ]
        compute = lambda: self._update(updates, state, tree, self.stacked, layer=i)
        new_params, new_state = finished(compute)
        slots = [put(x, new, i) for x, new in zip(slots, new_state, strict=True)]
        done = iter(new_params)
        return slots, [
            next(done) if yes else w
            for w, yes in zip(weights, self._of_layers(self.slabbed), strict=True)
        ]

    def rest(
        self,
        stacks: list[Any],
        slots: list[Any],
        small: list[Any],
        others: list[Any],
        gradients: list[Any],
    ) -> tuple[list[Any], list[Any], optax.OptState]:
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
                _nothing(whole) if slabbed else x
                for x, whole, slabbed in zip(
                    self.parts.joined(*given), self.params, self.slabbed, strict=True
                )
            ]
            for given in ((stacks, others), (small, gradients))
        )
        chosen = [not yes for yes in self.stacked]
        new_params, new_state = self._update(
            updates, self.state, tree, chosen, [not yes for yes in self.slabbed]
        )
        done, final = iter(new_params), iter(slots)
        new = [
            x if slabbed else next(done)
            for x, slabbed in zip(
                self.parts.joined(stacks, others), self.slabbed, strict=True
            )
        ]
        kept = iter(new_state)
        state = [
            _scales_to(next(final), HOST if on_host(x) else DEVICE)
            if yes
            else next(kept)
            for x, yes in zip(self.state, self.stacked, strict=True)
        ]
        others = [
            x for x, yes in zip(new, self.parts.in_layers, strict=True) if not yes
        ]
        state = jax.tree.unflatten(self.state_structure, state)
        return self._of_layers(new), others, state

    def _update(
        self,
        updates: list[Any],
        state: list[Any],
        params: list[Any],
        wanted: list[bool],
        wanted_params: list[bool] | None = None,
        layer: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """Runs `tx.update`; nothing stands for the parameters that are not there."""
        tree = jax.tree.unflatten(self.parts.structure, params)
        shapes = jax.eval_shape(
            lambda tree: self.tx.init(tree), jax.tree.map(granularity.abstract, tree)
        )
        shapes, structure = jax.tree.flatten(shapes, is_leaf=is_quantized)
        given = []
        for x, shape, owner, yes in zip(
            state, shapes, self.owners, wanted, strict=True
        ):
            absent = owner is not None and not yes and jax.tree.leaves(shape)[0].ndim
            given.append(
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
                if absent
                else x
            )
        with fetched(layer):
            made, new = self.tx.update(
                jax.tree.unflatten(self.parts.structure, updates),
                jax.tree.unflatten(structure, given),
                tree,
            )
        tree = optax.apply_updates(tree, made)
        new = jax.tree.leaves(new, is_leaf=is_quantized)
        choice = self.slabbed if wanted_params is None else wanted_params
        return (
            [x for x, yes in zip(jax.tree.leaves(tree), choice, strict=True) if yes],
            [x for x, yes in zip(new, wanted, strict=True) if yes],
        )

    def _of_layers(self, values: list[Any]) -> list[Any]:
        return [x for x, yes in zip(values, self.parts.in_layers, strict=True) if yes]

    def _refuse_more_than_elements(self, params: Any, state: Any, paths: Any) -> None:
        """Refuses what one layer's slice cannot be updated by."""
        with granularity.seen_through():
            closed, _ = granularity.trace(
                lambda u, s, p: self.tx.update(u, s, p), params, state, params
            )
        count, states = len(paths), len(jax.tree.leaves(state))
        name = lambda i: f"parameter {_keystr(paths[i])}"
        analysis = granularity.analyse(
            closed,
            [*range(count), *[None] * states, *range(count)],
            [*range(count), *[None] * (len(closed.out_avals) - count)],
            name,
        )
        for leaf in analysis.leaves:
            owner = leaf.owner
            if owner is None or not self.slabbed[owner] or leaf.program.elementwise:
                continue
            raise ValueError(
                f"the update of {name(owner)} is not element by element (a norm, a"
                " factored moment, a matrix product, noise), so that one layer's part"
                " of the stack cannot be updated without the others: with"
                " layerwise_step use a transformation such as paged_adamw, paged_lion"
                " or paged_sgd."
            )


def _nothing(x: Any) -> Any:
    """What stands for a parameter that is not there: no elements, as many axes."""
    shape = (0, *x.shape[1:]) if x.shape else ()
    return jnp.zeros(shape, x.dtype)


def _scales_to(x: Any, space: Any) -> Any:
    if not isinstance(x, Quantized) or not on_host(x):
        return x
    return x._replace(scales=jax.device_put(x.scales, space))


def _refuse_other_stack(path: Any, x: Any, parameter: Any) -> None:
    length = parameter.shape[0]
    values = parameter.size // length
    fits = (
        x.shape == parameter.shape
        if not isinstance(x, Quantized)
        else (
            x.codes.shape[0] == length
            and (x.scales.ndim == 1 or x.scales.shape[1] == length)
            and x.scales.size % length == 0
            and values % -(-values // (x.scales.size // length)) == 0
        )
    )
    if not fits:
        shapes = jax.tree.map(lambda x: x.shape, x)
        raise ValueError(
            f"state{_keystr(path)} has shape {shapes}, which cannot be cut into the"
            f" {length} layers of its parameter of shape {parameter.shape}: use moments"
            " of the parameters' own shape; with a codec, layers of whole blocks."
        )
