"""Splits an ordinary loss into layers.

`split_layers` is the entry. Layers are `numbered` subtrees of the parameters, `scans`
over stacks, or stacks that are `indexed`. `split_loss` traces a loss and tries
candidate layers, the largest first. `dependence` follows parameters through the loss,
`cuts` divides it between layers, `stages` assigns equations to layers, and `assembly`
builds `pieces`, which `functions` calls as prologue, layer and epilogue. `stacking`
stacks parameters. `summary` prints a table.
"""

from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
