"""Where in a user's code an equation was traced."""

import re
from collections.abc import Iterable

from paged_optax.analysis.program import Equation

#: Installed packages whose modules a model is made of: a line of theirs says little.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|flax|haiku|equinox|optax|qwix|paged_optax)[/\\]"
)


def line_of(equation: Equation, nearby: Iterable[Equation] = ()) -> str:
    """The line of the model that an equation was traced from.

    Where a library's module computes it, the model's line that calls the module.

    Args:
      equation: The equation.
      nearby: Others, such as those that take its values. If its own line is not known,
        as within `jnp.clip`, theirs will do.
    """
    equation = next((e for e in (equation, *nearby) if e.line), equation)
    where, traced = equation.where, equation.traced
    traceback = traced and traced.source_info.traceback
    if not traceback or not _LIBRARIES.search(where):
        return where
    frames = traceback.frames
    for place, frame in enumerate(frames):
        if where.startswith(f"{frame.file_name}:"):
            for outer in frames[place:]:
                if not _LIBRARIES.search(outer.file_name):
                    line = f"{outer.file_name}:{outer.line_num}"
                    return f"{line} ({outer.function_name}), which calls {where}"
    return where
