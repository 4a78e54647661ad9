"""A model as three functions: prologue, layer and epilogue."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.layerwise.forward import (
    ModelFunctions,
    check_same_input,
    on_automatic_axes,
    on_explicit_axes,
)
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.loss import WeightedLoss, has_metrics, loss_and_metrics, over
from paged_optax.layerwise.parameters import (
    Partition,
    from_numpy,
    placed_shape,
    stack_length,
    widest,
)
from paged_optax.layerwise.slices import on_device
from paged_optax.layerwise.tree_update import init_stacked
from paged_optax.layerwise.workspace import GradientWorkspace
from paged_optax.state.restore import abstract_state, placed_as


@dataclasses.dataclass(frozen=True)
class LayerwiseModel:
    """A model that `layerwise_step` trains, as three functions.

    `split_layers` builds one from an ordinary loss. If there are frozen parameters,
    they are the functions' second argument: `prologue(rest, frozen_rest, batch)`,
    `layer(weights, frozen_weights, x, context, i)` and
    `epilogue(rest, frozen_rest, x, kept, batch)`.

    Attributes:
      prologue: `prologue(rest, batch)` returns the first layer's input, and a context
        for all layers (masks, rotary tables, dropout keys, stacked tables to index by
        layer), or None. `rest` has the parameters outside the layers, by name; they are
        trained through the context too.
      layer: `layer(weights, x, context, i)` returns the next layer's input, and outputs
        to keep for the epilogue (a balancing loss), or None. `i` is the layer's number,
        to fold into keys. Use `jax.checkpoint` to recompute parts of a layer within
        its own backward pass.
      epilogue: `epilogue(rest, x, kept, batch)` returns the loss, or the loss and
        metrics. The loss is a mean, or a sum and its weight: a `WeightedLoss`. `kept`
        has the kept outputs of all layers, stacked.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> model = po.LayerwiseModel(
      ...     lambda rest, batch: (batch, None),
      ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
      ...     lambda rest, x, kept, batch: jnp.mean((x - 1.0) ** 2),
      ... )
      >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
      >>> float(model.loss(params, jnp.zeros((8, 64))))
      1.0
    """

    prologue: Callable[..., tuple[PyTree, PyTree]]
    layer: Callable[..., tuple[PyTree, PyTree]]
    epilogue: Callable[..., PyTree]

    @property
    def layer_tree(self) -> LayerTree | None:
        """The loss's own tree; None if it is the tree of stacks."""
        return None

    def init(self, tx: optax.GradientTransformation, params: PyTree) -> optax.OptState:
        """Initializes the state of `tx` for stacked parameters.

        Args:
          tx: The transformation.
          params: All parameters, the layers' stacked, or their shapes.

        Returns:
          The state of `tx.init` for the loss's own parameters, with all layers' moments
          stacked like the parameters. Of shapes, its shapes and placements: the target
          of a restore.

        Raises:
          ValueError: If the layers are not stacked, or if `tx.init` combines them.
        """
        params = from_numpy(params)
        tree, leaves = self.layer_tree, jax.tree.leaves(params)
        types = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        init = functools.partial(abstract_state, tx) if types else tx.init
        if tree is None:
            return init(params)
        if tree.length:
            return init_stacked(tx, tree, params)
        return tree.stack(init(tree.unstack(params, list)), list)

    def place_state(
        self, tx: optax.GradientTransformation, state: PyTree, params: PyTree
    ) -> optax.OptState:
        """Places a state's arrays where `init` would create them.

        `paged_optax.place_state` with `tx` would take the stacks for parameters of
        their own: Muon, masks by shape and codecs have another state for these.

        Args:
          tx: The transformation.
          state: Its state for stacked parameters, from pickle or a restore.
          params: All parameters, the layers' stacked, or their shapes.

        Returns:
          The state.

        Raises:
          ValueError: If it is not a state of `tx` for these parameters.
        """
        target = self.init(tx, jax.tree.map(placed_shape, params))
        return placed_as(target, state)

    def functions(
        self, params: Partition, frozen: Partition | None, activations_on_host: bool
    ) -> ModelFunctions:
        """Returns the three functions for parameters of these types; steps call it.

        Args:
          params: The parameters, or their types.
          frozen: The frozen parameters. If None, the functions take none.
          activations_on_host: If true, the layers' inputs are in host memory.

        Returns:
          The functions.
        """
        calls = self.prologue, self.layer, self.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def workspace(
        self,
        params: PyTree,
        *,
        accumulate: str = "*norm*",
        dtype: DTypeLike | None = None,
        host_dtype: DTypeLike | None = None,
        device_dtype: DTypeLike | None = None,
        rest: PyTree | bool | None = None,
        layers: str = "layers",
    ) -> GradientWorkspace:
        """Allocates the workspace for all parameters.

        Args:
          params: All parameters, the layers' stacked, or their shapes.
          accumulate: See `GradientWorkspace.allocate`.
          dtype: See `GradientWorkspace.allocate`.
          host_dtype: See `GradientWorkspace.allocate`.
          device_dtype: See `GradientWorkspace.allocate`.
          rest: See `GradientWorkspace.allocate`; True uses all parameters outside the
            layers.
          layers: The key of the layers' parameters.

        Returns:
          The workspace, all zeros.

        Raises:
          ValueError: See `GradientWorkspace.allocate`.
        """
        if self.layer_tree is not None and self.layer_tree.length:
            self.layer_tree.stacked_leaves(params)
        partition = Partition.create(params, layers)
        if isinstance(rest, bool):
            rest = partition.rest if rest else None
        return GradientWorkspace.allocate(
            partition.layers,
            accumulate=accumulate,
            dtype=dtype,
            host_dtype=host_dtype,
            device_dtype=device_dtype,
            rest=rest,
        )

    def loss(
        self,
        params: PyTree,
        *frozen_and_batch: PyTree,
        layers: str = "layers",
    ) -> PyTree:
        """Returns the model's loss, for `jax.grad` and for evaluation.

        Stacks in host memory are fetched one layer at a time. Their gradients are in
        host memory too.

        Args:
          params: All parameters, the layers' stacked.
          *frozen_and_batch: The batch; before it the frozen parameters, if there are
            any.
          layers: The key of the layers' parameters.

        Returns:
          The loss, or the loss and metrics if `epilogue` returns both. A `WeightedLoss`
          is returned as the total divided by the weight.

        Raises:
          ValueError: If `params` is no mapping with that key, or if the layers' stacks
            have different lengths.
        """
        run = functools.partial(self._loss, layers)
        return on_automatic_axes(run, from_numpy((params, *frozen_and_batch)), None)

    def _loss(self, layers: str, params: PyTree, *frozen_and_batch: PyTree) -> PyTree:
        *frozen_params, batch = frozen_and_batch
        partition = Partition.create(params, layers)
        count = stack_length(partition.layers)
        frozen = None
        if frozen_params:
            frozen = Partition.of_frozen(frozen_params[0], layers, count)
        model = self.functions(partition, frozen, False)
        model = on_explicit_axes(model, partition, batch, False)
        x, context = model.run_prologue(partition.rest, batch)

        def run(
            x: PyTree[Array],
            iteration: tuple[Int[Array, ""], PyTree[Array], PyTree[Array]],
        ) -> tuple[PyTree[Array], PyTree[Array]]:
            i, *stacks = iteration
            weights, fixed = jax.tree.map(on_device, stacks)
            output, kept = model.run_layer(weights, fixed, x, context, i)
            check_same_input(x, output)
            return output, kept

        # The stacks are scanned over. If they were indexed, the gradients of those in
        # host memory would be added up there, where nothing can compute.
        iterations = jnp.arange(count), partition.layers, frozen and frozen.layers
        x, kept = lax.scan(run, x, iterations)
        output = model.run_epilogue(partition.rest, x, kept, batch)
        value, metrics = loss_and_metrics(output)
        if isinstance(value, WeightedLoss):
            total, weight = map(jnp.asarray, value)
            value = over(total, lax.stop_gradient(weight).astype(widest(total)))
        return (value, metrics) if has_metrics(output) else value
