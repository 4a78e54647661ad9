"""What is kept apart, so that no compiler moves more than pages."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax import Array, lax
from jaxtyping import PyTree

from paged_optax.backend.arrays import is_traced
from paged_optax.backend.barriers import barrier
from paged_optax.backend.versions import GPU_NEEDS_RAW_INDEX
from paged_optax.engine.streamed import LeafBuffers

Value = TypeVar("Value")
Tree = TypeVar("Tree", bound=PyTree)
Last = TypeVar("Last", bound=PyTree)


def behind(last: Last, given: Tree) -> tuple[Last, Tree]:
    """Keeps a leaf behind the one before it, so that they take memory in turn.

    A loop whose turns XLA:GPU cannot count would do as much, and wait for the host at
    each of its turns.

    Args:
      last: What the leaf before it came to.
      given: The leaf.

    Returns:
      Both.
    """
    if GPU_NEEDS_RAW_INDEX or not is_traced(last):
        return last, given  # there are gates; or each leaf is a program of its own
    leaves, structure = jax.tree.flatten((last, given))
    # Scalars are computed once for all leaves.
    kept = [is_traced(x) and bool(x.shape) for x in leaves]

    def fence(values: list[Array]) -> Sequence[Array]:
        free = lambda values: values
        return lax.platform_dependent(values, cpu=free, tpu=free, default=barrier)

    return structure.unflatten(each(fence, leaves, kept))


def each(
    function: Callable[[list[Value]], Sequence[Value]],
    values: Sequence[Value],
    chosen: Sequence[bool],
) -> list[Value]:
    """Applies a function to the chosen values together."""
    found = [x for x, yes in zip(values, chosen, strict=True) if yes]
    made = iter(function(found))
    return [next(made) if yes else x for x, yes in zip(values, chosen, strict=True)]


def fetched(
    values: Sequence[LeafBuffers], travelled: Sequence[bool]
) -> list[LeafBuffers]:
    """Pages from the host, kept apart from what is computed with them.

    On a TPU the results then take over the fetched pages (16 leaves of 4096x4096,
    8 MiB pages, v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
    """

    def fence(pages: list[LeafBuffers]) -> Sequence[LeafBuffers]:
        return lax.platform_dependent(pages, cpu=lambda pages: pages, default=barrier)

    return each(fence, values, travelled)
