"""Optimizer states of bitsandbytes and Hugging Face, read and written.

Their 8-bit states are ours, code for code: codes of the dynamic map in the parameter's
shape, four in one of our words, and the largest magnitude of each 256 values.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import unflatten_like
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import LARGE_BYTES, key_names, path_name, track
from paged_optax.backend.types import KeyPath, Path
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import check_arrays
from paged_optax.codecs import Quantized, unarranged
from paged_optax.codecs.dynamic_int8 import dynamic_map
from paged_optax.state.bitsandbytes_entries import (
    FIELDS,
    Entry,
    codec_of,
    entries_of,
    move_to_cpu,
    read_moment,
    refuse_other_moments,
    step_in,
)
from paged_optax.state.leaves import StateLeaf, state_leaves_of
from paged_optax.state.steps import served_by, step_of

#: Optax's counts of updates.
_COUNTS = ("count", "count_m2")


def to_bitsandbytes(
    state: PyTree, params: PyTree | None = None
) -> dict[Path, dict[str, int | np.ndarray]]:
    """A state as bitsandbytes keeps it, in NumPy arrays.

    Args:
      state: The state of an Adam, Lion or AdEMAMix, with `paged(...)` anywhere inside.
      params: The parameters, or their shapes. They are needed where codes in words fit
        several shapes, such as `(300, 300)` and `(75, 1200)`.

    Returns:
      For each parameter's path the entry of a bitsandbytes `state_dict()["state"]`:
      its own `step`, and `state1`, `absmax1`, `qmap1` (`state2`, ... for the second
      moment), or `state1` alone where the moment is in float32. Their order is the
      parameters'. A path is a string; where two parameters' strings are equal, JAX's
      keys. A matrix whose blocks run along its columns comes transposed.

    Raises:
      ValueError: If a moment is not stored as bitsandbytes would, or if it may be of
        several shapes and `params` is not given.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = po.paged_adamw_8bit(1e-3).init(params)
      >>> sorted(po.to_bitsandbytes(state)["w"])
      ['absmax1', 'absmax2', 'qmap1', 'qmap2', 'state1', 'state2', 'step']

    References:
      bitsandbytes, `optim/optimizer.py <https://github.com/bitsandbytes-foundation>`_.
    """
    state_leaves = state_leaves_of(state, shapes=False)
    check_arrays("params", params)
    shapes = {
        key_names(path): x.shape
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    parts: dict[KeyPath, dict[str, dict[int | None, np.ndarray]]] = {}
    for leaf in _tracked(state_leaves, state):
        if not (leaf.is_moment and leaf.field in FIELDS):
            continue
        number, position = FIELDS[leaf.field]
        entry = parts.setdefault(leaf.parameter, {})
        arrays = {f"state{number}": leaf.value}
        if isinstance(leaf.value, Quantized):
            try:
                shape = shapes.get(key_names(leaf.parameter))
                plain = unarranged(codec_of(number), move_to_cpu(leaf.value), shape)
            except ValueError as error:
                raise ValueError(
                    f"moment {leaf.field} of parameter {leaf.name!r} is"
                    f" {jax.tree.map(jax.typeof, leaf.value)}: bitsandbytes knows"
                    " dynamic_int8 alone. If it is that, pass"
                    " to_bitsandbytes(state, params), which tells its shape."
                ) from error
            codes, scales = map(np.asarray, plain)
            arrays = {f"state{number}": codes, f"absmax{number}": scales}
            qmap = np.array(dynamic_map(codec_of(number).signed))
            entry[f"qmap{number}"] = {None: qmap}
        for name, x in arrays.items():
            entry.setdefault(name, {})[position] = np.asarray(x)
    names = [path_name(parameter) for parameter in parts]
    label = lambda path: path if names.count(path_name(path)) > 1 else path_name(path)
    return {
        label(parameter): {"step": int(step_of(state_leaves, parameter) or 0)}
        | {
            name: by_position[None]
            if None in by_position
            else np.stack(
                [by_position[i] for i in sorted(by_position, key=lambda i: i or 0)]
            )
            for name, by_position in entry.items()
        }
        for parameter, entry in parts.items()
    }


def from_bitsandbytes(state: PyTree, entries: Mapping[Path | int, Entry]) -> PyTree:
    """A state with the moments and the step of a bitsandbytes optimizer.

    Args:
      state: A state of the same optimizer, as `init` makes it.
      entries: For each parameter's path the entry of `state_dict()["state"]`, its
        tensors as NumPy arrays, nested as they are there or not. Arrays have the
        parameter's own shape: blocks run through it row by row, so that a transposed
        matrix has other blocks. For a list of parameters a whole `state_dict()` will
        do, whose entries are numbered.

    Returns:
      The state; every array is where that of `state` was. With `per_parameter_steps`
      each parameter has its own step. Else all have the largest one, and a warning
      names a parameter whose step is another.

    Raises:
      ValueError: If a parameter or a step is missing, an array does not fit, a step
        is no count, an array is nested and not nested, a scale or a mean of squares
        is negative, or an array holds NaN or an infinity. The message names the
        parameter and the field.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jnp.ones((64, 128))}
      >>> tx = po.paged_adamw_8bit(1e-3)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> entries = po.to_bitsandbytes(state)
      >>> again = po.from_bitsandbytes(tx.init(params), entries)
      >>> bool((again[0].nu["w"].codes == state[0].nu["w"].codes).all())
      True

    References:
      bitsandbytes, `optim/optimizer.py <https://github.com/bitsandbytes-foundation>`_.
    """
    state_leaves, values = state_leaves_of(state), list[PyTree]()
    by_parameter = entries_of(
        entries,
        [x.parameter for x in state_leaves if x.is_moment and x.field in FIELDS],
    )
    refuse_other_moments(state_leaves, by_parameter)
    steps = {path: step_in(path, x) for path, x in by_parameter.items() if "step" in x}
    for leaf in _tracked(state_leaves, state):
        value = leaf.value
        if leaf.is_count and leaf.field in _COUNTS:
            served = by_parameter.keys() & served_by(state_leaves, leaf)
            if untold := sorted(map(path_name, served - steps.keys())):
                raise ValueError(
                    f"the entry of parameter {untold[0]!r} has no 'step': pass how many"
                    " updates its moments have seen, as bitsandbytes does."
                )
            step = max((steps[path] for path in served), default=None)
            if step is not None:
                value = jax.device_put(jnp.asarray(step, value.dtype), value.sharding)
        elif leaf.is_moment and leaf.field in FIELDS:
            value = read_moment(by_parameter[leaf.parameter], leaf)
        values.append(value)
    _warn_of_other_steps(state_leaves, values, steps)
    return unflatten_like(state, values)


def _warn_of_other_steps(
    state_leaves: Sequence[StateLeaf],
    values: Sequence[PyTree[Array]],
    steps: Mapping[KeyPath, int],
) -> None:
    """Warns if a parameter goes on with another count than that of its entry."""
    if len(set(steps.values())) < 2:
        return
    new = [
        dataclasses.replace(leaf, value=value)
        for leaf, value in zip(state_leaves, values, strict=True)
    ]
    for path, step in steps.items():
        count = step_of(new, path)
        if count is not None and int(count) != step:
            warn_user(
                f"the entry of parameter {path_name(path)!r} has 'step' {step}, and the"
                f" state has one count for all parameters, which is {int(count)} now:"
                " its bias corrections and schedules will be those of that step. Make"
                " the state with per_parameter_steps=True, and each keeps its own."
            )
            return


def _tracked(state_leaves: Sequence[StateLeaf], state: PyTree) -> Iterator[StateLeaf]:
    """The leaves, with a progress bar where the state is large."""
    return track(
        state_leaves, "moments", len(state_leaves), shown=nbytes(state) >= LARGE_BYTES
    )
