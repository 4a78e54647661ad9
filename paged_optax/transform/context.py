"""What an update is told besides its arguments.

Optax's wrappers do not hand every argument on, so what a wrapper or a trace has to say
to the paged transformations inside is said around the call. There is one context in one
variable, and all of it is in the key of JAX's trace caches: an inner `jax.jit` does not
take what it traced in one context for what another calls for.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import Array

#: A bool known when traced, or one known on the device.
Gate = bool | Array


@dataclasses.dataclass(frozen=True)
class Context:
    """All that a paged transformation is told besides its arguments.

    Attributes:
      gate: Whether updates happen.
      restart: Whether the state becomes what `init` makes, after an update.
      fetched: Whether the moments of an update are on the device on purpose.
      layer: The layer that they are of, if they are of one of a stack.
      seen_through: Whether a trace only looks at what a chain of transformations
        computes: updates compute as if nothing were paged, and moments that a codec
        stores are zeros.
      record: Called by every paged `init` with its configuration, and with what
        describes its moments.
    """

    gate: Gate = True
    restart: Gate = False
    fetched: bool = False
    layer: Any = None
    seen_through: bool = False
    record: Callable[[Any, Any], None] | None = None


_NOTHING_SAID = Context()
_current = contextvars.ContextVar("paged_optax", default=_NOTHING_SAID)
_trace_key = jax.make_user_context(default_value=None)


def current() -> Context:
    """The context around."""
    return _current.get()


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Changes fields of the context for what is called within."""
    context = dataclasses.replace(current(), **changes)
    values = (getattr(context, field.name) for field in dataclasses.fields(context))
    # A traced value is equal to itself alone, and JAX's caches must not keep it alive.
    key = tuple(object() if isinstance(x, Array) else x for x in values)
    token = _current.set(context)
    try:
        with _trace_key(key):
            yield
    finally:
        _current.reset(token)
