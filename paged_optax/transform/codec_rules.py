"""Which codec stores which moment."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_optax.backend.key_paths import slashed
from paged_optax.codecs import Codec, named
from paged_optax.transform.owners import parameter_of

#: What `paged(codec=...)` takes for one moment.
CodecLike = str | Codec | None

#: Moments of fewer values are stored as they are (bitsandbytes' `min_8bit_size`).
SMALLEST_CODED = 4096

#: Names of Optax's moments that are means or sums of squares.
_SQUARES = frozenset("nu v v_row v_col sum_of_squares".split())

#: Names of its moments that have negative values, whatever a rule says.
_SIGNED = frozenset("m m1 m2 mu trace".split())

#: Not a moment: the parameters themselves (see `precision`).
_MASTER = "master"


def check(codec: Any) -> dict[str, Any]:
    """Reads the `codec` argument of `paged`.

    Returns:
      Its rules, by moment or by pattern of parameter paths; empty for float32.

    Raises:
      ValueError: If a codec is unknown.
    """
    rules = dict(codec) if isinstance(codec, Mapping) else {"*": codec}
    for key, rule in rules.items():
        if not isinstance(key, str):
            raise ValueError(
                f"codec has the key {key!r}: name a moment ('mu') or a pattern of"
                " parameter paths ('blocks/*/kernel')."
            )
        for one in rule.values() if isinstance(rule, Mapping) else (rule,):
            _codec(one, signed=True)
    plain = all(rule in (None, "float32") for rule in rules.values())
    return {} if plain else rules


def draws(rules: Mapping[str, Any]) -> bool:
    """Whether any codec needs random words."""
    each = [
        one
        for rule in rules.values()
        for one in (rule.values() if isinstance(rule, Mapping) else (rule,))
    ]
    return any(codec.draws for one in each if (codec := _codec(one, True)) is not None)


def choose(
    rules: Mapping[str, Any],
    state_paths: Sequence[jax.tree_util.KeyPath],
    avals: Sequence[Any],
    parameter_paths: Sequence[jax.tree_util.KeyPath],
) -> list[Codec | None]:
    """Finds the codec of each leaf of a state.

    Args:
      rules: From `check`. If several apply to a moment, the last one wins. A key that
        names a moment names no parameter.
      state_paths: The paths of the state's leaves.
      avals: Their shapes and dtypes.
      parameter_paths: The paths of the parameters.

    Returns:
      For each leaf its codec, or None if it is stored as it is: step counts, moments
      of fewer than `SMALLEST_CODED` values.

    Raises:
      ValueError: If a rule names nothing, or a codec does not fit its moment.
    """
    if not rules:
        return [None] * len(avals)
    owners = parameter_of(state_paths, parameter_paths)
    parameters = [_name(path) for path in parameter_paths]
    moments = [
        None
        if owner is None
        else _name(path[: len(path) - len(parameter_paths[owner])][-1:])
        for path, owner in zip(state_paths, owners, strict=True)
    ]
    # Under a parameter's path there may be rules by moment, under a moment's name not.
    by_moment = {
        key
        for key, rule in rules.items()
        if key in moments and not isinstance(rule, Mapping)
    }
    for key in rules:
        if key not in by_moment and not fnmatch.filter(parameters, key) and parameters:
            known = sorted({moment for moment in moments if moment})
            raise ValueError(
                f"codec has the key {key!r}, and no moment is called so"
                f" ({', '.join(known)}) nor any parameter matches it"
                f" ({', '.join(parameters[:3])}, ...)."
            )
    found: list[Codec | None] = []
    for moment, owner, aval in zip(moments, owners, avals, strict=True):
        rule, by_name = None, False
        for key, candidate in rules.items():
            by_path = owner is not None and fnmatch.fnmatchcase(parameters[owner], key)
            if moment == key if key in by_moment else by_path and moment != _MASTER:
                rule, by_name = candidate, key in by_moment
        if isinstance(rule, Mapping):
            rule, by_name = rule.get(moment), True
        small = int(np.prod(aval.shape)) < SMALLEST_CODED
        if owner is None or moment is None or small or rule in (None, "float32"):
            found.append(None)
            continue
        signed = moment not in _SQUARES
        codec = _codec(rule, signed)
        assert codec is not None
        # Of a moment that Optax does not know, its name in the rules is the word.
        if signed and not codec.signed and (moment in _SIGNED or not by_name):
            way_out = "use a signed one"
            if moment not in _SIGNED:
                way_out += f", or, if it has none, name it: codec={{{moment!r}: ...}}"
            raise ValueError(
                f"codec {codec!r} cannot store moment {moment!r}, which may have"
                f" negative values: {way_out}."
            )
        if aval.dtype != jnp.float32:
            raise ValueError(
                f"codec {codec!r} stores float32, and moment {moment!r} of parameter"
                f" {parameters[owner]!r} is {aval.dtype}: leave mu_dtype and its like"
                " out, the codec says how moments are stored."
            )
        found.append(codec)
    return found


def _codec(codec: CodecLike, signed: bool) -> Codec | None:
    if codec is None:
        return None
    if isinstance(codec, str):
        return named(codec, signed)
    lacks = [
        name
        for name in ("block", "signed", "draws", "stored", "encode", "decode")
        if not hasattr(codec, name)
    ]
    if lacks:
        raise ValueError(
            f"codec={codec!r} is neither a codec's name nor an object with the methods"
            f" of paged_optax.codecs.Codec: it has no {', '.join(lacks)}."
        )
    return codec


def _name(path: Any) -> str:
    return slashed(path)
