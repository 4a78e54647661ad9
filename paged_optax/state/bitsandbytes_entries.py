"""The entries of a bitsandbytes optimizer's `state_dict()`, checked and read."""

import collections
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.text import dtype_and_shape, key_names, path_name
from paged_optax.backend.types import KeyPath, Path
from paged_optax.codecs import (
    Arranged,
    DynamicInt8,
    Quantized,
    arranged,
    axis_of_blocks,
)
from paged_optax.codecs.dynamic_int8 import dynamic_map
from paged_optax.state.leaves import StateLeaf

#: Optax's moments, and where bitsandbytes keeps each: its array, the position in it.
FIELDS: dict[str, tuple[str, int | None]] = {
    "mu": ("1", None),
    "nu": ("2", None),
    "m1": ("1", 0),
    "m2": ("1", 1),
}

#: What bitsandbytes keeps for one parameter: its step, and arrays by name.
Entry = Mapping[str, int | np.ndarray | Mapping[str, np.ndarray]]

#: Where bitsandbytes' `state_dict()` has an entry's arrays, so that FSDP leaves them
#: alone (0.50.2).
_NESTED = "__bnb_optimizer_quant_state__"


def entries_of(
    entries: Mapping[Path | int, Entry], parameters: Iterable[KeyPath]
) -> dict[KeyPath, Entry]:
    """The entry of each parameter, its arrays side by side."""
    _refuse_unmapped("entries", entries)
    names = {path: path_name(path) for path in parameters}
    if {"state", "param_groups"} <= entries.keys() - set(names.values()):
        entries = entries["state"]  # pyright: ignore[reportAssignmentType]
        _refuse_unmapped("entries['state']", entries)
    flat = {label: _flat(label, entry) for label, entry in entries.items()}
    by_keys = {key_names(x): x for x in flat if isinstance(x, tuple)}
    # Optimizers of PyTorch number the parameters of a list.
    by_name = {str(x): x for x in flat if not isinstance(x, tuple)}
    count = collections.Counter(names.values())
    by_parameter: dict[KeyPath, Entry] = {}
    for path, name in names.items():
        label = by_keys.get(key_names(path), by_name.get(name))
        if label is None:
            labels = ", ".join(map(repr, list(flat)[:3]))
            raise ValueError(
                f"entries have no parameter {name!r}: they have {labels or 'none'}."
                f" Pass {{{name!r}: entry, ...}}; for a parameter without updates, its"
                " entry of to_bitsandbytes(tx.init(params))."
            )
        if not isinstance(label, tuple) and count[name] > 1:
            raise ValueError(
                f"entries have {name!r}, which is the name of several parameters: pass"
                f" this one's entry under its keys as JAX has them, {path}, where"
                " DictKey and its like are those of jax.tree_util."
            )
        by_parameter[path] = flat[label]
    return by_parameter


def _flat(label: Path | int, entry: Entry) -> Entry:
    name = path_name(label) if isinstance(label, tuple) else label
    _refuse_unmapped(f"the entry of parameter {name!r}", entry)
    if _NESTED not in entry:
        return entry
    nested = entry[_NESTED]
    _refuse_unmapped(f"{_NESTED!r} of parameter {name!r}", nested)
    assert isinstance(nested, Mapping)
    if twice := sorted(map(str, nested.keys() & entry.keys())):
        raise ValueError(
            f"the entry of parameter {name!r} has {twice[0]!r} twice, in {_NESTED!r}"
            " and beside it: pass one of them, as in bitsandbytes' state_dict()."
        )
    return {key: x for key, x in entry.items() if key != _NESTED} | dict(nested)


def _refuse_unmapped(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{what} is of type {type(value).__name__}: pass a mapping, as in"
            ' bitsandbytes\' state_dict()["state"].'
        )


def _numbers(parameter: KeyPath, name: str, value: object) -> np.ndarray:
    """An array of an entry; nothing is converted."""
    try:
        array = np.asarray(value)
        why = f"it is of dtype {array.dtype}"
    except (RuntimeError, TypeError, ValueError) as error:  # PyTorch raises the first
        array, why = np.zeros(0, object), str(error)
    if not jnp.issubdtype(array.dtype, np.number):
        raise ValueError(
            f"{name!r} of parameter {path_name(parameter)!r} is no array of numbers:"
            f" {why}."
        )
    return array


def step_in(parameter: KeyPath, entry: Entry) -> int:
    """The step of an entry; a state counts in 32 bits."""
    step = _numbers(parameter, "step", entry["step"])
    if step.ndim or not 0 <= step < 2**31 or step != np.floor(step):
        text = str(step) if step.size < 9 else dtype_and_shape(step)
        raise ValueError(
            f"'step' of parameter {path_name(parameter)!r} is {text}: a step is a"
            " whole number from 0 to 2^31 - 1."
        )
    return int(step)


def refuse_other_moments(
    state_leaves: Sequence[StateLeaf], entries: Mapping[KeyPath, Entry]
) -> None:
    """Refuses entries with moments that the state does not keep."""
    kept = {
        (leaf.parameter, f"state{FIELDS[leaf.field][0]}")
        for leaf in state_leaves
        if leaf.is_moment and leaf.field in FIELDS
    }
    for path, entry in entries.items():
        for name in ("state1", "state2"):
            if name in entry and (path, name) not in kept:
                raise ValueError(
                    f"the entry of parameter {path_name(path)!r} has {name!r}, and the"
                    " state keeps no such moment: it is of another optimizer."
                )


