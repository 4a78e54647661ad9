"""What is kept apart, so that no compiler moves more than pages."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from jax import lax

from paged_optax.backend.barriers import barrier
from paged_optax.engine.streamed import LeafBuffers

Value = TypeVar("Value")


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
