r"""The dynamic map as a table, and as lines for a TPU.

A position counts the numbers of a map from zero on. A table finds it: the higher bits
of a float select the nearest number, or two numbers and the midpoint between them.

A TPU gathers entries sequentially, so that it computes the entries instead. Positions
have the form :math:`2^e + j`: the leading bit is the decade, the others the index in
it. Numbers, and the midpoints between them, are on one line a decade,

.. math:: \text{number} = c_e (18 m - 16 \cdot 2^e + 9), \qquad
          \text{midpoint below } t = c'_e (9 t - 8 \cdot 2^e),

up to float32 rounding in the map: at most three units in the last place, which two bits
an entry correct.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from paged_optax.codecs.packing import bits, from_bits, lookup

# The low bits of a float, without which `MapFormula.positions` is indexed.
_LOW_BITS = 16

_NEVER = 2 ** (_LOW_BITS + 1)

_EXPONENT = np.int32(0x7F800000)


class DecadeLines(NamedTuple):
    """Coefficients that reproduce the 8-bit map exactly in float32."""

    factors: tuple[float, ...]  # of each decade's line
    words: tuple[int, ...]  # two bits an entry, sixteen entries a word
    unit: int  # the value of one step of these bits
    least: int  # the correction where they are 0

    def correction(self, entry: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """Returns an entry's correction, in units of the last place."""
        word = lookup(entry >> np.int32(4), self.words)
        two_bits = (word >> ((entry & np.int32(15)) * 2)) & np.int32(3)
        return two_bits * self.unit + self.least


class MapFormula(NamedTuple):
    """A map as arithmetic.

    A position counts numbers from zero on, so that decade e begins at a power of two.
    For numbers that are rounded up from a quarter of the distance, that point is the
    midpoint.
    """

    powers: tuple[int, ...]  # the first position of each decade
    slopes: tuple[float, ...]  # positions per unit in each decade
    # For each decade s in the formula of its midpoints: `(27 t - s) * factor` is the
    # midpoint below position t, before its correction.
    starts: tuple[float, ...]
    edges: tuple[int, ...]  # keys of the midpoints below each decade and below 1
    zero: int  # the position of 0
    one: int  # the position of 1
    midpoints: DecadeLines  # the midpoint below each other position
    numbers: DecadeLines  # the number at each position
    # The higher bits of the first entry's floats, and the entries. An entry is for all
    # floats with equal higher bits. Its higher bits are the position of the least of
    # these floats. Its lowest `_LOW_BITS + 2` bits are the low bits of the key of the
    # only midpoint among them, or `_NEVER`.
    positions: tuple[int, np.ndarray]


def map_formula(numbers: np.ndarray, rounded_up_from: Sequence[float]) -> MapFormula:
    """Returns the formula of a map, from its numbers in increasing order.

    `rounded_up_from` has for each decade the part of the distance to the next number
    from which a value is rounded up; 0.5 except for second moments.
    """
    signed = bool(numbers[0] < 0)
    numbers, zero = numbers[127 if signed else 0 :], 0 if signed else 1
    powers = tuple(2**e for e in range(zero, zero + 7))
    tops = [10.0 ** (e - 6) for e in range(7)]
    # By position: the number there, and the key of the midpoint below it.
    values = np.concatenate([np.zeros(zero, np.int32), numbers.view(np.int32)])
    keys = np.concatenate([np.zeros(zero + 1, np.int32), _keys(numbers)])
    for power, share in zip(powers, rounded_up_from, strict=True):
        if share != 0.5:
            decade = numbers[power - zero : 2 * power - zero + 1]
            low, high = decade[:-1], decade[1:]
            middle = low + np.float32(share) * (high - low)
            keys[power + 1 : 2 * power + 1] = 2 * middle.view(np.int32)
    starts = tuple(
        24 * p + 27 * (0.5 - share)
        for p, share in zip(powers, rounded_up_from, strict=True)
    )
    pairs = zip(powers, starts, strict=True)
    multiples = [27.0 * np.arange(p + 1, 2 * p) - start for p, start in pairs]
    return MapFormula(
        powers=powers,
        slopes=tuple(p / (0.9 * top) for p, top in zip(powers, tops, strict=True)),
        starts=starts,
        edges=tuple(int(keys[p]) for p in (*powers, 2 * powers[-1])),
        zero=zero,
        one=2 * powers[-1],
        midpoints=_lines(
            [np.arange(p + 1, 2 * p) for p in powers],
            multiples,
            [top / (30 * p) for p, top in zip(powers, tops, strict=True)],
            # Without negative numbers keys are even.
            *((keys, 2, 1, 0) if signed else (keys & ~1, 2, 2, -4)),
        ),
        numbers=_lines(
            [np.arange(p, 2 * p) for p in powers],
            [18.0 * np.arange(p) + 2 * p + 9 for p in powers],
            [top / (20 * p) for p, top in zip(powers, tops, strict=True)],
            *(values, 1, 1, -1),
        ),
        positions=_positions(keys[zero + 1 :], zero),
    )


