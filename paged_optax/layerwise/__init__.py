"""One layer's gradients at a time: the workspace, and the step that uses it.

`step` is the whole, made of `sweeps` over the layers; `by_host` has those whose
gradients wait on the host, `deferred` those that begin with the last step's update.
`model` differentiates a layer, `backward` goes through all of them, `layer_update`
updates one with the `programs` of the whole tree, `norms` clips. `weights` and `slices`
fetch a layer and put it back. `loss` is a mean, or a sum and a weight. `guard` skips a
step whose gradients are not finite. `checks` looks at what a step is given, `stacks` at
how layers are stacked; `buffers` makes room beside them.

`beside` updates one layer while the gradients of the next one are made. `ahead` updates
one layer while the layer before runs forward. Both divide that computation into
`segments`, and the layer's leaves into `groups`. One group travels beside each segment.
`early` finds what else is updated with the layers. `apart` takes the transformation and
its state apart into layers and the rest.
"""

from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.loss import WeightedLoss
from paged_optax.layerwise.output import LayerwiseOutput
from paged_optax.layerwise.stacks import offload
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
