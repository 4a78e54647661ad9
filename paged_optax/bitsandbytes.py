"""Optimizer states of bitsandbytes and Hugging Face, read and written.

Their 8-bit states equal ours code for code: codes of the dynamic map in the parameter's
shape, of which we pack four in a word, and the largest magnitude of each 256 values.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from paged_optax.backend.flax_variables import as_pure, unflatten_like
from paged_optax.backend.text import dtype_and_shape, key_names, path_name
from paged_optax.backend.types import KeyPath, Path
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import check_arrays
from paged_optax.codecs import (
    Arranged,
    DynamicInt8,
    Quantized,
    arranged,
    axis_of_blocks,
    unarranged,
)
from paged_optax.codecs.dynamic_int8 import dynamic_map
from paged_optax.state.leaves import (
    StateLeaf,
    counted_by,
    read_step,
    state_leaves_of,
)
from paged_optax.transform.trees import leaf_paths

#: bitsandbytes' number of each of Optax's moments, and the position in its array.
_FIELDS: dict[str, tuple[str, int | None]] = {
    "mu": ("1", None),
    "nu": ("2", None),
    "m1": ("1", 0),
    "m2": ("1", 1),
}
#: Optax's counts of updates.
_COUNTS = ("count", "count_m2")
#: bitsandbytes' codecs of first and second moments.
_CODECS = {"1": DynamicInt8(signed=True), "2": DynamicInt8(signed=False)}
#: The key under which `state_dict()` nests an entry's arrays, for FSDP (0.50.2).
_NESTED = "__bnb_optimizer_quant_state__"

#: The state of one parameter: its step, and arrays by name.
Entry = Mapping[str, int | np.ndarray | Mapping[str, np.ndarray]]


def to_bitsandbytes(
    state: PyTree, params: PyTree | None = None
) -> dict[Path, dict[str, int | np.ndarray]]:
    """Converts a state to the entries of a bitsandbytes `state_dict()["state"]`.

    Args:
      state: The state of an Adam, Lion or AdEMAMix, with `paged(...)` anywhere inside.
      params: The parameters, or their shapes; required where codes in words fit several
        shapes, such as `(300, 300)` and `(75, 1200)`.

    Returns:
      For each parameter's path, in the parameters' order, its `step`, and `state1`,
      `absmax1`, `qmap1` (`state2`, ... for the second moment), or `state1` alone for a
      float32 moment, as NumPy arrays. A path is a string, or JAX's key path where two
      parameters' strings are equal. A matrix with blocks along its columns is
      transposed.

    Raises:
      ValueError: If a moment is not stored as in bitsandbytes, or if its shape is
        ambiguous and `params` is not passed.

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
    paths, leaves = leaf_paths(as_pure(params))
    shapes = dict(zip(map(key_names, paths), map(jnp.shape, leaves), strict=True))
    entries: dict[KeyPath, dict[str, list[np.ndarray]]] = {}
    for leaf in state_leaves:
        if _is_readable(leaf):
            entry = entries.setdefault(leaf.parameter, {})
            number, position = _FIELDS[leaf.field]
            for name, x in _written(leaf, shapes.get(key_names(leaf.parameter))):
                moments = entry.setdefault(f"{name}{number}", [])
                if name != "qmap" or not moments:
                    moments.insert(position or 0, x)
    names = collections.Counter(map(path_name, entries))
    stacked = lambda name, x: np.stack(x) if len(x) > 1 else x[0]
    return {
        path if names[path_name(path)] > 1 else path_name(path): {
            "step": int(read_step(state_leaves, path) or 0),
            **{name: stacked(name, x) for name, x in entry.items()},
        }
        for path, entry in entries.items()
    }


def _written(
    leaf: StateLeaf, shape: tuple[int, ...] | None
) -> Iterator[tuple[str, np.ndarray]]:
    if not isinstance(leaf.value, Quantized):
        yield "state", np.asarray(leaf.value)
        return
    codec = _CODECS[_FIELDS[leaf.field][0]]
    try:
        plain = unarranged(codec, _on_cpu(leaf.value), shape)
    except ValueError as error:
        raise ValueError(
            f"moment {leaf.field} of parameter {leaf.name!r} is"
            f" {jax.tree.map(jax.typeof, leaf.value)}: bitsandbytes knows"
            " dynamic_int8 alone. If it is that, pass"
            " to_bitsandbytes(state, params), which tells its shape."
        ) from error
    yield "qmap", np.array(dynamic_map(codec.signed))
    yield "state", np.asarray(plain.codes)
    yield "absmax", np.asarray(plain.scales)


