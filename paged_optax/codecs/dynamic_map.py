"""The maps of codes to numbers: tables, and for a TPU lines.

A TPU looks entries up one by one.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from paged_optax.codecs.packing import lookup


def _spaced(count: int) -> np.ndarray:
    """`torch.linspace(0.1, 1, count + 1)` in float32, as its vectorised CPU loop is."""
    # It steps from whichever end is nearer, multiplying and adding with one rounding;
    # float64 holds the product exactly. Other formulas miss a few entries by one ulp.
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count))
    k = np.arange(count + 1)
    from_first = np.float64(first) + step * k
    from_last = np.float64(last) - step * (count - k)
    return np.where(2 * k < count + 1, from_first, from_last).astype(np.float32)


@functools.cache
def dynamic_map(signed: bool, decades: int = 7) -> np.ndarray:
    r"""The dynamic map: more digits for larger numbers, more range for smaller ones.

    Decade :math:`e` (from the smallest) is cut into :math:`n_e` equal intervals and
    holds their centres,

    .. math::
        10^{e - d + 1} \left(0.1 + 0.9 \frac{j + 1/2}{n_e}\right),
        \quad 0 \le j < n_e,\ 0 \le e < d,

    with :math:`n_e = 2^e` and both signs, or :math:`n_e = 2^{e + 1}` without. 0 and 1
    complete the map; -1 is not in it.

    Args:
      signed: Whether it holds negative numbers.
      decades: Powers of ten it spans: 7 for 8 bits, 3 for 4.

    Returns:
      The numbers in increasing order, float32; a code is a position among them. They
      are bitsandbytes' own, bit for bit.

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022; Dettmers, `8-Bit Approximations for
      Parallelism in Deep Learning <https://arxiv.org/abs/1511.04561>`_, 2016.
    """
    # The largest decade ends at 1, each lower one at a tenth of the next.
    positive = []
    for exponent in range(decades):
        edges = _spaced(2 ** (exponent if signed else exponent + 1))
        centres = (edges[:-1] + edges[1:]) / np.float32(2)
        positive.append(np.float32(10.0 ** (exponent - decades + 1)) * centres)
    numbers = np.concatenate(positive)
    negative = -numbers if signed else numbers[:0]
    ends = np.array([0, 1], np.float32)
    numbers = np.sort(np.concatenate([negative, numbers, ends]))
    numbers.flags.writeable = False
    return numbers


@functools.cache
def linear_map() -> np.ndarray:
    """The 16 multiples of 1/16 up to 1; 0 is not among them.

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023.
    """
    numbers = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    numbers.flags.writeable = False
    return numbers


# The bits of a float that `MapFormula.positions` leaves out; a key has one more.
LOW_BITS = 16

NEVER = 2 ** (LOW_BITS + 1)

#: In so many of the lowest decades, whose numbers are far apart, a second moment is
#: rounded up from less than half of the way on: see `DynamicInt8`.
ROUNDED_UP_DECADES = 3
#: The part of the way to the next number from which on it is.
ROUNDED_UP_FROM = 0.25


class DecadeLines(NamedTuple):
    """What float32 arithmetic needs to meet the entries of a map to the last bit.

    Attributes:
      factors: The factor of each decade's line.
      words: Two bits an entry, sixteen entries a word.
      unit: What one step of these two bits means.
      least: What is added where they are 0.
    """

    factors: tuple[float, ...]
    words: tuple[int, ...]
    unit: int
    least: int

    def correction(self, entry: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """What is added to each entry's number, in units of the last place."""
        word = lookup(entry >> np.int32(4), self.words, jnp.int32)
        two_bits = (word >> ((entry & np.int32(15)) * 2)) & np.int32(3)
        return two_bits * self.unit + self.least


