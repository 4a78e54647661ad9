"""Which parameters an update may touch.

A parameter's gate is a bool: True updates it, False leaves its moments where and as
they are and moves no byte. Known when traced, a closed gate costs nothing at all; known
only on the device, it is the trip count of the leaf's loop.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

#: A bool known when traced, or one known on the device.
Gate = bool | Array

_ambient: contextvars.ContextVar[Gate] = contextvars.ContextVar(
    "paged_optax_only_if", default=True
)


_restart: contextvars.ContextVar[Gate] = contextvars.ContextVar(
    "paged_optax_restart_if", default=False
)

#: Part of the key of JAX's trace caches: an inner `jax.jit` must not take the trace of
#: one gate, which holds it as a constant, for that of another.
_trace_key = jax.make_user_context(default_value=(True, False))


@contextlib.contextmanager
def _within(variable: contextvars.ContextVar[Gate], gate: Gate) -> Iterator[None]:
    token = variable.set(gate)
    gates = (_ambient.get(), _restart.get())
    key = tuple(object() if isinstance(x, Tracer) else bool(x) for x in gates)
    try:
        with _trace_key(key):
            yield
    finally:
        variable.reset(token)


def only_if(gate: Gate) -> contextlib.AbstractContextManager[None]:
    """Gates every paged update called within.

    An argument could get lost on its way through wrappers that do not forward extra
    arguments, and moments would change on a step that is skipped.

    Args:
      gate: Whether the updates happen.
    """
    return _within(_ambient, both(_ambient.get(), gate))


def restart_if(gate: Gate) -> contextlib.AbstractContextManager[None]:
    """Makes every paged update called within start its state again after it.

    Args:
      gate: Whether the state becomes what `init` makes; otherwise nothing changes.
    """
    return _within(_restart, gate)


def restart() -> Gate:
    """The gate of the `restart_if` around, else False."""
    return _restart.get()


def both(first: Gate, second: Gate) -> Gate:
    """Whether two gates are open."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return first if first is second else jnp.logical_and(first, second)


def either(gates: Sequence[Gate]) -> Gate:
    """Whether any gate is open."""
    traced = {id(gate): gate for gate in gates if not isinstance(gate, bool)}
    if any(gate is True for gate in gates) or not traced:
        return any(gate is True for gate in gates)
    return functools.reduce(jnp.logical_or, traced.values())


def gates_of(active: Any, updates: Any) -> list[Gate] | None:
    """The gate of each gradient.

    Args:
      active: A pytree of bools, static or traced, of the gradients' structure or a
        prefix of it; None for all.
      updates: The gradients.

    Returns:
      One gate for each gradient, those of `only_if` included; None where every gate is
      open and known to be.

    Raises:
      ValueError: If `active` is no prefix of the gradients' structure.
      TypeError: If one of its leaves is not a bool.
    """
    ambient = _ambient.get()
    if active is None and ambient is True:
        return None
    active = True if active is None else active
    gates: list[Gate] = []

    def spread(path: Any, gate: Any, subtree: Any) -> None:
        gate = both(ambient, _gate(path, gate))
        gates.extend([gate] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree_util.tree_map_with_path(spread, active, updates)
    except ValueError as error:
        raise ValueError(
            f"active={jax.tree.structure(active)} is neither a bool nor a tree of bools"
            " of the gradients' structure or a prefix of it: pass one bool for each"
            " parameter, or for each group of them."
        ) from error
    return None if all(gate is True for gate in gates) else gates


def _gate(path: Any, gate: Any) -> Gate:
    if isinstance(gate, (bool, np.bool_)):
        return bool(gate)
    if getattr(gate, "dtype", None) != jnp.bool_ or np.shape(gate) != ():
        raise TypeError(
            f"active{jax.tree_util.keystr(path)}={gate!r} is not a bool: pass True,"
            " False, or a boolean array of shape ()."
        )
    return jnp.asarray(gate)
