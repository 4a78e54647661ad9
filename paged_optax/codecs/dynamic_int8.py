"""Moments in eight bits, as bitsandbytes stores them.

A code is a position in the dynamic map, `dynamic_map`. A scale is the largest magnitude
of 256 values. The code that is stored is that of the number nearest to
`x * (1 / scale)`. If two numbers are equally near, it is the lower one's. Small second
moments are rounded up from a quarter of the way on: see `DynamicInt8`.

How the nearest number is found, by tables or as on a TPU, is in `map_formula`. The
other format of eight bits, `float8_e4m3`, is in `floats`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, UInt8

from paged_optax.codecs.codec import Noise, Quantized
from paged_optax.codecs.map_formula import (
    MapFormula,
    entry_of,
    map_formula,
    number_by_lines,
    position_by_lines,
    position_by_table,
)
from paged_optax.codecs.packing import (
    MAGNITUDE,
    SMALLEST_NORMAL,
    bits,
    block_absmax,
    block_count,
    from_bits,
    from_blocks,
    to_blocks,
)

_HUGE = np.float32(2.0**126)


# In so many of the lowest decades, whose numbers are far apart, a second moment is
# rounded up from less than half of the way on: see `DynamicInt8`.
_ROUNDED_UP_DECADES = 3
# The part of the way to the next number from which on it is.
_ROUNDED_UP_FROM = 0.25


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
def _formula(signed: bool, rounds_up: bool = False) -> MapFormula:
    """The formula of a map; `rounds_up`: in its lowest decades, from a quarter on."""
    lowest = _ROUNDED_UP_FROM if rounds_up else 0.5
    shares = [lowest if e < _ROUNDED_UP_DECADES else 0.5 for e in range(7)]
    return map_formula(dynamic_map(signed), shares)


@dataclasses.dataclass(frozen=True)
class DynamicInt8:
    """Stores a code of the dynamic map a value: 1 + 4/256 bytes.

    Codes and scales are those of bitsandbytes on the CPU, bit for bit, as its exact
    kernels compute them (float32 up to 0.49, float64 in any version). From 0.50 on its
    float32 kernel rounds `x / scale` to a grid of 2/65535 first, and so turns zeros
    into 2.1e-5 (signed) and 1.6e-5 (unsigned) of the scale; this codec does not.

    The scale of a block that holds NaN is NaN. That of a block that holds an infinity
    and no NaN is infinity. Each value of such a block decodes to NaN or an infinity.
    (bitsandbytes' float32 kernel ignores NaN in the scale and stores it as a finite
    number.) An unsigned map stores negative
    numbers as zero. Denormal numbers are stored exactly; whether decoding flushes them
    to zero is up to the backend.

    Two rules of an unsigned map are not bitsandbytes'. A positive number is never
    stored as zero. It is stored at least as the least positive number of the map,
    3.25e-7 of the scale. Otherwise Adam would take steps of hundreds of learning rates
    if gradients nearly vanish: it would divide a first moment that is not zero by a
    second one that is. Between two of the 15 lowest positive numbers, up to 1.3e-4 of
    the scale, a number is rounded up from a quarter of the way on. Otherwise a second
    moment would stand still while its gradients grow to 25 times its root.

    Attributes:
      signed: Whether the map holds negative numbers: True for first moments, False
        for second moments, which then have one more bit.
      rounds_to_zero: Whether every number is stored as the nearest one, as in
        bitsandbytes. Small positive numbers may then become zero. A signed map always
        rounds so.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = DynamicInt8(signed=True)
      >>> stored = codec.encode(jnp.array([-2.0, 0.0, 1e-3, 2.0]))
      >>> stored.codes.tolist(), stored.scales.tolist()
      ([0, 127, 138, 255], [2.0])
      >>> DynamicInt8(signed=False).encode(jnp.array([0.0, 1e-9, 1.0])).codes.tolist()
      [0, 1, 255]

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022; for second moments that are not zero,
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023, its "zero-point problem".
    """

    signed: bool = True
    rounds_to_zero: bool = False
    name = "dynamic_int8"
    block = 256
    draws = False

    def stored(self, shape: tuple[int, ...]) -> Quantized[jax.ShapeDtypeStruct]:
        """uint8 codes of the moment's shape, a float32 scale for each block."""
        return Quantized(
            jax.ShapeDtypeStruct(shape, jnp.uint8),
            jax.ShapeDtypeStruct((block_count(shape, self.block),), jnp.float32),
        )

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized[Array]:
        """Stores a page."""
        values = to_blocks(page, self.block)
        scales = block_absmax(values)
        scaled = _scaled(values, scales[:, None])
        codes = _nearest(scaled, bits(values), self.signed, self.rounds_to_zero)
        codes = codes.astype(jnp.uint8)
        return Quantized(from_blocks(codes, page.shape), scales)

    def decode(
        self, stored: Quantized[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Gives a page back."""
        numbers = _number(to_blocks(stored.codes, self.block), self.signed)
        return from_blocks(numbers * stored.scales[:, None], shape)


def _scaled(
    x: Float32[Array, "blocks block"], scale: Float32[Array, "blocks 1"]
) -> Float32[Array, "blocks block"]:
    """Computes `abs(x) * (1 / scale)` with bitsandbytes' roundings, at most 1."""
    # Backends that flush denormal numbers to zero must not meet one: those of `x` are
    # read off their bits, times 2^126; a reciprocal that would be one (of 2^126 and
    # above) is rounded to its few digits here, times 2^126 too. Zero times the infinite
    # reciprocal of a zero or tiny scale is NaN, as in bitsandbytes.
    one, unit = np.float32(1), np.float32(2.0**-23)
    shift = np.float32(2.0**-126)
    tiny, huge = bits(scale) < SMALLEST_NORMAL, scale >= _HUGE
    units = bits(scale).astype(jnp.float32) * np.float32(2.0**-22)
    reciprocal = jnp.where(tiny, np.float32(2.0**127) / units, one / scale)
    reciprocal = jnp.where(huge, _few_digits(scale * shift), reciprocal)
    magnitude = bits(x) & MAGNITUDE
    denormal = magnitude < SMALLEST_NORMAL
    magnitudes = from_bits(magnitude) * jnp.where(huge, shift, one)
    scaled = jnp.where(
        denormal, magnitude.astype(jnp.float32) * unit, magnitudes
    ) * jnp.where(denormal, reciprocal * shift, reciprocal)
    return jnp.minimum(scaled, one)


def _few_digits(x: Float32[Array, "blocks 1"]) -> Float32[Array, "blocks 1"]:
    """Rounds `1 / x`, of 1 <= x < 4, to a multiple of 2^-23."""
    # The quotient has been rounded once already. Where that made it a tie, the exact
    # remainder decides: it is small, so that its lowest 32 bits are all of it.
    quotient = np.float32(2.0**23) / x
    below = jnp.floor(quotient)
    half = quotient - below
    integer = (x * np.float32(2.0**23)).astype(jnp.int32)
    remainder = -(2 * below.astype(jnp.int32) + 1) * integer
    up = (half > np.float32(0.5)) | ((half == np.float32(0.5)) & (remainder > 0))
    return (below + up.astype(jnp.float32)) * np.float32(2.0**-23)


def _nearest(
    scaled: Float32[Array, "*shape"],
    pattern: Int32[Array, "*shape"],
    signed: bool,
    rounds_to_zero: bool,
) -> Int32[Array, "*shape"]:
    """The code of the number nearest to a value; 0 for NaN.

    `scaled` is the value's magnitude, divided by the scale, and `pattern` has its bits.
    `rounds_to_zero` says whether zero may be the nearest to what is not zero.
    """
    rounds = signed or rounds_to_zero
    formula, negative = _formula(signed, rounds_up=not rounds), pattern < 0
    # Of two numbers as near, the lower: below zero that is the larger magnitude. So
    # one bit more tells a midpoint that is met from one that lies between two floats.
    key = 2 * bits(scaled) + (negative.astype(jnp.int32) if signed else 0)
    # A TPU looks entries up one by one. Elsewhere the lines' sixty operations would
    # take three times as long to compile as the table (H200, jax 0.10.2).
    position = lax.platform_dependent(
        scaled,
        key,
        tpu=functools.partial(position_by_lines, formula),
        default=functools.partial(position_by_table, formula),
    )
    stays = key > np.int32(formula.edges[0]) if rounds else pattern > 0
    position = jnp.where(stays, jnp.maximum(position, formula.zero + 1), formula.zero)
    if signed:
        code = jnp.where(negative, jnp.maximum(127 - position, 0), 127 + position)
    else:
        code = jnp.where(negative, 0, position - 1)
    return jnp.where(jnp.isnan(scaled), 0, code)


def _number(code: UInt8[Array, "*shape"], signed: bool) -> Float32[Array, "*shape"]:
    return lax.platform_dependent(
        code.astype(jnp.int32),
        tpu=functools.partial(number_by_lines, _formula(signed), signed),
        default=functools.partial(entry_of, dynamic_map(signed)),
    )
