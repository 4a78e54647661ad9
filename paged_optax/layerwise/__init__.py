"""Training steps that hold one layer's gradients at a time.

- `step`: the step; `step_arguments` checks its arguments.
- `updates`: the step that updates each layer at once; `host_updates`: after the norm of
  all gradients, or in the next step; `overlap`: while another layer is computed, in
  `segments`.
- `sweep`: the passes over the layers. `clipping` measures, clips and stores their
  gradients.
- `layer_optimizer`: applies the transformation to one layer. `tree_update` runs it on
  the loss's own tree (`layer_tree`), and initializes its state; `same_updates` finds
  layers of one kind, and `layered_state` lists the state's leaves.
- `layerwise_model`, `forward`: the model's functions, and their meshes; `dependencies`:
  the leaves that have gradients, and residuals; `loss`: the loss.
- `parameters`, `slices`: stacked parameters, and access to their slices.
- `workspace`: buffers of gradients.
"""

from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.loss import LayerwiseOutput, WeightedLoss
from paged_optax.layerwise.parameters import offload
from paged_optax.layerwise.step import LayerwiseStep, layerwise_step
from paged_optax.layerwise.workspace import GradientWorkspace

__all__ = [
    "GradientWorkspace",
    "LayerwiseModel",
    "LayerwiseOutput",
    "LayerwiseStep",
    "WeightedLoss",
    "layerwise_step",
    "offload",
]
