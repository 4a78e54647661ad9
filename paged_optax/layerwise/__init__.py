"""One layer's gradients at a time: the workspace, and the step that uses it."""

from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.step import layerwise_step
from paged_optax.layerwise.workspace import GradientWorkspace, offload

__all__ = ["GradientWorkspace", "LayerwiseOutput", "layerwise_step", "offload"]
