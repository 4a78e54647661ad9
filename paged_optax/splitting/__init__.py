"""An ordinary loss, taken apart into layers.

`split_layers` is the whole. Layers are `numbered` subtrees of the parameters, `scans`
over stacked ones, or stacks that are `indexed`. `split_loss` traces a loss and tries
its layers, the largest first. `dependence` follows parameters through the loss, `cuts`
says where it is cut, `stages` which layer each equation belongs to, `assembly` what
goes from layer to layer. `pieces` is the result, and `functions` calls it as prologue,
layer and epilogue. `stacking` stacks parameters,
`summary` is the table.
"""

from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
