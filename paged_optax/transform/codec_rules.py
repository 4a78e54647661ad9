"""Rules that choose the codec of each moment."""

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_optax.backend.text import matching_names, path_name
from paged_optax.backend.types import ArrayOrShape, KeyPath
from paged_optax.codecs import Codec, named

#: A value of `paged(codec=...)` for one moment.
CodecLike = str | Codec | None

#: A value under one key: for all moments, or for each moment by its name.
Rule = CodecLike | Mapping[str, CodecLike]

#: Moments of fewer values are not coded (bitsandbytes' `min_8bit_size`).
SMALLEST_CODED = 4096

#: Names of Optax's moments that are means or sums of squares, without a sign.
_SQUARES = frozenset("nu v v_row v_col sum_of_squares".split())

#: Names of Optax's moments with negative values.
_SIGNED = frozenset("m m1 m2 mu trace".split())

#: Names of master weights (see `precision`), which are no moments.
_MASTERS = frozenset(["master", "remainder"])


def check(codec: Rule | Mapping[str, Rule]) -> dict[str, Rule]:
    """Parses the `codec` argument of `paged`.

    Returns:
      Its rules, by moment or by pattern of parameter paths; empty if all moments are
      in float32.

    Raises:
      ValueError: If a codec is unknown.
    """
    rules: dict[str, Rule] = dict(codec) if isinstance(codec, Mapping) else {"*": codec}
    for key, rule in rules.items():
        if not isinstance(key, str):
            raise ValueError(
                f"codec has the key {key!r}: name a moment ('mu') or a pattern of"
                " parameter paths ('blocks/*/kernel')."
            )
        for one in _codecs_of(rule):
            _codec(one, signed=True)
    plain = all(rule in (None, "float32") for rule in rules.values())
    return {} if plain else rules


def draws(rules: Mapping[str, Rule]) -> bool:
    """Returns whether any codec needs random words."""
    codecs = [_codec(x, True) for rule in rules.values() for x in _codecs_of(rule)]
    return any(codec is not None and codec.draws for codec in codecs)


def _codecs_of(rule: Rule) -> Collection[CodecLike]:
    return rule.values() if isinstance(rule, Mapping) else (rule,)


def choose(
    rules: Mapping[str, Rule],
    state_paths: Sequence[KeyPath],
    avals: Sequence[ArrayOrShape],
    parameter_paths: Sequence[KeyPath],
    owners: Sequence[int | None],
    dtypes: Sequence[np.dtype],
    parts: Container[int] = (),
) -> list[Codec | None]:
    """Returns the codec of each leaf of a state.

    Args:
      rules: From `check`. If several apply to a moment, the last one wins. A key that
        names a moment names no parameter. A key that is a parameter's path is no
        pattern.
      state_paths: The paths of the state's leaves.
      avals: Their shapes and dtypes.
      parameter_paths: The paths of the parameters.
      owners: For each leaf the parameter that it belongs to, or None.
      dtypes: The dtypes of the parameters.
      parts: The positions of leaves that are parts of larger ones: these are coded
        even if they have few values.

    Returns:
      For each leaf its codec; None for step counts and for moments of fewer than
      `SMALLEST_CODED` values.

    Raises:
      ValueError: If a rule names nothing, or a codec does not fit its moment.
    """
    every = _asked(rules, state_paths, avals, parameter_paths, owners, dtypes)
    codecs: list[Codec | None] = []
    for position, asked in enumerate(every):
        if asked is None or (_is_small(asked[2]) and position not in parts):
            codecs.append(None)
        else:
            codecs.append(_fitting(*asked))
    return codecs


def left_for_size(
    rules: Mapping[str, Rule],
    state_paths: Sequence[KeyPath],
    avals: Sequence[ArrayOrShape],
    parameter_paths: Sequence[KeyPath],
    owners: Sequence[int | None],
    dtypes: Sequence[np.dtype],
) -> list[bool]:
    """Returns for each leaf whether it is too small for the codec of its rule.

    The arguments equal the arguments of `choose`.
    """
    every = _asked(rules, state_paths, avals, parameter_paths, owners, dtypes)
    return [asked is not None and _is_small(asked[2]) for asked in every]


