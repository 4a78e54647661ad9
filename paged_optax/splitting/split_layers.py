"""`split_layers`: a user's loss as prologue, layer and epilogue; its table."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import shape_dtype
from paged_optax.backend.validation import (
    check_arrays,
    check_function,
    nondifferentiable,
)
from paged_optax.layerwise.forward import ModelFunctions
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.tree_init import init_stacked
from paged_optax.layerwise.weights import Frozen
from paged_optax.splitting.functions import SplitFunctions
from paged_optax.splitting.split_loss import RESEED, Loss
from paged_optax.splitting.stacking import stack_moments, unstack_leaf
from paged_optax.splitting.summary import summary


def split_layers(
    loss: Callable[..., PyTree],
    params: PyTree,
    batch: PyTree,
    *,
    layers: str | None = None,
    frozen: PyTree | None = None,
) -> "SplitModel":
    r"""Splits a loss into prologue, layer and epilogue, for layerwise training.

    The loss is traced; the model's code stays as it is. Its equations are cut between
    one layer's parameters and the next one's, where the fewest bytes are alive:

    .. math::
        x_0, c = \mathrm{prologue}(\theta, b), \quad
        x_{i+1} = \mathrm{layer}(\theta_i, x_i, c, i), \quad
        \mathrm{loss} = \mathrm{epilogue}(\theta, x_L, b).

    Layers are numbered subtrees of the parameters with equal shapes (a list of modules,
    Linen's `Block_0`, Haiku's `h_0`, flat names such as `"layers.0.up"`); lists by
    kind, such as `params["mlp"][n]`; or stacked parameters that a `jax.lax.scan`
    iterates over (`nn.scan`, `nnx.scan`), or that a Python loop indexes (`stack[n]`).
    Layers of several kinds become branches of a `jax.lax.switch`. Literals, keys and
    masks that differ between layers are read from a table. First or last layers that
    differ stay outside. `print(model)` is a table of the result.

    A `jax.checkpoint` around a whole layer is removed, because the step recomputes each
    layer anyway. Checkpoints within a layer stay.

    Args:
      loss: `loss(params, batch)`, or `loss(params, frozen, batch)`, as for `jax.grad`.
        It returns the loss, a number or a `WeightedLoss`, or a pair of loss and
        metrics.
      params: The parameters, or their `jax.ShapeDtypeStruct`s.
      batch: A batch, or its shapes; with `accumulate=True` a micro-batch. The loss is
        traced again for other shapes and dtypes, as under `jit`.
      layers: The path or prefix of the layers, such as `"layers"` or `"model/h_*"`;
        None: the largest.
      frozen: Parameters that are not trained, or their shapes.

    Returns:
      The model for `layerwise_step`, with `stack`, `unstack` and `workspace`.

    Raises:
      ValueError: If there are no layers, or if they are not computed sequentially. The
        message has the line of the model, and the way out.
      TypeError: If `loss` has another signature, or if a parameter has no gradient.

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
    _refuse_arguments(loss, frozen)
    _refuse_integers(params)
    if layers is not None and not isinstance(layers, str):
        raise TypeError(f"layers={layers!r} is not a path: pass one, as 'layers'.")
    params, frozen = jax.tree.map(shape_dtype, (params, frozen))
    # A new function, as globals that `loss` reads may have changed.
    function = jax.jit(lambda *arguments: loss(*arguments))
    functions = SplitFunctions.of(Loss(function, layers, params, frozen), batch)
    return SplitModel(
        functions.prologue, functions.layer, functions.epilogue, functions
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SplitModel(LayerwiseModel):
    """The model that `split_layers` returns."""

    _functions: SplitFunctions

    def stack(
        self,
        params: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """Stacks the layers' parameters along a new leading axis.

        Other parameters are not copied: a step that donates its arguments deletes them
        in `params` too.

        Args:
          params: The parameters of the loss, or their shapes. NumPy arrays, and objects
            with `shape`, `dtype` and `__array__`, are copied to the host directly, a
            stack at a time.
          on_host: If True, the layers' parameters are placed in host memory; see
            `offload`. `"all"`: all parameters, such as embeddings, which are then
            fetched for the prologue, the epilogue and their update; their gradients are
            on the host in between.
          min_size: Smaller leaves, and layers' vectors, stay on the device. It is the
            size of one layer's leaf.

        Returns:
          `{"layers": ..., "rest": ...}`: nested dicts of the paths' names, with a
          leading axis for the layers.

        Raises:
          ValueError: If the tree differs from the split one.
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
        """Stacks the frozen parameters, which a step takes last.

        Args:
          frozen: The frozen parameters of the loss, or their shapes.
          on_host: See `stack`.
          min_size: See `stack`.

        Returns:
          See `stack`.

        Raises:
          ValueError: If the tree differs from the split one.
        """
        stacking = self._functions.stacking(frozen=True)
        return stacking.stacked(frozen, on_host=on_host, min_size=min_size)

    @property
    def layer_tree(self) -> LayerTree | None:
        """The loss's own tree with its stacks; None if the loss has stacks."""
        return self._functions.stacking(frozen=False).layer_tree

    def functions(
        self, params: Partition, frozen: Frozen | None, activations_on_host: bool
    ) -> ModelFunctions:
        """Returns the model's functions, traced again for new types."""
        whole = lambda x: x and {**x.rest, "layers": x.layers}
        x = self._functions.given(whole(params), whole(frozen))
        calls = x.prologue, x.layer, x.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def init(self, tx: optax.GradientTransformation, params: PyTree) -> optax.OptState:
        """Initializes the state of `tx` for stacked parameters, layer by layer.

        It is `tx.init` of the loss's own parameters, with the layers' moments stacked.

        Args:
          tx: The transformation.
          params: The result of `stack`, or its shapes.

        Returns:
          The state, or its shapes.
        """
        tree = self.layer_tree
        return tx.init(params) if tree is None else init_stacked(tx, tree, params)

    def stack_state(self, state: PyTree) -> PyTree:
        """Stacks the state of an ordinary step for a layerwise step.

        Args:
          state: The state of `tx.init` for the loss's own parameters, or of an ordinary
            step.

        Returns:
          A state like that of `init`, in the same memories.
        """
        tree = self.layer_tree
        return state if tree is None else tree.stack(state, stack_moments)

    def unstack_state(self, state: PyTree) -> PyTree:
        """Undoes `stack_state`.

        Args:
          state: The state of `init`, `stack_state` or a layerwise step.

        Returns:
          A state like that of `tx.init` for the loss's own parameters.
        """
        tree = self.layer_tree
        if tree is None:
            return state
        return tree.unstack(state, lambda x: unstack_leaf(x, tree.length))

    def unstack(self, params: PyTree) -> PyTree:
        """Undoes `stack`.

        Args:
          params: The result of `stack`, or of a step.

        Returns:
          The tree of the loss, in the same memories.
        """
        return self._functions.stacking(frozen=False).unstacked(params)

    def __repr__(self) -> str:
        split = self._functions.split
        return f"SplitModel({split.layers.name!r}, {len(split.pieces.kind_of)} layers)"

    def __str__(self) -> str:
        return summary(self._functions.loss, self._functions.split)


def _refuse_arguments(loss: Callable[..., PyTree], frozen: PyTree | None) -> None:
    names = ("params", "batch") if frozen is None else ("params", "frozen", "batch")
    try:
        inspect.signature(loss).bind(*names)
    except TypeError as error:
        call, way_out = ", ".join(names), "takes parameters that are not trained"
        raise TypeError(
            f"loss is called as loss({call}), and that fails: {error}. If it {way_out},"
            " it is loss(params, frozen, batch), and split_layers is given frozen=."
        ) from None
    except ValueError:
        pass  # a function without a signature


def _refuse_integers(params: PyTree) -> None:
    for path, x in nondifferentiable(params):
        random = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jnp.uint32
        raise TypeError(
            f"params{keystr(path)} has dtype {x.dtype} and no gradient: pass it in"
            " frozen=, to loss(params, frozen, batch), or with the batch."
            + random
            * f" Frozen, a count or key is the same in each step. {RESEED}"
        )
