"""Training steps that hold one layer's gradients at a time.

The step on one device, in the order in which its modules are read: `step`, `updates`,
`sweep`, `sinks`, `layer_optimizer`, `tree_update`::

    x, context = prologue(rest, batch)                 # sweep.ForwardPass
    for i in range(length):
        inputs[i], x = x, layer(weights[i], x, context)
    loss, (by_rest, ct) = vjp(epilogue)(rest, x)       # sweep.BackwardPass
    for i in reversed(range(length)):
        gradients, ct = vjp(layer)(weights[i], inputs[i], context)(ct)
        workspace = clip(gradients)                    # sinks.WorkspaceSink
        weights[i], moments[i] = update(workspace, moments[i], weights[i])
    by_rest += vjp(prologue)(rest, batch)(ct)
    rest, vectors = update(by_rest, ...)               # LayerOptimizer.update_unsliced

Other schedules, and details that can be read later:

- `host_updates` updates after the norm of all gradients, or in the next step; `overlap`
  while another layer is computed, in `segments`. `clipping` measures and clips.
- `layer_tree` maps the loss's own tree to stacks; `same_updates` finds layers of one
  kind, and `layered_state` lists the state's leaves.
- `layerwise_model`, `forward`: the model's functions, and their meshes; `dependencies`:
  the leaves that have gradients, and residuals; `loss`: the loss.
- `parameters`, `slices`: stacked parameters, and access to their slices.
- `step_arguments` checks a step's arguments; `workspace` has buffers of gradients.
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
