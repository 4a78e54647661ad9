"""Ambient options of paged transformations inside wrappers and traces, and gates.

Optax's wrappers do not forward every argument. A wrapper or a trace with options for
the paged transformations inside sets them in a context around the call. There is one
context variable. All its fields but `shardings` are part of the key of JAX's trace
caches: an inner `jax.jit` traces again in another context.

A parameter's gate is a bool. True updates the parameter; False moves no byte and leaves
its moments unchanged. A gate that is False when traced costs nothing. A traced gate is
the trip count of the leaf's loop.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import DEVICE, on_host
from paged_optax.backend.processes import Values
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, is_explicit, is_traced

#: A bool known when traced, or one known on the device.
Gate = bool | Array


@dataclasses.dataclass(frozen=True)
class Visitor:
    """Replaces the work of paged transformations in a trace for types or programs.

    A visited `init` fills its moments with zeros, which are fast to trace, and does not
    warn.
    """

    # Receives the `NewState` of every paged `init`.
    init: Callable[[Any], None] | None = None
    # Replaces every paged `update`, which returns its arguments. Receives its
    # `PagedTransformation`, the warning text for moments that left the host, and a
    # function that returns the facts on which all processes must agree.
    update: Callable[[Any, str, Callable[[], Values]], None] | None = None
    # The devices of parameters that are types: every paged `init` remembers their
    # shardings, as for arrays. None: it does not.
    mesh: Mesh | None = None


#: Traces the types of new states.
TYPES = Visitor()


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """Options of the paged transformations inside a call."""

    gate: Gate = True  # updates happen
    restart: Gate = False  # an update ends with the state that `init` makes
    # A layerwise step is around. Its moments may be on the device, its leaves share no
    # loops, shards of one page are not isolated, and its codec keys may name other
    # layers.
    layerwise: bool = False
    spare_bytes: int = 0  # that a page may have without raising the peak of memory
    # Leaves are isolated even if there is memory for them. A leaf's moments are then
    # written while another leaf's are read, and XLA:GPU does not hold two more layers
    # of weights from the host (jax 0.12.0.1, Llama-3-8B on a T4: 0.85 GiB).
    isolate: bool = False
    layer: ArrayLike | None = None  # of the moments; None outside of a stack of layers
    plain: bool = False  # `init` and `update` call the inner transformation alone
    # Paths of parameters and the numbers of their stacks. The moments of a stack stay
    # on the device, or none of them.
    stacks: tuple[tuple[KeyPath, int], ...] = ()
    inside_paged: bool = False  # the caller is a paged transformation
    visitor: Visitor | None = None
    # The shardings of the leaves of a step's arguments, for its trace; None for a leaf
    # on one device. Empty if all are.
    argument_shardings: tuple[Sharding | None, ...] = ()
    # Shardings of a traced step's arguments, by the `id` of their tracers, with
    # explicit axes that were made automatic. It is no part of JAX's keys: these tracers
    # occur only in the step's own trace and in its analysis, which are not cached.
    shardings: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)


_DEFAULT = TraceContext()
_current = contextvars.ContextVar("paged_optax", default=_DEFAULT)
# JAX's caches include its value in their keys.
_trace_key = jax.make_user_context(default_value=None)


def current() -> TraceContext:
    """Returns the context around the call."""
    return _current.get()


@contextlib.contextmanager
def within(
    context: TraceContext | None = None, /, **changes: object
) -> Generator[None]:
    """Changes fields of a context, by default the current one, around calls within."""
    context = dataclasses.replace(context or current(), **changes)
    names = [x.name for x in dataclasses.fields(context) if x.name != "shardings"]
    values = [getattr(context, name) for name in names]
    # Traced values and callbacks equal themselves alone. JAX's caches must not keep
    # them alive: a new object takes their place.
    visits = lambda x: isinstance(x, Visitor) and bool(x.init or x.update)
    alone = lambda x: isinstance(x, Array) or visits(x)
    token = _current.set(context)
    try:
        with _trace_key(tuple([object() if alone(x) else x for x in values])):
            yield
    finally:
        _current.reset(token)


def without() -> contextlib.AbstractContextManager[None]:
    """Resets the context around calls that are independent of it."""
    return within(_DEFAULT)


def known_shardings(
    tracers: Sequence[object], shardings: Sequence[Sharding | None]
) -> contextlib.AbstractContextManager[None]:
    """Adds shardings of arrays whose types do not have them; None: unknown."""
    pairs = zip(tracers, shardings, strict=True)
    known = {id(tracer): sharding for tracer, sharding in pairs if sharding is not None}
    return within(shardings={**current().shardings, **known})


def sharding_in_type(x: object) -> NamedSharding:
    """Returns the sharding of an array's type; see `known_shardings`."""
    now, known = jax.typeof(x).sharding, current().shardings.get(id(x))
    if is_explicit(now) or not isinstance(known, NamedSharding):
        return now
    return known if is_explicit(known) else now


