"""The entries of a bitsandbytes optimizer's `state_dict()`, found and checked."""

import collections
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from paged_optax.backend.text import key_names, path_name
from paged_optax.backend.types import KeyPath, Path

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
    found: dict[KeyPath, Entry] = {}
    for path, name in names.items():
        label = by_keys.get(key_names(path), by_name.get(name))
        if label is None:
            shown = ", ".join(map(repr, list(flat)[:3]))
            raise ValueError(
                f"entries have no parameter {name!r}: they have {shown or 'none'}. Pass"
                f" {{{name!r}: entry, ...}}; for a parameter without updates, its entry"
                " of to_bitsandbytes(tx.init(params))."
            )
        if not isinstance(label, tuple) and count[name] > 1:
            raise ValueError(
                f"entries have {name!r}, which is the name of several parameters: pass"
                f" this one's entry under its keys as JAX has them, {path}, where"
                " DictKey and its like are those of jax.tree_util."
            )
        found[path] = flat[label]
    return found


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


def _refuse_unmapped(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{what} is of type {type(given).__name__}: pass a mapping, as in"
            ' bitsandbytes\' state_dict()["state"].'
        )


def numbers(parameter: KeyPath, name: str, given: object) -> np.ndarray:
    """An array of an entry; nothing is converted."""
    try:
        found = np.asarray(given)
        why = f"it is of dtype {found.dtype}"
    except (RuntimeError, TypeError, ValueError) as error:  # PyTorch raises the first
        found, why = np.zeros(0, object), str(error)
    if not jnp.issubdtype(found.dtype, np.number):
        raise ValueError(
            f"{name!r} of parameter {path_name(parameter)!r} is no array of numbers:"
            f" {why}."
        )
    return found


def step_in(parameter: KeyPath, entry: Entry) -> int:
    """The step of an entry; a state counts in 32 bits."""
    step = numbers(parameter, "step", entry["step"])
    if step.ndim or not 0 <= step < 2**31 or step != np.floor(step):
        shown = str(step) if step.size < 9 else f"{step.dtype}{list(step.shape)}"
        raise ValueError(
            f"'step' of parameter {path_name(parameter)!r} is {shown}: a step is a"
            " whole number from 0 to 2^31 - 1."
        )
    return int(step)


def refuse_unfit(
    parameter: KeyPath, name: str, found: np.ndarray, no_negative: str
) -> None:
    """Refuses what is not finite and, where it says what they are, negative numbers."""
    holds = f"{name!r} of parameter {path_name(parameter)!r} holds"
    if no_negative and (negative := found[found < 0]).size:
        raise ValueError(
            f"{holds} {negative[0]}: it is {no_negative}, which is not negative. Pass"
            " the arrays as bitsandbytes' state_dict() has them."
        )
    if (broken := found[~np.isfinite(found)]).size:
        raise ValueError(
            f"{holds} {broken[0]}, {broken.size} of {found.size}: the run had diverged"
            " before this state was saved. Pass one that was saved earlier."
        )
