"""Rules that choose the codec of each moment."""

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    """Parses the `codec` argument of `paged`.

    Returns:
      Its rules, by moment or by pattern of parameter paths; empty if all moments are
      in float32.
    """
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


class CodedMoment(NamedTuple):
    """One moment of one parameter, and the rule that names its codec.

    `by_name` is True if the rule names the moment, not its parameter.
    """

    rule: CodecLike
    by_name: bool
    name: str
    parameter: str
    aval: ArrayOrShape

    @property
    def small(self) -> bool:
        """True if it has too few values for a codec, unless it is part of a whole."""
        return math.prod(self.aval.shape) < SMALLEST_CODED

    @property
    def codec(self) -> Codec:
        """Its codec; raises `ValueError` if it cannot store the moment."""
        name, dtype = self.name, self.aval.dtype
        signed = name not in _SQUARES
        codec = _codec(self.rule, signed)
        assert codec is not None
        # A rule may name a moment that is not Optax's as unsigned.
        if signed and not codec.signed and (name in _SIGNED or not self.by_name):
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
                f" {self.parameter!r} is {dtype}: leave mu_dtype and its like out, the"
                " codec says how moments are stored; make the parameter, or"
                " master_dtype, float32; or store no codes of it, codec={...,"
                f" {self.parameter!r}: None}}."
            )
        return codec


def coded_moments(
    rules: Mapping[str, Rule],
    state: PyTree[ArrayOrShape],
    params: PyTree[ArrayOrShape],
    param_indices: Sequence[int | None],
) -> list[CodedMoment | None]:
    """Returns the moments of a state that rules name a codec for, None for others.

    If several rules apply to a moment, the last one wins. A key that names a moment
    names no parameter. A key that is a parameter's path is no pattern. Raises
    `ValueError` if a rule names nothing.
    """
    if not rules:
        return [None] * len(param_indices)
    parameter_paths, _ = leaf_paths(params)
    parameters = [path_name(path) for path in parameter_paths]
    name_of = lambda path, index: path_name(
        path[: len(path) - len(parameter_paths[index])][-1:]
    )
    pairs = zip(leaf_paths(state)[0], param_indices, strict=True)
    names = [None if i is None else name_of(path, i) for path, i in pairs]
    named_by = _parameters_named(rules, names, parameters)

    def moment(
        name: str | None, index: int | None, aval: ArrayOrShape
    ) -> CodedMoment | None:
        if name is None or index is None:
            return None
        rule, by_name = None, False
        for key, candidate in rules.items():
            group = named_by[key]
            if group is None:
                applies = name == key
            else:  # master weights are no moments
                applies = parameters[index] in group and name not in MASTERS
            if applies:
                rule, by_name = candidate, group is None
        if isinstance(rule, Mapping):
            rule, by_name = rule.get(name), True
        if rule in (None, "float32"):
            return None
        return CodedMoment(rule, by_name, name, parameters[index], aval)

    return list(map(moment, names, param_indices, jax.tree.leaves(state)))


def choose(
    moments: Sequence[CodedMoment | None], parts: Container[int] = ()
) -> list[Codec | None]:
    """Returns the codec of each leaf of a state, or None.

    `moments` are from `coded_moments`, and `parts` the positions of parts of larger
    moments, which are coded even if they have few values.
    """
    return [
        None if x is None or (x.small and index not in parts) else x.codec
        for index, x in enumerate(moments)
    ]


def _parameters_named(
    rules: Mapping[str, Rule], moments: Sequence[str | None], parameters: Sequence[str]
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
            known = sorted({moment for moment in moments if moment})
            likely = sorted(parameters, key=lambda x: key.strip("*/") not in x)
            raise ValueError(
                f"codec has the key {key!r}, and no moment is called so"
                f" ({', '.join(known)}) nor any parameter matches it"
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
