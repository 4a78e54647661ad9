"""Gates: the parameters that an update may change.

A parameter's gate is a bool. True updates the parameter; False moves no byte and leaves
its moments unchanged. A gate that is False when traced costs nothing. A traced gate is
the trip count of the leaf's loop.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.memory import DEVICE, on_host
from paged_optax.backend.text import keystr
from paged_optax.backend.types import KeyPath, is_traced
from paged_optax.transform.context import Gate, current, within


def only_if(gate: Gate) -> AbstractContextManager[None]:
    """Gates every paged update called within.

    Wrappers that do not forward extra arguments would drop an argument of `update`, and
    moments would change on a skipped step.
    """
    return within(gate=_known(and_gates(current().gate, gate)))


def restart_if(restart: Gate | np.bool_) -> AbstractContextManager[None]:
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

    Raises:
      ValueError: If `active` is no prefix of the gradients' structure.
      TypeError: If one of its leaves is not a bool.
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