class MapFormula(NamedTuple):
    """The map as arithmetic.

    A position counts numbers from zero on, so that decade e begins at a power of two.
    Numbers that are rounded up from a quarter of the way on have that point between
    them for a midpoint.

    Attributes:
      powers: The first position of each decade.
      slopes: Positions a unit in each decade.
      starts: For each decade the number s of the formula of its midpoints: the midpoint
        below position t is `(27 t - s) * factor`, before its last bits are corrected.
      edges: The midpoints below each decade and below 1, as `_nearest` compares them.
      zero: The position of 0.
      one: The position of 1.
      midpoints: The midpoint below each other position.
      numbers: The number at each position.
      positions: The higher bits of the first entry's floats, and the entries. An
        entry serves all floats with the same higher bits. Its higher bits are the
        position of the least of these floats. Its lowest `LOW_BITS + 2` bits are the
        rest of the key of the midpoint among them, or `NEVER` if there is none. No
        entry has two midpoints.
    """

    powers: tuple[int, ...]
    slopes: tuple[float, ...]
    starts: tuple[float, ...]
    edges: tuple[int, ...]
    zero: int
    one: int
    midpoints: DecadeLines
    numbers: DecadeLines
    positions: tuple[int, np.ndarray]


@functools.cache
def map_formula(signed: bool, rounds_up: bool = False) -> MapFormula:
    """The formula of a map; `rounds_up`: in its lowest decades, from a quarter on."""
    numbers = dynamic_map(signed)[127 if signed else 0 :]
    zero = 0 if signed else 1
    powers = tuple(2**e for e in range(zero, zero + 7))
    tops = [10.0 ** (e - 6) for e in range(7)]
    # By position: the number there, and the key of the midpoint below it.
    values = np.concatenate([np.zeros(zero, np.int32), numbers.view(np.int32)])
    keys = np.concatenate([np.zeros(zero + 1, np.int32), _keys(numbers)])
    at = [
        ROUNDED_UP_FROM if rounds_up and e < ROUNDED_UP_DECADES else 0.5
        for e in range(7)
    ]
    for power, share in zip(powers, at, strict=True):
        if share != 0.5:
            decade = numbers[power - zero : 2 * power - zero + 1]
            keys[power + 1 : 2 * power + 1] = _keys_at(share, decade)
    starts = tuple(24 * p + 27 * (0.5 - x) for p, x in zip(powers, at, strict=True))
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
            # Without negative numbers a key is even, and which midpoints are met
            # makes no difference.
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


def _positions(midpoints: np.ndarray, zero: int) -> tuple[int, np.ndarray]:
    """`MapFormula.positions`; the first entry is of the floats below all midpoints."""
    first = int(midpoints[0] // NEVER) - 1
    last = int(np.float32(1).view(np.int32)) >> LOW_BITS
    least = np.arange(first, last + 1) * NEVER
    below = np.searchsorted(midpoints, least)
    next_one = np.append(midpoints, NEVER * (last + 2))[below] - least
    assert np.all(np.diff(below) <= 1)
    entries = (zero + below) * 2 * NEVER + np.minimum(next_one, NEVER)
    return first, entries.astype(np.int32)


def _keys(numbers: np.ndarray) -> np.ndarray:
    """For each number, twice the bits of the last float not nearer to the next number.

    One is added unless that float is exactly as near to both.
    """
    # Distances are rounded to float32, as bitsandbytes' are; between 5.5e-7 and 3.25e-6
    # that moves the midpoint.
    low, high = numbers[:-1], numbers[1:]
    middle = ((low + high) / np.float32(2)).view(np.int32)
    around = middle + np.arange(-3, 4, dtype=np.int32)[:, None]
    nearer_high = (high - around.view(np.float32)) < (around.view(np.float32) - low)
    last = middle - 4 + (~nearer_high).sum(axis=0).astype(np.int32)
    met = high - last.view(np.float32) == last.view(np.float32) - low
    return 2 * last + 1 - met


def _keys_at(share: float, numbers: np.ndarray) -> np.ndarray:
    """Twice the bits of the float that lies so far between each number and the next."""
    low, high = numbers[:-1], numbers[1:]
    return 2 * (low + np.float32(share) * (high - low)).view(np.int32)


def _lines(
    entries: Sequence[np.ndarray],
    multiples: Sequence[np.ndarray],
    factors: Sequence[float],
    wanted: np.ndarray,
    scale: int,
    unit: int,
    least: int,
) -> DecadeLines:
    """Finds factors that come so near that two bits an entry are enough.

    Args:
      entries: The entries of each decade.
      multiples: The multiples of the decade's factor at each.
      factors: The factors by the real formula; those of the result are a few ulps away.
      wanted: What is to come out at each entry, as an integer.
      scale: Its units for one unit in the last place of the line.
      unit: Its units for one step of the two bits.
      least: What the two bits count from.
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
