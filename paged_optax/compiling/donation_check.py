"""Whether a program reuses donated buffers, and whether an error left any."""

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import memory_kind, memory_kinds
from paged_optax.backend.types import is_traced
from paged_optax.compiling.arguments import Keys, label, place_of
from paged_optax.compiling.hlo import aliases


class DonationError(ValueError):
    """A donated buffer would not be reused."""


def check_donations(
    compiled: jax.stages.Compiled,
    args: tuple[PyTree, ...],
    keys: Keys,
    donated: tuple[int, ...],
) -> None:
    """Looks every donated buffer up among the aliases of the compiled program."""
    kinds = [
        sharding.memory_kind or memory_kinds()[0]
        for sharding in jax.tree.leaves(compiled.output_shardings)
    ]
    reused = {
        number: kinds[output]
        for number, output in aliases(compiled.as_text() or "").items()
    }
    lost = []
    for number, (path, leaf) in enumerate(
        jax.tree_util.tree_flatten_with_path(args)[0]
    ):
        kept = reused.get(number) == memory_kind(leaf)
        # A Python number has no buffer to lose.
        if path[0].idx in donated and getattr(leaf, "size", 0) and not kept:
            lost.append(f"{place_of(keys, path)} ({jax.typeof(leaf)})")
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one; leave the others out"
            " of donate_argnums and donate_argnames."
        )


def say_what_is_left(
    error: BaseException,
    values: tuple[PyTree, ...],
    keys: Keys,
    donated: tuple[int, ...],
) -> None:
    """Notes on the error of a step whether what was donated to it is still there."""
    gone = [
        label(keys[i])
        for i in donated
        if any(
            isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()
            for x in jax.tree.leaves(values[i])
        )
    ]
    if gone:
        error.add_note(
            f"Donated and gone: {', '.join(gone)}. A step that fails consumes them as"
            " one that succeeds does: restore the last checkpoint."
        )
    elif donated:
        error.add_note(
            "Nothing that was donated is gone: the step can be called with it again."
        )
