"""Splits an ordinary loss into prologue, layers and epilogue.

`split_layers` is the public function. Layers are `numbered` subtrees of the parameters,
`scans` over stacked parameters, or stacks that are `indexed`. `split_loss` traces a
loss and tries its layers, the largest first. `dependence` follows parameters through
the loss, `cuts` chooses the cuts, `stages` assigns each equation to a layer, and
`assembly` assigns the carry. `pieces` is the result, which `functions` calls as
prologue, layer and epilogue. `stacking` stacks parameters, and `summary` prints the
table.
"""

from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