def from_bitsandbytes(state: PyTree, entries: Mapping[Path | int, Entry]) -> PyTree:
    """Returns a state with the moments and steps of a bitsandbytes optimizer.

    Args:
      state: A state of the same optimizer, as `init` returns it.
      entries: For each parameter's path the entry of `state_dict()["state"]`, with
        NumPy arrays for tensors, nested or not. Arrays have the parameter's own shape:
        blocks run along its rows, so that a transposed matrix has other blocks. For a
        list of parameters, also a whole `state_dict()` with numbered entries.

    Returns:
      The state, its arrays placed as in `state`. With `per_parameter_steps` each
      parameter keeps its own step. Otherwise all take the largest one, and a warning
      names a parameter with another.

    Raises:
      ValueError: If an entry, array or step is missing, does not fit, or has values
        that no optimizer computes. The message names the parameter and the field.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"w": jnp.ones((64, 128))}
      >>> tx = po.paged_adamw_8bit(1e-3)
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> entries = po.to_bitsandbytes(state)
      >>> again = po.from_bitsandbytes(tx.init(params), entries)
      >>> bool((again[0].nu["w"].codes == state[0].nu["w"].codes).all())
      True
    """
    state_leaves, values = state_leaves_of(state), list[PyTree[Array]]()
    read = _entries(entries, state_leaves)
    steps = {path: x.step() for path, x in read.items()}
    counts: dict[KeyPath, int] = {}
    for leaf in state_leaves:
        value = leaf.value
        if _is_readable(leaf):
            value = read[leaf.parameter].moment(leaf)
        elif leaf.is_count and leaf.field in _COUNTS:
            counted = steps.keys() & counted_by(state_leaves, leaf)
            if counted:
                step = max(steps[path] for path in counted)
                counts |= {path: step for path in counted if steps[path] != step}
                value = jax.device_put(jnp.asarray(step, value.dtype), value.sharding)
        values.append(value)
    if counts:
        path = next(x for x in steps if x in counts)
        warn_user(
            f"the entry of parameter {path_name(path)!r} has 'step' {steps[path]}, and"
            f" the state has one count for all parameters, which is {counts[path]} now:"
            " its bias corrections and schedules will be those of that step. Make the"
            " state with per_parameter_steps=True, and each keeps its own."
        )
    return unflatten_like(state, values)


def _is_readable(leaf: StateLeaf) -> bool:
    return leaf.is_moment and leaf.field in _FIELDS


@dataclasses.dataclass(frozen=True)
class _ReadEntry:
    """The step and the arrays of one parameter, checked as they are read."""

    parameter: str
    fields: Mapping[str, Any]

    def error(self, field: str, message: str) -> ValueError:
        return ValueError(f"{field!r} of parameter {self.parameter!r} {message}.")

    def array(self, field: str) -> np.ndarray:
        if field not in self.fields:
            raise ValueError(
                f"the entry of parameter {self.parameter!r} has no {field!r}: it has"
                f" {', '.join(sorted(map(str, self.fields)))}."
            )
        array = np.asarray(self.fields[field])
        if not jnp.issubdtype(array.dtype, np.number):
            raise self.error(field, f"is no array of numbers, but of {array.dtype}")
        return array

    def step(self) -> int:
        step = self.array("step")
        if step.ndim or not 0 <= step < 2**31 or step != np.floor(step):
            text = str(step) if step.size < 9 else dtype_and_shape(step)
            text += ": a step is a whole number from 0 to 2^31 - 1"
            raise self.error("step", f"is {text}")
        return int(step)

    def part(self, leaf: StateLeaf, field: str) -> np.ndarray:
        array, (_, position) = self.array(field), _FIELDS[leaf.field]
        if position is not None:
            if not array.ndim or len(array) <= position:
                text = f"has shape {list(array.shape)}, where two moments are stacked"
                raise self.error(field, text)
            array = array[position]
        # JAX may read a NumPy array's memory later, when it could be a tensor in use.
        return np.array(array)

    def moment(self, leaf: StateLeaf) -> PyTree[Array]:
        number, _ = _FIELDS[leaf.field]
        state, absmax, qmap = f"state{number}", f"absmax{number}", f"qmap{number}"
        if not isinstance(leaf.value, Quantized):
            values = self.part(leaf, state)
            moment = self.placed(values, leaf.value, state)
            self.check_values(state, values, "a mean of squares" * (number == "2"))
            return moment
        codec = _CODECS[number]
        right, entries = dynamic_map(codec.signed), self.array(qmap)
        # PyTorch's linspace rounds differently from release to release.
        if entries.shape != right.shape or not np.allclose(entries, right, 1e-6, 0):
            text = "is not the dynamic map: its codes mean other numbers"
            raise self.error(qmap, text)
        codes, scales = self.part(leaf, state), self.part(leaf, absmax)
        described = codec.stored(codes.shape)
        fits = dtype_and_shape(scales) == dtype_and_shape(described.scales)
        # The error names the scales if the codes alone fit the state.
        placeholder = scales if fits else np.zeros(described.scales.shape, np.float32)
        moment = Quantized(codes, placeholder)
        if dtype_and_shape(codes) == dtype_and_shape(described.codes):
            moment = _arranged_like(leaf.value, moment, codec)
        moment = Quantized(
            self.placed(moment.codes, leaf.value.codes, state),
            self.placed(moment.scales if fits else scales, leaf.value.scales, absmax),
        )
        self.check_values(absmax, scales, "each block's largest magnitude")
        return moment

    def placed(self, array: Array | np.ndarray, old: Array, field: str) -> Array:
        if (new := dtype_and_shape(array)) != (holds := dtype_and_shape(old)):
            text = f"would be stored as {new}, and the state holds {holds}"
            raise self.error(field, text)
        return jax.device_put(array, old.sharding)

    def check_values(self, field: str, array: np.ndarray, positive: str) -> None:
        negative, broken = array < 0, ~np.isfinite(array)
        if positive and negative.any():
            text = f"it is {positive}, which is not negative"
            raise self.error(field, f"holds {array[negative][0]}: {text}")
        if broken.any():
            text = "the run had diverged: pass a state that was saved earlier"
            holds = f"holds {array[broken][0]}, {broken.sum()} of {array.size}"
            raise self.error(field, f"{holds}: {text}")


