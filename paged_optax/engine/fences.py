"""What is kept apart, so that no compiler moves more than pages."""

from collections.abc import Callable, Sequence

from jax import lax

from paged_optax.engine.streamed import Shared


def each(
    function: Callable[[list[Shared]], Sequence[Shared]],
    values: Sequence[Shared],
    chosen: Sequence[bool],
) -> list[Shared]:
    """Applies a function to the chosen values together."""
    found = [x for x, yes in zip(values, chosen, strict=True) if yes]
    made = iter(function(found))
    return [next(made) if yes else x for x, yes in zip(values, chosen, strict=True)]


def fetched(values: Sequence[Shared], travelled: Sequence[bool]) -> list[Shared]:
    """Pages from the host, kept apart from what is computed with them.

    On a TPU the results then take over the fetched pages (16 leaves of 4096x4096,
    8 MiB pages, v5e: 19 MiB of scratch instead of 27). XLA:CPU would copy.
    """

    def fence(pages: list[Shared]) -> Sequence[Shared]:
        return lax.platform_dependent(
            pages, cpu=lambda pages: pages, default=lax.optimization_barrier
        )

    return each(fence, values, travelled)
