"""What a transformation makes of a stack of layers, and of one layer by itself.

Masks and labels that are computed from shapes (`x.ndim > 1`) choose otherwise in a
stack, which has one axis more. So does Muon, which is made for matrices. A norm of a
stack is no layer's.
"""

import warnings
from collections.abc import Mapping

import jax
import optax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.layerwise.guard import wrapper_of
from paged_optax.layerwise.programs import Programs
from paged_optax.layerwise.slices import LayerIndex, goes_in_slabs
from paged_optax.transform.context import within


class _ForStacksError(Exception):
    """A transformation is written for stacks."""


def tell_of_choices(
    tx: optax.GradientTransformation, stacked: Mapping[str, PyTree]
) -> None:
    """Warns of choices that differ, and refuses what is not element by element.

    Args:
      tx: The transformation.
      stacked: The shapes of what `SplitModel.stack` returns. The loss has each layer's
        parameters by themselves.

    Raises:
      ValueError: If the update of a layer, or of a stack that is updated whole, is not
        element by element.
    """
    guard = wrapper_of(tx)
    tx = tx if guard is None else guard.inner
    alone = {**stacked, "layers": jax.tree.map(_one_axis_less, stacked["layers"])}
    flat, _ = jax.tree_util.tree_flatten_with_path(stacked)
    numbers = [n for n, (path, _) in enumerate(flat) if path[0].key == "layers"]
    try:
        one, stack = (_look(tx, params, numbers) for params in (alone, dict(stacked)))
    except Exception:  # it is refused as the step is traced, or knows stacks alone
        return
    name = lambda number: f"parameter {keystr(flat[number][0])}"
    if matrices := one.whole - stack.whole:
        raise ValueError(
            f"tx updates one layer's {name(min(matrices))} not element by element"
            " (Muon's matrix products), and the stack of all layers in another way:"
            " with split_layers use a transformation such as paged_adamw, paged_lion or"
            " paged_sgd."
        )
    if stack.whole:
        for number in sorted(stack.whole):
            if not goes_in_slabs(flat[number][1]):
                raise ValueError(
                    f"tx updates {name(number)} not element by element, but by norms or"
                    " factors: of the stack of all layers they are not those of each"
                    " layer. With split_layers use a transformation such as"
                    " paged_adamw, paged_lion or paged_sgd."
                )
        return  # the step refuses it
    if stack.differences(one):
        warnings.warn(
            "tx treats parameters of one layer otherwise than their stack of all"
            " layers, which it is given: a mask or label is computed from shapes"
            " (x.ndim > 1), and a stack has one axis more. Compute it from the"
            " parameters' names, or give it as a tree of bools.",
            stacklevel=4,
        )


def _one_axis_less(x: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One layer's axes with all layers' values: as many as those have codes or none."""
    length, *axes = x.shape
    axes = [length * axes[0], *axes[1:]] if axes else [length]
    return jax.ShapeDtypeStruct(axes, x.dtype)


def _look(
    tx: optax.GradientTransformation, params: PyTree, numbers: list[int]
) -> Programs:
    """What an update computes, as if nothing was paged."""
    tx = optax.with_extra_args_support(tx)
    shapes = [x.shape for x in jax.tree.leaves(params)]
    with within(types_only=True):
        state = jax.eval_shape(lambda params: tx.init(params), params)

    def update(
        i: LayerIndex, gradients: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        made, new = tx.update(gradients, state, params)
        if [x.shape for x in jax.tree.leaves((made, params))] != 2 * shapes:
            raise _ForStacksError
        return made, new

    with within(seen_through=True):
        return Programs.of(update, params, state, params, numbers, str)