def _entries(
    entries: Mapping[Path | int, Entry], state_leaves: Iterable[StateLeaf]
) -> dict[KeyPath, _ReadEntry]:
    fields: dict[KeyPath, set[str]] = {}
    for leaf in filter(_is_readable, state_leaves):
        field = f"state{_FIELDS[leaf.field][0]}"
        fields.setdefault(leaf.parameter, set()).add(field)
    names = {path: path_name(path) for path in fields}
    labelled = _mapping("entries", entries)
    if {"state", "param_groups"} <= labelled.keys() - set(names.values()):
        labelled = _mapping("entries['state']", labelled["state"])
    by_keys = {key_names(x): x for x in labelled if isinstance(x, tuple)}
    # PyTorch's optimizers number the parameters of a list.
    by_name = {str(x): x for x in labelled if not isinstance(x, tuple)}
    count = collections.Counter(names.values())
    by_parameter: dict[KeyPath, _ReadEntry] = {}
    for path, name in names.items():
        label = by_keys.get(key_names(path), by_name.get(name))
        if label is None:
            labels = ", ".join(map(repr, list(labelled)[:3]))
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
        entry = dict(_mapping(f"the entry of parameter {name!r}", labelled[label]))
        nested = entry.pop(_NESTED, {})
        entry |= _mapping(f"{_NESTED!r} of parameter {name!r}", nested)
        if other := sorted({"state1", "state2"} & entry.keys() - fields[path]):
            raise ValueError(
                f"the entry of parameter {name!r} has {other[0]!r}, and the state keeps"
                " no such moment: it is of another optimizer."
            )
        by_parameter[path] = _ReadEntry(name, entry)
    return by_parameter


def _mapping(name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} is of type {type(value).__name__}: pass a mapping, as in"
            ' bitsandbytes\' state_dict()["state"].'
        )
    return value


def _arranged_like(
    moment: Quantized, plain: Quantized, codec: DynamicInt8
) -> PyTree[Array | np.ndarray]:
    """Arranges codes and scales as in a state's moment; unchanged if none fits."""
    shape = plain.codes.shape
    # A moment with blocks along columns is transposed in bitsandbytes.
    for turned in (shape, (*shape[:-2], *shape[:-3:-1])):
        layout = arranged(codec, turned)
        columns = axis_of_blocks(layout) == -2
        if columns != (turned != shape) or not isinstance(layout, Arranged):
            continue
        stored = jax.tree.map(dtype_and_shape, layout.stored(turned))
        if stored == jax.tree.map(dtype_and_shape, moment):
            return layout.arrange(_on_cpu(plain), turned)
    return plain


def _on_cpu(moment: PyTree[Array | np.ndarray]) -> PyTree[Array]:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS without the CPU
        device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), moment)
