"""Master weights by their definition, in NumPy, and how far a paged state is from them.

A master moves as far as something else has moved its parameter. If it does not round to
the parameter then, it starts again from the parameter. A master in two halves is so
many float32 numbers above its parameter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers import reference
from helpers.fuzz_leaves import on_one_device

_WORST = float("inf")


def wide(tree: Any) -> Any:
    """A tree in float32."""
    return optax.tree.cast(tree, jnp.float32)


def of(params: Any, state: Any) -> Any:
    """The masters that a step begins with."""
    field = "master" if hasattr(state, "master") else "remainder"
    master = lambda p, kept: jnp.asarray(_master(field, p, kept))
    return jax.tree.map(master, params, getattr(state, field))


def _master(field: str, parameter: Any, kept: Any) -> Any:
    p = np.asarray(parameter)
    if not jax.tree.leaves(kept):
        return p
    kept = np.asarray(kept)
    if field == "master":
        x = p.astype(np.float32)
        with np.errstate(all="ignore"):
            moved = x + (kept - kept.astype(p.dtype).astype(np.float32))
            moved = np.where(moved.astype(p.dtype) == p, moved, x)
        return np.where(kept.astype(p.dtype) == p, kept, moved)
    return _from(_position(p) + kept)


def _position(x: Any) -> Any:
    """The position of a float32 number among all of them; that of 0 is 0."""
    bits = np.asarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def _from(position: Any) -> Any:
    bits = np.where(position < 0, -(2**31) - position, position)
    return bits.astype(np.int32).view(np.float32)


def apart_at_first(params: Any, state: Any) -> dict[str, float]:
    """How far a new state is: its masters are the parameters."""
    return reference.distances(wide(params), of(params, state))


def apart(
    params: Any, before: Any, updates: Any, moved: Any, state: Any
) -> dict[str, float]:
    """How far a step is, by name of what differs.

    Of parameters and the masters before it, what Optax makes of the masters, the
    updates that the step gives, and its state.
    """
    field = "master" if hasattr(state, "master") else "remainder"
    of_leaf, kept = functools.partial(_of_leaf, field), getattr(state, field)
    found = jax.tree.map(of_leaf, params, before, updates, moved, kept)
    flat = jax.tree_util.tree_leaves_with_path(found)
    return {f"{field}{jax.tree_util.keystr(path)}": x for path, x in flat if x}


def _of_leaf(field: str, p: Any, m: Any, u: Any, moved: Any, kept: Any) -> float:
    p, m, u, moved = map(np.asarray, (p, m, u, moved))
    if moved.dtype != p.dtype:
        return _WORST
    with np.errstate(all="ignore"):
        wanted = m + u.astype(np.float32)
        new = (p.astype(np.float32) + moved.astype(np.float32)).astype(p.dtype)
        if not jax.tree.leaves(kept):  # its own master
            return reference.ulps(u, moved)
        kept, terms = on_one_device(kept), np.maximum(abs(m), abs(u))
        found = _kept_apart(field, new, wanted, kept, terms)
        return max(found, _parameters_apart(p, new, moved, wanted))


def _parameters_apart(p: Any, new: Any, moved: Any, wanted: Any) -> float:
    """0 if new parameters are the masters rounded, where any update says so."""
    old, now, target = (x.astype(np.float64) for x in (p, new, wanted.astype(p.dtype)))
    finite = np.isfinite(target)
    low, high = np.minimum(abs(old), abs(target)), np.maximum(abs(old), abs(target))
    # Differences of numbers within a factor of two are exact (Sterbenz).
    exact = finite & (old * target >= 0) & (high <= 2 * low)
    unit = float(jnp.finfo(p.dtype).eps) * np.maximum(high, abs(moved.astype("f8")))
    near = abs(now - wanted.astype(np.float64)) <= unit + float(jnp.finfo(p.dtype).tiny)
    return _WORST if np.any(exact & (now != target)) or np.any(finite & ~near) else 0.0


def _kept_apart(field: str, new: Any, wanted: Any, kept: Any, terms: Any) -> float:
    """How far what is kept is, in units in the last place of the larger term."""
    kept = np.asarray(kept)
    asked = wanted
    if field == "remainder":
        first = _position(new)
        asked = _from(first + np.clip(_position(wanted) - first, -(2**15), 2**15 - 1))
        asked = np.where(np.isfinite(wanted), asked, 0)
        kept = np.where(np.isfinite(wanted), _from(first + kept), 0)
    # XLA:CPU takes denormal numbers for zeros.
    flushed = abs(asked - kept) <= np.finfo(np.float32).tiny
    scale = np.maximum(np.where(np.isfinite(terms), terms, 0), abs(asked))
    return reference.ulps(np.where(flushed, kept, asked), kept, scale)
