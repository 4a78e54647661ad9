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
    r"""Takes an ordinary loss apart, to train the model layer by layer.

    The loss is traced, and nobody rewrites the model. Its equations are cut between one
    layer's parameters and the next one's, where the fewest bytes are alive:

    .. math::
        x_0, c = \mathrm{prologue}(\theta, b), \quad
        x_{i+1} = \mathrm{layer}(\theta_i, x_i, c, i), \quad
        \mathrm{loss} = \mathrm{epilogue}(\theta, x_L, b).

    Layers are subtrees of the parameters that are numbered and alike (a list of
    modules, Linen's `Block_0`, Haiku's `h_0`, flat names such as `"layers.0.up"`);
    lists by kind, such as `params["mlp"][n]`; or stacked parameters that a
    `jax.lax.scan` goes over (`nn.scan`, `nnx.scan`), or that a loop of Python indexes
    by the layers' numbers (`stack[n]`). Layers of several kinds become the branches of
    a `jax.lax.switch`. What differs between layers of one kind (literals, keys, masks)
    is looked up in a table. The first or last ones that are unlike stay outside.
    `print(model)` is a table of what was found.

    A `jax.checkpoint` around a whole layer is left out: the step computes each layer
    again anyway. Those within a layer stay.

    Args:
      loss: `loss(params, batch)`, or `loss(params, frozen, batch)`, as for `jax.grad`.
        It returns the loss, or the loss and metrics; the loss is a number or a
        `WeightedLoss`.
      params: The parameters, or their `jax.ShapeDtypeStruct`s.
      batch: A batch, or its shapes; with `accumulate=True` a micro-batch. For other
        shapes and dtypes, and parameters of others, it is traced again, as by `jit`.
      layers: The path or prefix of the layers, such as `"layers"` or `"model/h_*"`;
        None: the largest ones that are found.
      frozen: Parameters that are not trained, or their shapes.

    Returns:
      The model: what `layerwise_step` takes, and `stack`, `unstack` and `workspace`.

    Raises:
      ValueError: If no layers are found, or if they are not computed one after the
        other. The message names the line of the model, and the way out.
      TypeError: If `loss` cannot be called so, or if a parameter has no gradient.

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
    # Types are kept, and no arrays: for other types the loss is traced again.
    params, frozen = jax.tree.map(shape_dtype, (params, frozen))
    # A function of its own: what `loss` reads besides its arguments may have changed.
    function = jax.jit(lambda *arguments: loss(*arguments))
    functions = SplitFunctions.of(Loss(function, layers, params, frozen), batch)
    return SplitModel(
        functions.prologue, functions.layer, functions.epilogue, functions
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SplitModel(LayerwiseModel):
    """A loss that is taken apart; what `split_layers` returns."""

    _functions: SplitFunctions

    def stack(
        self,
        params: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """The parameters with those of the layers stacked, leaf by leaf.

        What is outside the layers is not copied: a step that donates what it is given
        deletes these arrays of `params` too.

        Args:
          params: The parameters, as the loss takes them, or their shapes. NumPy arrays
            go to the host without a detour, a stack at a time; so does what NumPy makes
            an array of (`shape`, `dtype` and `__array__`), which is read only then.
          on_host: Whether the layers' parameters go to host memory; see `offload`.
            `"all"`: the others too, such as embeddings. They are then fetched for the
            prologue, the epilogue and their update, and their gradients wait on the
            host in between.
          min_size: Leaves of fewer bytes, those of layers of fewer a layer, stay on the
            device; so do a layer's vectors.

        Returns:
          `{"layers": ..., "rest": ...}`: nested dicts of the paths' names. Each leaf of
          the layers has a leading axis for them.

        Raises:
          ValueError: If the tree is not the one that was split.
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
        """The frozen parameters, stacked as `stack` does: a step takes them last.

        Args:
          frozen: The frozen parameters, as the loss takes them, or their shapes.
          on_host: As for `stack`.
          min_size: As for `stack`.

        Returns:
          As of `stack`.

        Raises:
          ValueError: If the tree is not the one that was split.
        """
        stacking = self._functions.stacking(frozen=True)
        return stacking.stacked(frozen, on_host=on_host, min_size=min_size)

    @property
    def layer_tree(self) -> LayerTree | None:
        """The loss's own tree beside the stacks; None: the loss has the stacks."""
        return self._functions.stacking(frozen=False).layer_tree

    def functions(
        self, params: Partition, frozen: Frozen | None, activations_on_host: bool
    ) -> ModelFunctions:
        """As for `LayerwiseModel`; the loss is traced again for types that are new."""
        whole = lambda x: x and {**x.rest, "layers": x.layers}
        x = self._functions.given(whole(params), whole(frozen))
        calls = x.prologue, x.layer, x.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def init(self, tx: optax.GradientTransformation, params: PyTree) -> optax.OptState:
        """Makes the state of `tx` for stacked parameters.

        The state is that of `tx.init` for the parameters as the loss takes them, in
        which the moments of all layers are stacked as `stack` does. It is made layer by
        layer.

        Args:
          tx: The transformation.
          params: What `stack` returned, or their shapes.

        Returns:
          The state, or its shapes.
        """
        tree = self.layer_tree
        return tx.init(params) if tree is None else init_stacked(tx, tree, params)

    def stack_state(self, state: PyTree) -> PyTree:
        """Stacks the state of an ordinary step, for a layerwise one to go on with.

        Args:
          state: What `tx.init` made for the parameters as the loss takes them, or an
            ordinary step returned.

        Returns:
          What `init` would have made. What was on the host is there.
        """
        tree = self.layer_tree
        return state if tree is None else tree.stack(state, stack_moments)

    def unstack_state(self, state: PyTree) -> PyTree:
        """The state of an ordinary step; undoes `stack_state`.

        Args:
          state: What `init` or `stack_state` made, or a layerwise step returned.

        Returns:
          The state that `tx.init` makes for the parameters as the loss takes them.
        """
        tree = self.layer_tree
        if tree is None:
            return state
        return tree.unstack(state, lambda x: unstack_leaf(x, tree.length))

    def unstack(self, params: PyTree) -> PyTree:
        """The parameters as the loss takes them.

        Args:
          params: What `stack` returned, or a step.

        Returns:
          The tree. What was on the host is there.
        """
        return self._functions.stacking(frozen=False).unstacked(params)

    def __repr__(self) -> str:
        split = self._functions.split
        return f"SplitModel({split.layers.name!r}, {len(split.pieces.kind_of)} layers)"

    def __str__(self) -> str:
        return summary(self._functions.loss, self._functions.split)


def _refuse_arguments(loss: Callable[..., PyTree], frozen: PyTree | None) -> None:
    """Refuses a loss that cannot be called with these trees of parameters."""
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
        pass  # a function that does not say what it takes


def _refuse_integers(params: PyTree) -> None:
    """Refuses parameters that have no gradient."""
    for path, x in nondifferentiable(params):
        random = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jnp.uint32
        raise TypeError(
            f"params{keystr(path)} has dtype {x.dtype} and no gradient: pass it in"
            " frozen=, to loss(params, frozen, batch), or with the batch."
            + random
            * f" Frozen, a count or key is the same in each step. {RESEED}"
        )