def position_by_table(
    formula: MapFormula, scaled: Float32[Array, "*shape"], key: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """Returns the position of the nearest number, by the table."""
    first, entries = formula.positions
    entry = jnp.clip((bits(scaled) >> _LOW_BITS) - first, 0, len(entries) - 1)
    entry = entry_of(entries, entry)
    above = (key & np.int32(_NEVER - 1)) > (entry & np.int32(2 * _NEVER - 1))
    return (entry >> (_LOW_BITS + 2)) + above.astype(jnp.int32)


def position_by_lines(
    formula: MapFormula, scaled: Float32[Array, "*shape"], key: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """Returns the position of the nearest number, by the lines."""
    factors = formula.midpoints.factors
    columns = (formula.powers, formula.slopes, formula.starts, factors)
    power, slope, start, factor = (np.float32(column[0]) for column in columns)
    # Each value gets the line of its decade.
    for edge, *entries in zip(
        formula.edges[1:-1], *(c[1:] for c in columns), strict=True
    ):
        above = key > np.int32(edge)
        power, slope, start, factor = (
            jnp.where(above, np.float32(new), old)
            for new, old in zip(entries, (power, slope, start, factor), strict=True)
        )
    # The midpoint nearest to the value, up to rounding.
    t = jnp.round(scaled * slope + power * np.float32(8 / 9))
    line = (np.float32(27) * t - start) * factor
    t, first = t.astype(jnp.int32), power.astype(jnp.int32)
    midpoint = 2 * bits(line) + formula.midpoints.correction(t)
    position = t - 1 + (key > midpoint).astype(jnp.int32)
    position = jnp.clip(position, first, 2 * first - 1)
    return jnp.where(key > np.int32(formula.edges[-1]), formula.one, position)


def number_by_lines(
    formula: MapFormula, signed: bool, code: Int32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns the number of a code, by the lines."""
    position = jnp.abs(code - 127) if signed else code + 1
    as_float = position.astype(jnp.float32)
    # The leading bit of a position is its decade, and the exponent of its float.
    power = from_bits(bits(as_float) & _EXPONENT)
    factor = np.float32(formula.numbers.factors[0])
    entries = zip(formula.powers[1:], formula.numbers.factors[1:], strict=True)
    for first, new in entries:
        factor = jnp.where(position >= np.int32(first), np.float32(new), factor)
    line = (np.float32(18) * as_float - np.float32(16) * power + np.float32(9)) * factor
    number = from_bits(bits(line) + formula.numbers.correction(position))
    number = jnp.where(position == formula.zero, np.float32(0), number)
    number = jnp.where(position == formula.one, np.float32(1), number)
    return jnp.where(code < 127, -number, number) if signed else number


def entry_of(table: np.ndarray, index: Int32[Array, "*shape"]) -> Array:
    """Returns entries of a table at indices within it."""
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def _positions(midpoints: np.ndarray, zero: int) -> tuple[int, np.ndarray]:
    """Returns `MapFormula.positions`; the first entry is below all midpoints."""
    first = int(midpoints[0] // _NEVER) - 1
    last = int(np.float32(1).view(np.int32)) >> _LOW_BITS
    least = np.arange(first, last + 1) * _NEVER
    below = np.searchsorted(midpoints, least)
    next_one = np.append(midpoints, _NEVER * (last + 2))[below] - least
    assert np.all(np.diff(below) <= 1)
    entries = (zero + below) * 2 * _NEVER + np.minimum(next_one, _NEVER)
    return first, entries.astype(np.int32)


def _keys(numbers: np.ndarray) -> np.ndarray:
    """Returns for each number the key of the midpoint above it.

    That is twice the bits of the last float not nearer to the next number, plus one
    unless that float is equally near to both.
    """
    # Distances are rounded to float32, as in bitsandbytes, which shifts midpoints
    # between 5.5e-7 and 3.25e-6.
    low, high = numbers[:-1], numbers[1:]
    middle = ((low + high) / np.float32(2)).view(np.int32)
    around = middle + np.arange(-3, 4, dtype=np.int32)[:, None]
    nearer_high = (high - around.view(np.float32)) < (around.view(np.float32) - low)
    last = middle - 4 + (~nearer_high).sum(axis=0).astype(np.int32)
    met = high - last.view(np.float32) == last.view(np.float32) - low
    return 2 * last + 1 - met


def _lines(
    entries: Sequence[np.ndarray],
    multiples: Sequence[np.ndarray],
    factors: Sequence[float],
    wanted: np.ndarray,
    scale: int,
    unit: int,
    least: int,
) -> DecadeLines:
    """Returns lines whose corrections fit two bits an entry.

    For each decade there are its entries, the multiples of its factor at each, and the
    factor of the exact formula. `wanted` has the integer at each entry, in `scale`
    units for one in the last place of the line. The two bits count `unit`s from the
    correction `least`.
    """
    fitted, steps = [], np.zeros(wanted.size - 1, np.int64)
    for entry, multiple, factor in zip(entries, multiples, factors, strict=True):
        start = np.float32(factor).view(np.int32)
        # The factor by the real formula first, then its neighbours.
        for ulps in sorted(range(-8, 9), key=abs):
            candidate = (start + np.int32(ulps)).view(np.float32)
            line = multiple.astype(np.float32) * candidate
            away = wanted[entry] - scale * line.view(np.int32) - least
            if np.all((away >= 0) & (away <= 3 * unit)):
                break
        else:
            raise AssertionError("no factor comes near enough to the map")
        fitted.append(float(candidate))
        steps[entry] = away // unit
    packed = (steps.reshape(-1, 16) << 2 * np.arange(16)).sum(axis=1)
    words = tuple(packed.astype(np.uint32).view(np.int32).tolist())
    return DecadeLines(tuple(fitted), words, unit, least)
