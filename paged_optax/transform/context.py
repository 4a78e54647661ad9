"""Ambient options of paged transformations inside wrappers and traces.

Optax's wrappers do not forward every argument. A wrapper or a trace with options for
the paged transformations inside sets them in a context around the call. There is one
context variable. All its fields but `shardings` are part of the key of JAX's trace
caches: an inner `jax.jit` traces again in another context.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.types import KeyPath, is_explicit

#: A bool known when traced, or one known on the device.
Gate = bool | Array


@dataclasses.dataclass(frozen=True)
class Visitor:
    """Replaces the work of paged transformations in a trace for types or programs.

    A visited `init` fills its moments with zeros, which are fast to trace, and does not
    warn.

    Attributes:
      init: Receives the `NewState` of every paged `init`.
      update: Receives the `PendingUpdate` of every paged `update`, and returns its
        results; None: updates run as usual.
      mesh: The devices of parameters that are types: every paged `init` remembers their
        shardings, as for arrays. None: it does not.
    """

    init: Callable[[Any], None] | None = None
    update: Callable[[Any], tuple[PyTree, PyTree]] | None = None
    mesh: Mesh | None = None


#: Traces the types of new states.
TYPES = Visitor()


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """Options of the paged transformations inside a call.

    Attributes:
      gate: True if updates happen.
      restart: True if an update ends with the state that `init` makes.
      fetched: True if the moments of an update are on the device on purpose.
      spare_bytes: Bytes that a page may have without raising the peak of memory.
      isolate: True if leaves are isolated even if there is memory for them. A leaf's
        moments are then written while another leaf's are read, and XLA:GPU does not
        hold two more layers of weights from the host (jax 0.12.0.1, Llama-3-8B on a T4:
        0.85 GiB).
      layer: The layer of the moments; None outside of a stack of layers.
      plain: True if `init` and `update` call the inner transformation alone.
      stacks: Paths of parameters and the numbers of their stacks. The moments of a
        stack stay on the device, or none of them.
      paged: True if the caller is a paged transformation, which pages its inner state.
      visitor: A visitor of all paged transformations, or None.
      places: The shardings of the leaves of a step's arguments, for its trace; None for
        a leaf on one device. Empty if all are.
      shardings: Shardings of a traced step's arguments, by the `id` of their tracers,
        with explicit axes that were made automatic. It is no part of JAX's keys: these
        tracers occur only in the step's own trace and in its analysis, which are not
        cached.
    """

    gate: Gate = True
    restart: Gate = False
    fetched: bool = False
    spare_bytes: int = 0
    isolate: bool = False
    layer: ArrayLike | None = None
    plain: bool = False
    stacks: tuple[tuple[KeyPath, int], ...] = ()
    paged: bool = False
    visitor: Visitor | None = None
    places: tuple[Sharding | None, ...] = ()
    shardings: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)


_DEFAULT = TraceContext()
_current = contextvars.ContextVar("paged_optax", default=_DEFAULT)
# JAX's caches include its value in their keys.
_trace_key = jax.make_user_context(default_value=None)


def current() -> TraceContext:
    """Returns the context around the call."""
    return _current.get()


def within(**changes: object) -> contextlib.AbstractContextManager[None]:
    """Changes fields of the context around all calls within."""
    return _entered(dataclasses.replace(current(), **changes))


def without() -> contextlib.AbstractContextManager[None]:
    """Resets the context around calls that are independent of it."""
    return _entered(_DEFAULT)


def known_shardings(
    tracers: Sequence[object], places: Sequence[Sharding | None]
) -> contextlib.AbstractContextManager[None]:
    """Adds shardings of arrays whose types do not have them; None: unknown."""
    pairs = zip(tracers, places, strict=True)
    known = {id(tracer): place for tracer, place in pairs if place is not None}
    return within(shardings={**current().shardings, **known})


def sharding_in_type(x: object) -> NamedSharding:
    """Returns the sharding of an array's type; see `known_shardings`."""
    now, known = jax.typeof(x).sharding, current().shardings.get(id(x))
    if is_explicit(now) or not isinstance(known, NamedSharding):
        return now
    return known if is_explicit(known) else now


@contextlib.contextmanager
def _entered(context: TraceContext) -> Generator[None]:
    def comparable(x: object) -> object:
        # Traced values and callbacks equal themselves alone. JAX's caches must not keep
        # them alive: a new object takes their place.
        alone = isinstance(x, Array)
        if isinstance(x, Visitor):
            alone = x.init is not None or x.update is not None
        return object() if alone else x

    names = [x.name for x in dataclasses.fields(context) if x.name != "shardings"]
    key = tuple([comparable(getattr(context, name)) for name in names])
    token = _current.set(context)
    try:
        with _trace_key(key):
            yield
    finally:
        _current.reset(token)
