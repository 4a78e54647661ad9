"""Splits an ordinary loss into prologue, layers and epilogue.

`split_layers` is the public function. `numbered` and `scans` list candidates for the
layers: equal subtrees of the parameters, and stacks that are scanned over or indexed
layer by layer. `split_loss` traces a loss and tries them, the largest first.
`dependence` follows parameters through the loss, `cuts` chooses the cuts, `stages`
assigns each equation to a layer, and `assembly` groups equal layers and assigns the
carry. `pieces` computes the prologue, a layer and the epilogue of one trace,
`functions` chooses the trace for a batch, `stacking` stacks parameters, and `summary`
prints the table.
"""

from paged_optax.splitting.dependence import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
