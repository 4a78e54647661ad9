"""One layer's gradients at a time: the workspace, and the step that uses it.

`step` is the whole. `backward_update` updates each layer as its gradients are computed,
`host_gradients` when all of them are on the host, `deferred_update` in the next step.
`layerwise_model` is what users write. `forward` runs it and differentiates it, `kept`
stores what is kept of each layer; `backward` goes through all layers, `dependencies`
finds what has gradients.
`layer_optimizer` applies the transformation to one layer: in the loss's `layer_tree` by
`tree_update`, where `same_updates` finds the layers that are updated alike; in stacks
that are the model's own by the `programs` of the whole tree. `tree_init` makes the
state, `layered_state` finds a layer's moments. `overlapped_update` updates a layer
while another one is computed, in the segments of `overlap`. `weights` and `slabs` fetch
a layer and put it back. `loss` and `clipping` are what a step measures.
`step_arguments` checks what it gets, `parameters` how layers are stacked.
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
