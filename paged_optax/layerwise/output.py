"""What a layerwise step says of itself."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, PyTree


class LayerwiseOutput(NamedTuple):
    """What a step says of itself.

    Attributes:
      loss: The loss, averaged over micro-batches, by their weights if it has any.
      metrics: What `epilogue` returned beside it, or None; of each micro-batch.
      gradient_norm: The global norm of the gradients, before any clipping.
    """

    loss: Float[Array, ""]
    metrics: PyTree
    gradient_norm: Float[Array, ""]
