"""Optimizer states of bitsandbytes and Hugging Face, read and written.

Their 8-bit states are ours, code for code: codes of the dynamic map in the parameter's
shape, four in one of our words, and the largest magnitude of each 256 values.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import LARGE_BYTES, key_names, path_name, track
from paged_optax.backend.types import KeyPath, Path
from paged_optax.backend.validation import check_arrays
from paged_optax.backend.variables import unflatten_like
from paged_optax.codecs import (
    Arranged,
    DynamicInt8,
    Quantized,
    arranged,
    axis_of_blocks,
    unarranged,
)
from paged_optax.codecs.quantization import dynamic_map
from paged_optax.state.entries import (
    Entry,
    entries_of,
    numbers,
    refuse_unfit,
    step_in,
)
from paged_optax.state.leaves import StateLeaf, leaves_of
from paged_optax.state.steps import served_by, step_of

#: Optax's moments, and where bitsandbytes keeps each: its array, the position in it.
_FIELDS: dict[str, tuple[str, int | None]] = {
    "mu": ("1", None),
    "nu": ("2", None),
    "m1": ("1", 0),
    "m2": ("1", 1),
}

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
    leaves = leaves_of(state)
    check_arrays("params", params)
    shapes = {
        key_names(path): x.shape
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    parts: dict[KeyPath, dict[str, dict[int | None, np.ndarray]]] = {}
    for leaf in _shown(leaves, state):
        if not (leaf.is_moment and leaf.field in _FIELDS):
            continue
        number, position = _FIELDS[leaf.field]
        entry = parts.setdefault(leaf.parameter, {})
        arrays = {f"state{number}": leaf.value}
        if isinstance(leaf.value, Quantized):
            try:
                shape = shapes.get(key_names(leaf.parameter))
                plain = unarranged(_codec(number), _beside(leaf.value), shape)
            except ValueError as error:
                raise ValueError(
                    f"moment {leaf.field} of parameter {leaf.name!r} is"
                    f" {jax.tree.map(jax.typeof, leaf.value)}: bitsandbytes knows"
                    " dynamic_int8 alone. If it is that, pass"
                    " to_bitsandbytes(state, params), which tells its shape."
                ) from error
            codes, scales = map(np.asarray, plain)
            arrays = {f"state{number}": codes, f"absmax{number}": scales}
            qmap = np.array(dynamic_map(_codec(number).signed))
            entry[f"qmap{number}"] = {None: qmap}
        for name, x in arrays.items():
            entry.setdefault(name, {})[position] = np.asarray(x)
    names = [path_name(parameter) for parameter in parts]
    label = lambda path: path if names.count(path_name(path)) > 1 else path_name(path)
    return {
        label(parameter): {"step": int(step_of(leaves, parameter) or 0)}
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
    leaves, values = leaves_of(state), list[PyTree]()
    given = entries_of(
        entries, [x.parameter for x in leaves if x.is_moment and x.field in _FIELDS]
    )
    _refuse_other_moments(leaves, given)
    steps = {path: step_in(path, x) for path, x in given.items() if "step" in x}
    for leaf in _shown(leaves, state):
        value = leaf.value
        if leaf.is_count and leaf.field in _COUNTS:
            served = given.keys() & served_by(leaves, leaf)
            if untold := sorted(map(path_name, served - steps.keys())):
                raise ValueError(
                    f"the entry of parameter {untold[0]!r} has no 'step': pass how many"
                    " updates its moments have seen, as bitsandbytes does."
                )
            own = max((steps[path] for path in served), default=None)
            if own is not None:
                value = jax.device_put(jnp.asarray(own, value.dtype), value.sharding)
        elif leaf.is_moment and leaf.field in _FIELDS:
            value = _read(given[leaf.parameter], leaf)
        values.append(value)
    _tell_of_other_steps(leaves, values, steps)
    return unflatten_like(state, values)


def _refuse_other_moments(
    leaves: Sequence[StateLeaf], given: Mapping[KeyPath, Entry]
) -> None:
    """Refuses entries with moments that the state does not keep."""
    kept = {
        (leaf.parameter, f"state{_FIELDS[leaf.field][0]}")
        for leaf in leaves
        if leaf.is_moment and leaf.field in _FIELDS
    }
    for path, entry in given.items():
        for name in ("state1", "state2"):
            if name in entry and (path, name) not in kept:
                raise ValueError(
                    f"the entry of parameter {path_name(path)!r} has {name!r}, and the"
                    " state keeps no such moment: it is of another optimizer."
                )


def _tell_of_other_steps(
    leaves: Sequence[StateLeaf],
    values: Sequence[PyTree[Array]],
    steps: Mapping[KeyPath, int],
) -> None:
    """Warns if a parameter goes on with another count than its own."""
    if len(set(steps.values())) < 2:
        return
    new = [
        dataclasses.replace(leaf, value=value)
        for leaf, value in zip(leaves, values, strict=True)
    ]
    for path, own in steps.items():
        count = step_of(new, path)
        if count is not None and int(count) != own:
            warnings.warn(
                f"the entry of parameter {path_name(path)!r} has 'step' {own}, and the"
                f" state has one count for all parameters, which is {int(count)} now:"
                " its bias corrections and schedules will be those of that step. Make"
                " the state with per_parameter_steps=True, and each keeps its own.",
                stacklevel=3,
            )
            return


def _shown(leaves: Sequence[StateLeaf], state: PyTree) -> Iterator[StateLeaf]:
    """The leaves, with a progress bar where the state is large."""
    return track(leaves, "moments", len(leaves), shown=nbytes(state) >= LARGE_BYTES)


def _read(entry: Entry, leaf: StateLeaf) -> PyTree[Array]:
    number, position = _FIELDS[leaf.field]
    state, absmax, qmap = f"state{number}", f"absmax{number}", f"qmap{number}"

    def held(name: str) -> np.ndarray:
        if name not in entry:
            raise ValueError(
                f"the entry of parameter {leaf.name!r} has no {name!r}: it has"
                f" {', '.join(sorted(map(str, entry)))}."
            )
        return numbers(leaf.parameter, name, entry[name])

    # A copy: JAX takes a NumPy array's memory as it is, and when it comes to it. That
    # may be the memory of a PyTorch tensor that is still trained.
    def given(name: str) -> np.ndarray:
        array = held(name)
        if position is None:
            return np.array(array)
        if not array.ndim or len(array) <= position:
            raise ValueError(
                f"{name!r} of parameter {leaf.name!r} has shape"
                f" {list(array.shape)}, where two moments are stacked."
            )
        return np.array(array[position])

    if not isinstance(leaf.value, Quantized):
        found = given(state)
        fits = _fitting(found, leaf.value, leaf, state)
        meaning = "a mean of squares" if number == "2" else ""
        refuse_unfit(leaf.parameter, state, found, meaning)
        return fits
    plain = _codec(number)
    wanted = dynamic_map(plain.signed)
    found = held(qmap)
    # PyTorch's linspace rounds differently from release to release.
    if found.shape != wanted.shape or not np.allclose(found, wanted, 1e-6, 0):
        raise ValueError(
            f"{qmap!r} of parameter {leaf.name!r} is not the dynamic map: its"
            " codes mean other numbers."
        )
    scales = given(absmax)
    moment = Quantized(given(state), scales)
    right = plain.stored(moment.codes.shape)
    if moment.codes.dtype == right.codes.dtype:
        if _described(moment.scales) != _described(right.scales):
            raise ValueError(
                f"{absmax!r} of parameter {leaf.name!r} is"
                f" {moment.scales.dtype}{list(moment.scales.shape)}, and {state!r} of"
                f" {list(moment.codes.shape)} has"
                f" {right.scales.dtype}{list(right.scales.shape)}."
            )
        moment = _arranged_like(leaf.value, moment, plain)
    fits = Quantized(
        _fitting(moment.codes, leaf.value.codes, leaf, state),
        _fitting(moment.scales, leaf.value.scales, leaf, absmax),
    )
    refuse_unfit(leaf.parameter, absmax, scales, "each block's largest magnitude")
    return fits


def _codec(number: str) -> DynamicInt8:
    """What stores first moments, or second ones."""
    return DynamicInt8(signed=number == "1")


def _arranged_like(
    moment: Quantized[Array], found: Quantized[np.ndarray], plain: DynamicInt8
) -> PyTree[Array | np.ndarray]:
    """Codes and scales, arranged as a state's moment is; unchanged if none fits."""
    shape = found.codes.shape
    # bitsandbytes has the transpose of a moment whose blocks run along columns.
    for own in (shape, (*shape[:-2], *shape[:-3:-1])):
        codec = arranged(plain, own)
        turned = axis_of_blocks(codec) == -2
        if turned != (own != shape) or not isinstance(codec, Arranged):
            continue
        if _described(codec.stored(own)) == _described(moment):
            return codec.arrange(_beside(found), own)
    return found


def _described(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def _fitting(
    array: Array | np.ndarray, old: Array, leaf: StateLeaf, name: str
) -> Array:
    """An array in the place of one of a state."""
    if (array.shape, array.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{name!r} of parameter {leaf.name!r} would be stored as"
            f" {array.dtype}{list(array.shape)}, and the state holds"
            f" {old.dtype}{list(old.shape)}."
        )
    return jax.device_put(array, old.sharding)


def _beside(moment: PyTree[Array | np.ndarray]) -> PyTree[Array]:
    """A moment on the CPU backend, where there is one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), moment)
