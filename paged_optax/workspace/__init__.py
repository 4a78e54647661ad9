"""One layer's gradients at a time: the workspace, and the step that uses it."""

from paged_optax.workspace.layerwise import LayerwiseOutput, layerwise_step
from paged_optax.workspace.workspace import GradientWorkspace, offload

__all__ = ["GradientWorkspace", "LayerwiseOutput", "layerwise_step", "offload"]
