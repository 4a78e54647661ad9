"""An ordinary loss, taken apart into layers.

`split_layers` is the whole. `find` says which parameters belong to which layer, of
subtrees that are numbered; `scanned` finds scans over stacked parameters. `traced`
tries what was found. `depends` follows parameters through the loss, `cut` says where it
is cut, `match` whether pieces are alike, `stages` which layer each equation belongs to,
`assemble` what goes from layer to layer. `pieces` is the result, of which `build` makes
three functions. `stacking` stacks parameters, and `words` prints what was found.
"""

from paged_optax.splitting.depends import SplitError
from paged_optax.splitting.split_layers import SplitModel, split_layers

__all__ = ["SplitError", "SplitModel", "split_layers"]
