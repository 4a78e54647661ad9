"""The context of an update: what it is told besides its arguments.

Optax's wrappers do not forward every argument. A wrapper or a trace that has something
to say to the paged transformations inside sets it in a context around the call. There
is one context in one variable. All of it but `shardings` is part of the key of JAX's
trace caches: an inner `jax.jit` traces again in another context.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike

from paged_optax.backend.types import KeyPath, is_explicit

#: A bool known when traced, or one known on the device.
Gate = bool | Array


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """All that a paged transformation is told besides its arguments.

    Attributes:
      gate: Whether updates happen.
      restart: Whether an update ends with the state that `init` makes.
      fetched: Whether the moments of an update are on the device on purpose.
      spare_bytes: So many bytes a page may have, and the device needs no more memory.
      isolate: Whether leaves are isolated though there is memory for them. A leaf's
        moments then go while another one's come. And of weights that are on the host
        XLA:GPU holds no two layers more (jax 0.12.0.1, Llama-3-8B on a T4: 0.85 GiB).
      layer: The number of the layer that the moments belong to; None if they belong to
        no layer of a stack.
      seen_through: Whether a trace only looks at what a chain of transformations
        computes. Updates then compute as if nothing were paged, and moments that a
        codec stores are zeros.
      plain: Whether paged transformations are those inside them: `init` and `update`
        are theirs, of a state that nothing pages or codes.
      stacks: Paths of parameters, each with the number of its stack, whose moments stay
        on the device together, or none of them.
      types_only: Whether only the types of a new state are looked at. What `init` makes
        page by page is then zeros, which take no time to trace.
      mesh: The devices that parameters are divided over, whose types alone are looked
        at: every paged `init` remembers how, as it does of arrays. None: it does not.
      paged: Whether a paged transformation calls, which pages what is inside it.
      on_update: Every paged `update` only calls it with its `PagedTransformation`, with
        what it would tell of moments that are not where they belong, empty if they all
        are, and with a function that says what all processes must have built alike.
      record: Every paged `init` calls it with its `Configuration`, and with a function
        that describes its moments, a `planned_moments.Describe`.
      places: The shardings of the leaves of a step's arguments, for its trace; None for
        a leaf on one device. Empty if all are.
      shardings: How the arguments of a step that is traced are divided, by the `id` of
        the tracer of each; if its explicit axes were made automatic, as its type said.
        It is no part of JAX's keys: only in the step's own trace, and in that of its
        analysis, which are not kept, are these tracers met.
    """

    gate: Gate = True
    restart: Gate = False
    fetched: bool = False
    spare_bytes: int = 0
    isolate: bool = False
    layer: ArrayLike | None = None
    seen_through: bool = False
    plain: bool = False
    stacks: tuple[tuple[KeyPath, int], ...] = ()
    types_only: bool = False
    mesh: Mesh | None = None
    paged: bool = False
    on_update: Callable[..., None] | None = None
    record: Callable[..., None] | None = None
    places: tuple[Sharding | None, ...] = ()
    shardings: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)


_NOTHING_SAID = TraceContext()
# JAX's caches find what was traced under the key of `_trace_key`. An inner `jax.jit` is
# so traced again in another context.
_current = contextvars.ContextVar("paged_optax", default=_NOTHING_SAID)
_trace_key = jax.make_user_context(default_value=None)


def current() -> TraceContext:
    """The context around the call."""
    return _current.get()


def within(**changes: object) -> contextlib.AbstractContextManager[None]:
    """Changes fields of the context around all calls within."""
    return _entered(dataclasses.replace(current(), **changes))


def known_shardings(
    tracers: Sequence[object], places: Sequence[Sharding | None]
) -> contextlib.AbstractContextManager[None]:
    """Around calls: tells how arrays are divided whose types within do not say it.

    Args:
      tracers: The arrays, as they are within.
      places: How they are divided; None where nothing is known.
    """
    pairs = zip(tracers, places, strict=True)
    told = {id(tracer): place for tracer, place in pairs if place is not None}
    return within(shardings={**current().shardings, **told})


def sharding_in_type(x: object) -> NamedSharding:
    """How an array's type says that it is divided, or said; see `known_shardings`."""
    now, told = jax.typeof(x).sharding, current().shardings.get(id(x))
    if is_explicit(now) or not isinstance(told, NamedSharding):
        return now
    return told if is_explicit(told) else now


def without() -> contextlib.AbstractContextManager[None]:
    """Around calls that no context changes: what JAX has traced of them it finds."""
    return _entered(_NOTHING_SAID)


@contextlib.contextmanager
def _entered(context: TraceContext) -> Generator[None]:
    names = [x.name for x in dataclasses.fields(context) if x.name != "shardings"]
    values = [getattr(context, name) for name in names]
    # A traced value, and what records, is equal to itself alone. JAX's caches must not
    # keep it alive: an object that nothing else holds takes its place.
    key = tuple(
        [object() if isinstance(x, Array) or callable(x) else x for x in values]
    )
    token = _current.set(context)
    try:
        with _trace_key(key):
            yield
    finally:
        _current.reset(token)
