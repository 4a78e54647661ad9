"""A model as three functions: what comes before its layers, one layer, what follows."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int, PyTree

from paged_optax.backend.given import refuse_no_function
from paged_optax.backend.memory import on_host
from paged_optax.layerwise.frozen import Frozen
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.stacks import length_of
from paged_optax.layerwise.weights import Weights
from paged_optax.layerwise.workspace import GradientWorkspace


@dataclasses.dataclass(frozen=True, eq=False)
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
            refuse_no_function(name, getattr(self, name))

    def workspace(
        self,
        params: PyTree,
        *,
        accumulate: str = "*norm*",
        dtype: DTypeLike | None = None,
        host_dtype: DTypeLike | None = None,
        rest: PyTree | None = None,
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
        return GradientWorkspace.allocate(
            parts.layers,
            accumulate=accumulate,
            dtype=dtype,
            host_dtype=host_dtype,
            rest=parts.rest if rest is True else rest,
        )

    def loss(
        self,
        params: PyTree,
        *frozen_and_batch: PyTree,
        layers: str = "layers",
    ) -> PyTree:
        """The model's loss, for `jax.grad` and to evaluate.

        Args:
          params: All parameters, the layers' stacked.
          *frozen_and_batch: The batch; before it the frozen parameters, if there are
            any.
          layers: The key of the layers' parameters.

        Returns:
          What `epilogue` returns.
        """
        *frozen, batch = frozen_and_batch
        parts = Parts.of(params, layers)
        given: tuple[PyTree, ...] = ()
        fixed = None
        if frozen:
            others = Frozen.of(frozen[0], layers, length_of(parts.layers))
            given, fixed = (others.rest,), others.layers
        weights = Weights(parts.layers, fixed)
        x, context = self.prologue(parts.rest, *given, batch)
        # What is on the device is scanned over, so that its gradients are made by
        # layer; of what is on the host a layer is fetched at a time.
        stacks = (weights.stacks, weights.frozen)
        resident = [[None if on_host(y) else y for y in part] for part in stacks]

        def run(
            x: PyTree, turn: tuple[Int[Array, ""], tuple[list[Array | None], ...]]
        ) -> tuple[PyTree, PyTree]:
            i, (here, frozen_here) = turn
            held = lambda part: [None if y is None else y[None] for y in part]
            ahead = held(here), held(frozen_here)
            trained, untrained = weights.of(weights.slabs(weights.stacks, i, ahead))
            slabs = (trained, untrained) if frozen else (trained,)
            return self.layer(*slabs, x, context, i)

        turns = jnp.arange(weights.length), tuple(resident)
        x, kept = lax.scan(run, jax.tree.map(jnp.asarray, x), turns)
        return self.epilogue(parts.rest, *given, x, kept, batch)