def _asked(
    rules: Mapping[str, Rule],
    state_paths: Sequence[KeyPath],
    avals: Sequence[ArrayOrShape],
    parameter_paths: Sequence[KeyPath],
    owners: Sequence[int | None],
    dtypes: Sequence[np.dtype],
) -> Iterator["tuple[CodecLike, bool, _Moment] | None"]:
    """Yields each leaf's codec by rule, whether the rule names the moment, and it."""
    parameters = [path_name(path) for path in parameter_paths]
    moments = [
        None
        if owner is None
        else path_name(path[: len(path) - len(parameter_paths[owner])][-1:])
        for path, owner in zip(state_paths, owners, strict=True)
    ]
    named_by = _parameters_named(rules, moments, parameters)
    masters = {
        x.dtype for x, name in zip(avals, moments, strict=True) if name == "master"
    }
    for moment, owner, aval in zip(moments, owners, avals, strict=True):
        if owner is None or moment is None:
            yield None
            continue
        dtype = dtypes[owner]
        which = _Moment(moment, parameters[owner], aval, dtype, aval.dtype in masters)
        rule, by_name = _last_match(rules, named_by, which)
        yield None if rule in (None, "float32") else (rule, by_name, which)


def _is_small(moment: "_Moment") -> bool:
    return math.prod(moment.aval.shape) < SMALLEST_CODED


class _Moment(NamedTuple):
    """One moment of one parameter.

    Attributes:
      name: The name of the moment, such as `mu`.
      parameter: The path of the parameter.
      aval: Its shape and dtype.
      of: The dtype of the parameter.
      as_masters: True if it has the dtype of master weights.
    """

    name: str
    parameter: str
    aval: ArrayOrShape
    of: np.dtype
    as_masters: bool


def _parameters_named(
    rules: Mapping[str, Rule],
    moments: Sequence[str | None],
    parameters: Sequence[str],
) -> dict[str, set[str] | None]:
    """Returns for each key the parameters that it names; None if it names moments."""
    named_by: dict[str, set[str] | None] = {}
    for key, rule in rules.items():
        # Rules by moment may be under a parameter's path, not under a moment's name.
        by_moment = key in moments and not isinstance(rule, Mapping)
        named_by[key] = None if by_moment else matching_names(key, parameters)
        if not by_moment and not named_by[key] and parameters:
            known = sorted({moment for moment in moments if moment})
            likely = sorted(parameters, key=lambda x: key.strip("*/") not in x)
            raise ValueError(
                f"codec has the key {key!r}, and no moment is called so"
                f" ({', '.join(known)}) nor any parameter matches it"
                f" ({', '.join(likely[:3])}, ...)."
            )
    return named_by


def _last_match(
    rules: Mapping[str, Rule], named_by: Mapping[str, set[str] | None], moment: _Moment
) -> tuple[CodecLike, bool]:
    """Returns the last rule that applies to a moment, and whether it names it."""
    rule, by_name = None, False
    for key, candidate in rules.items():
        parameters = named_by[key]
        if parameters is None:
            applies = moment.name == key
        else:
            applies = moment.parameter in parameters and moment.name not in _MASTERS
        if applies:
            rule, by_name = candidate, parameters is None
    if isinstance(rule, Mapping):
        return rule.get(moment.name), True
    return rule, by_name


def _fitting(rule: CodecLike, by_name: bool, moment: _Moment) -> Codec:
    """Returns the codec of a rule; raises if it cannot store the moment."""
    name, dtype = moment.name, moment.aval.dtype
    signed = name not in _SQUARES
    codec = _codec(rule, signed)
    assert codec is not None
    # A rule may name a moment that is not Optax's as unsigned.
    if signed and not codec.signed and (name in _SIGNED or not by_name):
        way_out = "use a signed one"
        if name not in _SIGNED:
            way_out += f", or, if it has none, name it: codec={{{name!r}: ...}}"
        raise ValueError(
            f"codec {codec!r} cannot store moment {name!r}, which may have"
            f" negative values: {way_out}."
        )
    if dtype != jnp.float32:
        raise ValueError(
            f"codec {codec!r} stores float32, and moment {name!r} of parameter"
            f" {moment.parameter!r} is {dtype}{_way_to_float32(moment)}"
        )
    return codec


def _way_to_float32(moment: _Moment) -> str:
    """Returns why a moment is not in float32, and the way out."""
    # `inner` computes with parameters of fewer bits in float32.
    if moment.aval.dtype == moment.of and moment.of.itemsize > 4:
        way_out = f"store no codes of it, codec={{..., {moment.parameter!r}: None}}"
        if jnp.issubdtype(moment.of, jnp.floating):
            way_out = f"make the parameter float32, or {way_out}"
        return f", as the parameter is: {way_out}."
    if moment.as_masters:
        return ", as master_dtype says: pass master_dtype='float32'."
    return ": leave mu_dtype and its like out, the codec says how moments are stored."


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
    if isinstance(codec, type):
        raise ValueError(
            f"codec={codec!r} is a class: pass an object of it, such as"
            f" {codec.__name__}()."
        )
    return codec
