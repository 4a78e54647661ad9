"""Splits an ordinary loss into prologue, layers and epilogue.

`split_layers` is the public function. `numbered`, `scans` and `indexed` list candidates
for the layers: equal subtrees of the parameters, scans over stacks, and stacks that are
indexed layer by layer. `split_loss` traces a loss and tries them, the largest first.
`dependence` follows parameters through the loss, `cuts` chooses the cuts, `stages`
assigns each equation to a layer, and `assembly` groups equal layers and assigns the
carry. `pieces` is the result, which `functions` calls as prologue, layer and epilogue.
`stacking` stacks parameters, and `summary` prints the table.
"""

from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
