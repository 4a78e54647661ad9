"""Rules that choose the codec of each moment."""

import math
from collections.abc import Container, Mapping, Sequence, Set

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from paged_optax.backend.text import matching_names, path_name
from paged_optax.backend.types import ArrayOrShape
from paged_optax.codecs import Codec, named
from paged_optax.transform.context import current
from paged_optax.transform.remainders import MASTERS
from paged_optax.transform.trees import leaf_paths

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


def check(codec: Rule | Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rules of `paged(codec=...)`; empty if all moments are in float32."""
    rules: dict[str, Rule] = dict(codec) if isinstance(codec, Mapping) else {"*": codec}
    draws(rules)  # raises for an unknown codec
    plain = all(rule in (None, "float32") for rule in rules.values())
    return {} if plain else rules


def draws(rules: Mapping[str, Rule]) -> bool:
    """Returns whether any codec needs random words."""
    names = [
        name
        for rule in rules.values()
        for name in (rule.values() if isinstance(rule, Mapping) else (rule,))
    ]
    return any([x is not None and x.draws for x in (_codec(y, True) for y in names)])


def choose(
    rules: Mapping[str, Rule],
    state: PyTree[ArrayOrShape],
    params: PyTree[ArrayOrShape],
    param_indices: Sequence[int | None],
    parts: Container[int] = (),
) -> tuple[list[Codec | None], frozenset[int]]:
    """Returns the codec of each leaf of a state, and leaves too small for their rule's.

    If several rules apply to a moment, the last one wins. A key that names a moment
    names no parameter. A key that is a parameter's path is no pattern. `parts` are the
    positions of parts of larger moments, which are coded even if they have few values.
    Raises `ValueError` if a rule names nothing, or its codec cannot store the moment.
    """
    state_paths, leaves = leaf_paths(state)
    codecs, small = dict[int, Codec](), set[int]()
    parameter_paths, _ = leaf_paths(params)
    parameters = [path_name(path) for path in parameter_paths]
    name_of = lambda path, index: path_name(
        path[: len(path) - len(parameter_paths[index])][-1:]
    )
    owners = {n: i for n, i in enumerate(param_indices) if i is not None}
    names = {n: name_of(state_paths[n], i) for n, i in owners.items()}
    named_by = _parameters_named(rules, {*names.values()}, parameters)
    for n, name in names.items():
        parameter = parameters[owners[n]]
        rule, by_name = None, False
        for key, candidate in rules.items():
            group = named_by[key]
            if group is None:
                applies = name == key
            else:  # master weights are no moments
                applies = parameter in group and name not in MASTERS
            if applies:
                rule, by_name = candidate, group is None
        if isinstance(rule, Mapping):
            rule, by_name = rule.get(name), True
        if rule in (None, "float32"):
            continue
        if math.prod(leaves[n].shape) < SMALLEST_CODED and n not in parts:
            small.add(n)
        else:
            moment = name, parameter, leaves[n].dtype
            codecs[n] = _codec_of_moment(rule, by_name, *moment)
    return [*map(codecs.get, range(len(leaves)))], frozenset(small)


def _codec_of_moment(
    rule: CodecLike, by_name: bool, name: str, parameter: str, dtype: np.dtype
) -> Codec:
    """Returns a rule's codec; raises `ValueError` if it cannot store the moment.

    `by_name` is True if the rule names the moment, not its parameter.
    """
    signed = name not in _SQUARES
    codec = _codec(rule, signed)
    assert codec is not None
    # A rule may name a moment that is not Optax's as unsigned.
    if signed and not codec.signed and (name in _SIGNED or not by_name):
        hint = "use a signed one"
        if name not in _SIGNED:
            hint += f", or, if it has none, name it: codec={{{name!r}: ...}}"
        raise ValueError(
            f"codec {codec!r} cannot store moment {name!r}, which may have"
            f" negative values: {hint}."
        )
    if dtype != jnp.float32:
        raise ValueError(
            f"codec {codec!r} stores float32, and moment {name!r} of parameter"
            f" {parameter!r} is {dtype}: leave mu_dtype and its like out, the"
            " codec says how moments are stored; make the parameter, or"
            " master_dtype, float32; or store no codes of it, codec={...,"
            f" {parameter!r}: None}}."
        )
    return codec


def _parameters_named(
    rules: Mapping[str, Rule], moments: Set[str], parameters: Sequence[str]
) -> dict[str, set[str] | None]:
    """Returns for each key the parameters that it names; None if it names moments."""
    named_by: dict[str, set[str] | None] = {}
    for key, rule in rules.items():
        # Rules by moment may be under a parameter's path, not under a moment's name.
        by_moment = key in moments and not isinstance(rule, Mapping)
        named_by[key] = None if by_moment else matching_names(key, parameters)
        # A layerwise step updates a tree with some of the parameters.
        if named_by[key] == set() and parameters and not current().layerwise:
            if key in moments:
                raise ValueError(
                    f"codec={{{key!r}: {rule!r}}}: {key!r} is a moment, and its rule is"
                    " one codec. Rules by moment go under a parameter's path, as in"
                    f" codec={{{parameters[0]!r}: {{{key!r}: 'dynamic_int8'}}}}."
                )
            likely = sorted(parameters, key=lambda x: key.strip("*/") not in x)
            raise ValueError(
                f"codec has the key {key!r}, and no moment is called so"
                f" ({', '.join(sorted(moments))}) nor any parameter matches it"
                f" ({', '.join(likely[:3])}, ...)."
            )
    return named_by


def _codec(codec: CodecLike, signed: bool) -> Codec | None:
    if codec is None:
        return None
    if isinstance(codec, str):
        return named(codec, signed)
    if not hasattr(codec, "encode") or isinstance(codec, type):
        raise ValueError(
            f"codec={codec!r} is neither a codec's name nor an object with the methods"
            " of paged_optax.codecs.Codec."
        )
    return codec
