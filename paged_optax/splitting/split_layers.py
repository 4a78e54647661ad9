"""`split_layers`: splits a user's loss into prologue, layer and epilogue."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import running_statistics
from paged_optax.backend.text import keystr
from paged_optax.backend.types import shape_dtype, without_explicit_axes
from paged_optax.backend.validation import (
    check_arrays,
    check_function,
    nondifferentiable,
)
from paged_optax.layerwise.forward import ModelFunctions
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.parameters import Partition
from paged_optax.splitting.functions import SplitFunctions
from paged_optax.splitting.lost_state import STATE_RECIPE
from paged_optax.splitting.split_loss import Loss
from paged_optax.splitting.summary import summary


def split_layers(
    loss: Callable[..., PyTree],
    params: PyTree,
    batch: PyTree,
    *,
    layers: str | None = None,
    frozen: PyTree | None = None,
) -> "SplitModel":
    r"""Splits an ordinary loss into layers, to train the model layer by layer.

    The loss is traced, so that the model's code stays as it is. The equations are cut
    between the parameters of one layer and the next, at the fewest live bytes:

    .. math::
        x_0, c = \mathrm{prologue}(\theta, b), \quad
        x_{i+1} = \mathrm{layer}(\theta_i, x_i, c, i), \quad
        \mathrm{loss} = \mathrm{epilogue}(\theta, x_L, b).

    Layers are numbered, equal subtrees of the parameters (a list of modules, Linen's
    `Block_0`, Haiku's `h_0`, flat names such as `"layers.0.up"`); lists by kind, such
    as `params["mlp"][n]`; or stacked parameters, either scanned over by `jax.lax.scan`
    (`nn.scan`, `nnx.scan`) or indexed in a Python loop by the layers' numbers
    (`stack[n]`). Layers of several kinds become the branches of a `jax.lax.switch`.
    Literals, keys and masks that differ between layers of one kind are read from a
    table. First or last layers with other parameters stay outside. `print(model)` shows
    the result as a table.

    A `jax.checkpoint` around a whole layer is removed, because the step rematerializes
    each layer anyway. A `jax.checkpoint` within a layer stays.

    Args:
      loss: `loss(params, batch)`, or `loss(params, frozen, batch)`, as for `jax.grad`.
        It returns the loss, or the loss and metrics; the loss is a number or a
        `WeightedLoss`.
      params: The parameters, or their `jax.ShapeDtypeStruct`s.
      batch: A batch, or its shapes; with `accumulate=True` a micro-batch. The loss is
        traced again for other shapes and dtypes, like a jitted function.
      layers: The path or prefix of the layers, such as `"layers"` or `"model/h_*"`;
        None selects the largest ones.
      frozen: Parameters that are not trained, or their shapes.

    Returns:
      The model for `layerwise_step`, with `stack`, `unstack` and `workspace`.

    Raises:
      ValueError: If no layers are found, or if they are not computed in sequence. The
        message names the line of the model, and the way out.
      TypeError: If `loss` cannot be called this way, or if a parameter has no gradient.

    Example:
      >>> import jax, jax.numpy as jnp, optax, paged_optax as po
      >>> def loss(params, batch):
      ...     x = params["embed"][batch]
      ...     for layer in params["layers"]:
      ...         x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
      ...     logits = x[:-1] @ params["embed"].T
      ...     labels = batch[1:]
      ...     losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      ...     return losses.mean()
      >>> layer = {"up": jnp.ones((64, 128)) / 64, "down": jnp.ones((128, 64)) / 128}
      >>> params = {"embed": jnp.eye(32, 64), "layers": [layer] * 3}
      >>> model = po.split_layers(loss, params, jnp.arange(16))
      >>> params = model.stack(params)
      >>> tx = po.paged_adamw(1e-3)
      >>> args = params, model.init(tx, params), model.workspace(params), jnp.arange(16)
      >>> step = po.jit_step(po.layerwise_step(model, tx), *args)
      >>> params, state, workspace, output = step(*args)
      >>> params["layers"]["up"].shape, len(model.unstack(params)["layers"])
      ((3, 64, 128), 3)
    """
    check_function("loss", loss)
    check_arrays("params", params)
    _refuse_state(params)
    # Keep types and no arrays: the loss is traced again for other types.
    params, frozen = jax.tree.map(shape_dtype, (params, frozen))
    # A new function, because values that `loss` closes over may have changed.
    function = jax.jit(lambda *args: loss(*args))
    functions = SplitFunctions.create(Loss(function, layers, params, frozen), batch)
    return SplitModel(
        functions.prologue, functions.layer, functions.epilogue, functions
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SplitModel(LayerwiseModel):
    """A loss split into layers, returned by `split_layers`."""

    _functions: SplitFunctions

    def stack(
        self,
        params: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """Stacks the layers' parameters along a new leading axis, leaf by leaf.

        Parameters outside the layers are not copied: a step that donates its arguments
        deletes these arrays of `params` too.

        Args:
          params: The parameters, as for the loss, or their shapes. NumPy arrays are
            copied directly to the host, a stack at a time. Objects with `shape`,
            `dtype` and `__array__` are read only then.
          on_host: Places the layers' parameters in host memory, see `offload`. `"all"`
            places the other parameters there too, such as embeddings. They are then
            fetched for the prologue, the epilogue and their update, and their gradients
            are stored on the host in between.
          min_size: Leaves of fewer bytes (for a stack: bytes a layer) stay on the
            device, and so do a layer's vectors.

        Returns:
          `{"layers": ..., "rest": ...}`: nested dicts of the paths' names. Leaves of
          `"layers"` have a leading axis for the layers.

        Raises:
          ValueError: If the tree differs from the tree that was split.
        """
        stacking = self._functions.stacking(frozen=False)
        return stacking.stacked(params, on_host=on_host, min_size=min_size)

    def stack_frozen(
        self,
        frozen: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """Stacks the frozen parameters, the last argument of a step.

        Args:
          frozen: The frozen parameters, as for the loss, or their shapes.
          on_host: See `stack`.
          min_size: See `stack`.

        Returns:
          The stacks, see `stack`.

        Raises:
          ValueError: If the tree differs from the tree that was split.
        """
        stacking = self._functions.stacking(frozen=True)
        return stacking.stacked(frozen, on_host=on_host, min_size=min_size)

    @property
    def layer_tree(self) -> LayerTree:
        """The loss's own tree mapped to the stacks."""
        return self._functions.stacking(frozen=False).tree

    def functions(
        self, params: Partition, frozen: Partition | None, activations_on_host: bool
    ) -> ModelFunctions:
        """See `LayerwiseModel`. The loss is traced again for new types."""
        full = lambda x: x and {**x.rest, "layers": x.layers}
        x = self._functions.for_types(full(params), full(frozen))
        calls = x.prologue, x.layer, x.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def _loss(self, layers: str, params: PyTree, *frozen_and_batch: PyTree) -> PyTree:
        # The trace has no axes. On the explicit axes of an ambient mesh its jaxprs, as
        # an unrolled scan in a scanned layer, would mix two types (jax 0.10.2).
        with without_explicit_axes():
            return super()._loss(layers, params, *frozen_and_batch)

    def stack_state(self, state: PyTree) -> PyTree:
        """Converts the state of an ordinary step to the state of a layerwise step.

        Args:
          state: The state of `tx.init` for the loss's own parameters, or of an ordinary
            step.

        Returns:
          The state with stacked moments, see `init`. Memory kinds are kept.
        """
        return self._functions.stacking(frozen=False).stacked_state(state)

    def unstack_state(self, state: PyTree) -> PyTree:
        """Converts the state of a layerwise step to the state of an ordinary step.

        Args:
          state: The state of `init`, of `stack_state`, or of a layerwise step.

        Returns:
          The state in the structure of `tx.init` for the loss's own parameters.
        """
        return self._functions.stacking(frozen=False).unstacked_state(state)

    def unstack(self, params: PyTree) -> PyTree:
        """Returns the parameters in the loss's own tree.

        Parameters outside the layers are not copied, see `stack`.

        Args:
          params: Stacked parameters, from `stack` or from a step.

        Returns:
          The tree. Memory kinds are kept.
        """
        return self._functions.stacking(frozen=False).unstacked(params)

    def __repr__(self) -> str:
        split = self._functions.split
        count = len(split.pieces.kind_indices)
        return f"SplitModel({split.layers.name!r}, {count} layers)"

    def __str__(self) -> str:
        return summary(self._functions.loss, self._functions.split)


def _refuse_state(params: PyTree) -> None:
    """Raises if a parameter is an integer, a key or a running statistic."""
    for path, _ in running_statistics(params):
        raise TypeError(
            f"params{keystr(path)} is a running statistic, which no gradient trains."
            f" {STATE_RECIPE}"
        )
    without_gradient = list(nondifferentiable(params))
    if not without_gradient:
        return
    path, x = without_gradient[0]
    random = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jnp.uint32
    words = f" Frozen, a count or key is the same in each step. {STATE_RECIPE}" * random
    if len(without_gradient) == len(jax.tree.leaves(params)):
        words = " Parameters precede the batch: split_layers(loss, params, batch)."
    raise TypeError(
        f"params{keystr(path)} has dtype {x.dtype} and no gradient: pass it in frozen=,"
        f" to loss(params, frozen, batch), or with the batch.{words}"
    )
