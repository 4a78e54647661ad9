"""A model as three functions: what comes before its layers, one layer, what follows."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.backend.validation import check_function
from paged_optax.layerwise.axes import on_its_axes, told_automatically
from paged_optax.layerwise.frozen import Frozen
from paged_optax.layerwise.hosted import on_device
from paged_optax.layerwise.loss import WeightedLoss, has_metrics, over, parted_loss
from paged_optax.layerwise.model import Model, refuse_other_input
from paged_optax.layerwise.norms import widest
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.stacks import from_numpy, length_of
from paged_optax.layerwise.workspace import GradientWorkspace


@dataclasses.dataclass(frozen=True)
class LayerwiseModel:
    """A model that `layerwise_step` trains, as three functions by hand.

    `split_layers` makes one of an ordinary loss. With frozen parameters the functions
    get them as a second argument: `prologue(rest, frozen_rest, batch)`,
    `layer(weights, frozen_weights, x, context, i)` and
    `epilogue(rest, frozen_rest, x, kept, batch)`.

    Attributes:
      prologue: `prologue(rest, batch)` returns the first layer's input, and anything
        that all layers may see (masks, rotary tables, dropout keys; stacked tables to
        be indexed by layer), or None. `rest` is the parameters without the layers, by
        name; it is trained through the context too.
      layer: `layer(weights, x, context, i)` returns the next layer's input, and
        anything to keep of this layer (a balancing loss), or None. `i` is the layer's
        number, to fold into keys. Wrap in `jax.checkpoint` what it should compute again
        within its own backward pass.
      epilogue: `epilogue(rest, x, kept, batch)` returns the loss, or the loss and
        metrics. The loss is a mean, or a sum and its weight: a `WeightedLoss`. `kept`
        has what the layers kept, stacked.

    Raises:
      TypeError: If one of them is not a function.

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

    def __post_init__(self) -> None:
        """Refuses what is no function."""
        for name in ("prologue", "layer", "epilogue"):
            check_function(name, getattr(self, name))

    def check(self, tx: optax.GradientTransformation) -> None:
        """Tells of what `tx` chooses otherwise for a stack than for one layer.

        `layerwise_step` calls it. Of a model by hand nobody knows any parameters but
        the stacked ones: there is nothing to tell.

        Args:
          tx: The transformation.
        """

    def workspace(
        self,
        params: PyTree,
        *,
        accumulate: str = "*norm*",
        dtype: DTypeLike | None = None,
        host_dtype: DTypeLike | None = None,
        rest: PyTree | bool | None = None,
        layers: str = "layers",
    ) -> GradientWorkspace:
        """Allocates the workspace for all parameters.

        Args:
          params: All parameters, the layers' stacked, or their shapes.
          accumulate: As for `GradientWorkspace.allocate`.
          dtype: As there.
          host_dtype: As there.
          rest: As there; True: all parameters but the layers'.
          layers: The key of the layers' parameters.

        Returns:
          The workspace, all zeros.

        Raises:
          ValueError: As `GradientWorkspace.allocate`.
        """
        parts = Parts.of(params, layers)
        if isinstance(rest, bool):
            rest = parts.rest if rest else None
        return GradientWorkspace.allocate(
            parts.layers,
            accumulate=accumulate,
            dtype=dtype,
            host_dtype=host_dtype,
            rest=rest,
        )

    def loss(
        self,
        params: PyTree,
        *frozen_and_batch: PyTree,
        layers: str = "layers",
    ) -> PyTree:
        """The model's loss, for `jax.grad` and to evaluate.

        Stacks in host memory are fetched a layer at a time, and stay there. So do their
        gradients.

        Args:
          params: All parameters, the layers' stacked.
          *frozen_and_batch: The batch; before it the frozen parameters, if there are
            any.
          layers: The key of the layers' parameters.

        Returns:
          The loss, or the loss and metrics where `epilogue` returns both. Of a
          `WeightedLoss` it is the total by the weight.

        Raises:
          ValueError: If `params` is no mapping with that key, or if the layers are not
            stacked alike.
        """
        run = functools.partial(self._loss, layers)
        return told_automatically(run, from_numpy((params, *frozen_and_batch)), None)

    def _loss(self, layers: str, params: PyTree, *frozen_and_batch: PyTree) -> PyTree:
        *given, batch = frozen_and_batch
        parts = Parts.of(params, layers)
        count = length_of(parts.layers)
        frozen = Frozen.of(given[0], layers, count) if given else None
        model = Model(self.prologue, self.layer, self.epilogue, False, frozen)
        model = on_its_axes(model, parts, batch, False)
        x, context = model.enter(parts.rest, batch)

        def run(
            x: PyTree[Array], turn: tuple[Int[Array, ""], PyTree[Array], PyTree[Array]]
        ) -> tuple[PyTree[Array], PyTree[Array]]:
            i, *stacks = turn
            weights, fixed = jax.tree.map(on_device, stacks)
            made, kept = model.through(weights, fixed, x, context, i)
            refuse_other_input(x, made)
            return made, kept

        # The stacks are scanned over. If they were indexed, the gradients of those in
        # host memory would be added up there, where nothing can compute.
        turns = jnp.arange(count), parts.layers, frozen and frozen.layers
        x, kept = lax.scan(run, x, turns)
        made = model.finished(parts.rest, x, kept, batch)
        value, metrics = parted_loss(made)
        if isinstance(value, WeightedLoss):
            total, weight = map(jnp.asarray, value)
            value = over(total, lax.stop_gradient(weight).astype(widest(total)))
        return (value, metrics) if has_metrics(made) else value