def only_if(gate: Gate) -> contextlib.AbstractContextManager[None]:
    """Gates every paged update called within.

    Wrappers that do not forward extra arguments would drop an argument of `update`, and
    moments would change on a skipped step.
    """
    return within(gate=_known(and_gates(current().gate, gate)))


def restart_if(restart: Gate | np.bool_) -> contextlib.AbstractContextManager[None]:
    """Resets the state after every paged update called within."""
    return within(restart=_known(restart))


def _known(gate: Gate | np.bool_) -> Gate:
    """Converts a concrete gate to a bool, so that equal gates share a program."""
    return gate if isinstance(gate, Array) and is_traced(gate) else bool(gate)


def and_gates(first: Gate, second: Gate) -> Gate:
    """Returns whether both gates are open."""
    # Known gates add no operation to the program.
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return first if first is second else jnp.logical_and(first, second)


def any_gate(gates: Sequence[Gate]) -> Gate:
    """Returns whether any gate is open."""
    # One tracer may be the gate of many parameters.
    traced = {id(gate): gate for gate in gates if not isinstance(gate, bool)}
    is_open = any(gate is True for gate in gates)
    if is_open or not traced:
        return is_open
    return functools.reduce(jnp.logical_or, traced.values())


def all_gates(active: PyTree, updates: PyTree) -> list[Gate]:
    """Returns the gate of each gradient.

    A gate combines `active`, see `paged`, with `only_if`: wrappers around do not
    forward `active`.
    """
    ambient = current().gate
    gate_of = lambda path, gate: and_gates(ambient, _gate(path, gate))
    active = True if active is None else active
    gate_tree = jax.tree_util.tree_map_with_path(gate_of, active)
    try:
        return jax.tree.leaves(jax.tree.broadcast(gate_tree, updates))
    except ValueError as error:
        raise ValueError(
            f"active={jax.tree.structure(active)} is neither a bool nor a tree of bools"
            " of the gradients' structure or a prefix of it: pass one bool for each"
            " parameter, or for each group of them."
        ) from error


def _gate(path: KeyPath, gate: object) -> Gate:
    if isinstance(gate, (bool, np.bool_)):
        return bool(gate)
    if getattr(gate, "dtype", None) != jnp.bool_ or getattr(gate, "shape", None) != ():
        raise TypeError(
            f"active{keystr(path)}={gate!r} is not a bool: pass True,"
            " False, or a boolean array of shape ()."
        )
    return jnp.asarray(gate)


def choose_by(gate: Gate, new: ArrayLike, old: ArrayLike | None) -> ArrayLike:
    """Returns the new value if the gate is open; else the old value, or zero."""
    if gate is True:
        return new
    old = jnp.zeros_like(new) if old is None else old
    if gate is False:
        return old
    # A selection in host memory would copy both, or fail to compile.
    return jnp.where(gate, new, jax.device_put(old, DEVICE) if on_host(old) else old)