def read_moment(entry: Entry, leaf: StateLeaf) -> PyTree[Array]:
    """A moment of an entry, in the place of a state's."""
    number, _ = FIELDS[leaf.field]
    state, absmax, qmap = f"state{number}", f"absmax{number}", f"qmap{number}"
    if not isinstance(leaf.value, Quantized):
        values = _moment_array(entry, leaf, state)
        if values.dtype == np.uint8 and absmax in entry:
            raise ValueError(
                f"{state!r} of parameter {leaf.name!r} is in eight bits, and the state"
                f" holds {dtype_and_shape(leaf.value)}: pass a state that"
                " paged_adamw_8bit, paged_lion_8bit or paged_ademamix_8bit makes."
            )
        moment = _fitting(values, leaf.value, leaf, state)
        meaning = "a mean of squares" if number == "2" else ""
        _refuse_unfit(leaf.parameter, state, values, meaning)
        return moment
    codec = codec_of(number)
    wanted, numbers = dynamic_map(codec.signed), _array(entry, leaf, qmap)
    # PyTorch's linspace rounds differently from release to release.
    if numbers.shape != wanted.shape or not np.allclose(numbers, wanted, 1e-6, 0):
        raise ValueError(
            f"{qmap!r} of parameter {leaf.name!r} is not the dynamic map: its"
            " codes mean other numbers."
        )
    scales = _moment_array(entry, leaf, absmax)
    moment = Quantized(_moment_array(entry, leaf, state), scales)
    plain = codec.stored(moment.codes.shape)
    if moment.codes.dtype == plain.codes.dtype:
        if dtype_and_shape(scales) != dtype_and_shape(plain.scales):
            raise ValueError(
                f"{absmax!r} of parameter {leaf.name!r} is {dtype_and_shape(scales)},"
                f" and {state!r} of {list(moment.codes.shape)} has"
                f" {dtype_and_shape(plain.scales)}."
            )
        moment = _arranged_like(leaf.value, moment, codec)
    moment = Quantized(
        _fitting(moment.codes, leaf.value.codes, leaf, state),
        _fitting(moment.scales, leaf.value.scales, leaf, absmax),
    )
    _refuse_unfit(leaf.parameter, absmax, scales, "each block's largest magnitude")
    return moment


def codec_of(number: str) -> DynamicInt8:
    """What stores first moments, or second ones."""
    return DynamicInt8(signed=number == "1")


def _array(entry: Entry, leaf: StateLeaf, name: str) -> np.ndarray:
    if name not in entry:
        raise ValueError(
            f"the entry of parameter {leaf.name!r} has no {name!r}: it has"
            f" {', '.join(sorted(map(str, entry)))}."
        )
    return _numbers(leaf.parameter, name, entry[name])


def _moment_array(entry: Entry, leaf: StateLeaf, name: str) -> np.ndarray:
    """A copy of an entry's array of one moment."""
    array, (_, position) = _array(entry, leaf, name), FIELDS[leaf.field]
    # A copy: JAX takes a NumPy array's memory as it is, and when it comes to it. That
    # may be the memory of a PyTorch tensor that is still trained.
    if position is None:
        return np.array(array)
    if not array.ndim or len(array) <= position:
        raise ValueError(
            f"{name!r} of parameter {leaf.name!r} has shape"
            f" {list(array.shape)}, where two moments are stacked."
        )
    return np.array(array[position])


def _refuse_unfit(
    parameter: KeyPath, name: str, array: np.ndarray, no_negative: str
) -> None:
    """Refuses what is not finite and, where it says what they are, negative numbers."""
    holds = f"{name!r} of parameter {path_name(parameter)!r} holds"
    if no_negative and (negative := array[array < 0]).size:
        raise ValueError(
            f"{holds} {negative[0]}: it is {no_negative}, which is not negative. Pass"
            " the arrays as bitsandbytes' state_dict() has them."
        )
    if (broken := array[~np.isfinite(array)]).size:
        raise ValueError(
            f"{holds} {broken[0]}, {broken.size} of {array.size}: the run had diverged"
            " before this state was saved. Pass one that was saved earlier."
        )


def _arranged_like(
    moment: Quantized[Array], plain: Quantized[np.ndarray], codec: DynamicInt8
) -> PyTree[Array | np.ndarray]:
    """Codes and scales, arranged as a state's moment is; unchanged if none fits."""
    shape = plain.codes.shape
    # bitsandbytes has the transpose of a moment whose blocks run along columns.
    for turned in (shape, (*shape[:-2], *shape[:-3:-1])):
        layout = arranged(codec, turned)
        columns = axis_of_blocks(layout) == -2
        if columns != (turned != shape) or not isinstance(layout, Arranged):
            continue
        stored = jax.tree.map(dtype_and_shape, layout.stored(turned))
        if stored == jax.tree.map(dtype_and_shape, moment):
            return layout.arrange(move_to_cpu(plain), turned)
    return plain


def _fitting(
    array: Array | np.ndarray, old: Array, leaf: StateLeaf, name: str
) -> Array:
    """An array in the place of one of a state."""
    if (array.shape, array.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{name!r} of parameter {leaf.name!r} would be stored as"
            f" {dtype_and_shape(array)}, and the state holds {dtype_and_shape(old)}."
        )
    return jax.device_put(array, old.sharding)


def move_to_cpu(moment: PyTree[Array | np.ndarray]) -> PyTree[Array]:
    """A moment on the CPU backend, where there is one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), moment)
