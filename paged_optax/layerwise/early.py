"""Parameters beside the layers' that are updated together with them, in parts.

The gradient of an output matrix is known before those of the layers: the prologue does
not use it. So its moments need not wait: a part of them travels with each layer's.
"""

from collections.abc import Callable

import jax
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import on_host
from paged_optax.backend.meshes import on_one_device
from paged_optax.backend.variables import as_pure
from paged_optax.engine.stored_array import Stored
from paged_optax.layerwise.learned import used
from paged_optax.layerwise.model import Rest
from paged_optax.layerwise.parts import Parts
from paged_optax.layerwise.stacks import length_of
from paged_optax.state.leaves import is_quantized
from paged_optax.transform.codec_rules import SMALLEST_CODED
from paged_optax.transform.trees import parameter_of

# Rows of a part of a parameter: whole tiles of a TPU, of words of four codes each too.
_ROWS = 32


def early_leaves(
    prologue: Callable[[Rest, PyTree], PyTree],
    params: PyTree,
    parts: Parts,
    state: PyTree,
    batch: PyTree,
) -> list[int]:
    """The numbers of the parameters that can be updated so.

    Args:
      prologue: The model's.
      params: All parameters.
      parts: The same, parted.
      state: The state.
      batch: One micro-batch.
    """
    paths = [
        path for path, _ in jax.tree_util.tree_flatten_with_path(as_pure(params))[0]
    ]
    flat, _ = jax.tree_util.tree_flatten_with_path(as_pure(state), is_leaf=is_quantized)
    owners = parameter_of([path for path, _ in flat], paths)
    length = length_of(parts.layers)
    seen = parts.joined(
        [True] * parts.in_layers.count(True),
        parts.others(used(prologue, parts.rest, batch)),
    )
    found: list[int] = []
    for n, x in enumerate(jax.tree.leaves(params)):
        moments = [
            y
            for (_, y), owner in zip(flat, owners, strict=True)
            if owner == n and jax.tree.leaves(y)[0].ndim
        ]
        if not seen[n] and _divide(x, moments, length):
            found.append(n)
    return found


def _divide(x: Array, moments: list[Stored], parts: int) -> bool:
    """Whether a parameter and its moments divide into parts of whole rows.

    Args:
      x: The parameter.
      moments: What the state has of it.
      parts: How many parts.
    """
    arrays = [y for moment in moments for y in jax.tree.leaves(moment)]
    if not any(map(on_host, arrays)) or on_host(x) or x.ndim < 2:
        return False
    large = x.size // parts >= SMALLEST_CODED
    whole = x.shape[0] % (parts * _ROWS) == 0
    return (
        on_one_device(arrays)
        and large
        and whole
        and all(y.ndim >= 2 and y.shape[0] % (parts * _ROWS // 4) == 0 for y in arrays)
    )
