"""Moments in eight bits, as bitsandbytes stores them.

A code is an index in the dynamic map, `dynamic_map`. A scale is the largest magnitude
of 256 values. The code of the number nearest to `x * (1 / scale)` is stored; of two
equally near ones, the lower. Small second moments are rounded up from a quarter of the
distance: see `DynamicInt8`. `map_formula` finds the nearest number, by a table or, on a
TPU, by arithmetic.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32

from paged_optax.codecs.codec import Noise, Quantized, quantized_types
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
    from_bits,
    from_blocks,
    to_blocks,
)

_HUGE = np.float32(2.0**126)

# The lowest decades, in which a second moment is rounded up from this part of the
# distance to the next number: see `DynamicInt8`.
_ROUNDED_UP_DECADES = 3
_ROUNDED_UP_FROM = 0.25


def _spaced(count: int) -> np.ndarray:
    """Returns `torch.linspace(0.1, 1, count + 1)` in float32, as on a CPU."""
    # It steps from the nearer end, with one rounding of product and sum; float64 has
    # the product exactly. Other formulas differ in a few entries by one ulp.
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count))
    k = np.arange(count + 1)
    from_first = np.float64(first) + step * k
    from_last = np.float64(last) - step * (count - k)
    return np.where(2 * k < count + 1, from_first, from_last).astype(np.float32)


@functools.cache
def dynamic_map(signed: bool, decades: int = 7) -> np.ndarray:
    r"""Returns the dynamic map: more precision for larger numbers, and more range.

    Decade :math:`e` (from the smallest) is divided into :math:`n_e` equal intervals and
    has their centres,

    .. math::
        10^{e - d + 1} \left(0.1 + 0.9 \frac{j + 1/2}{n_e}\right),
        \quad 0 \le j < n_e,\ 0 \le e < d,

    with :math:`n_e = 2^e` and both signs, or :math:`n_e = 2^{e + 1}` without signs. The
    map also has 0 and 1, but not -1.

    Args:
      signed: If True, it has negative numbers.
      decades: Powers of ten: 7 for 8 bits, 3 for 4.

    Returns:
      The numbers in increasing order, float32, equal to bitsandbytes' bit for bit.

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
    limits = np.array([0, 1], np.float32)
    numbers = np.sort(np.concatenate([negative, numbers, limits]))
    numbers.flags.writeable = False
    return numbers


@functools.cache
def _formula(signed: bool, rounds_up: bool = False) -> MapFormula:
    """Returns the formula of a map; `rounds_up` applies to its lowest decades."""
    lowest = _ROUNDED_UP_FROM if rounds_up else 0.5
    shares = [lowest if e < _ROUNDED_UP_DECADES else 0.5 for e in range(7)]
    return map_formula(dynamic_map(signed), shares)


@dataclasses.dataclass(frozen=True)
class DynamicInt8:
    """Stores a code of the dynamic map for each value: 1 + 4/256 bytes.

    Codes and scales equal bitsandbytes' on the CPU bit for bit, as its exact kernels
    compute them (float32 up to 0.49, float64 in any version). From 0.50 on its float32
    kernel rounds `x / scale` to a grid of 2/65535 first, which turns zeros into 2.1e-5
    (signed) and 1.6e-5 (unsigned) of the scale; this codec does not.

    A block with NaN has scale NaN, and a block with an infinity and no NaN has an
    infinite scale; all its values decode to NaN or an infinity. (bitsandbytes' float32
    kernel ignores NaN.) An unsigned map stores negative numbers as zero. Denormal
    numbers are stored exactly; a backend may flush them to zero when decoding.

    An unsigned map differs from bitsandbytes in two rules. A positive number is never
    stored as zero, but at least as 3.25e-7 of the scale, the least positive number of
    the map. Otherwise Adam would divide a nonzero first moment by a second moment of
    zero, and take steps of hundreds of learning rates. Between two of the 15 lowest
    positive numbers, up to 1.3e-4 of the scale, a number is rounded up from a quarter
    of the distance. Otherwise a second moment would not change while its gradients grow
    to 25 times its root.

    Attributes:
      signed: If True, the map has negative numbers, for first moments; else one more
        bit of precision, for second moments.
      rounds_to_zero: If True, positive numbers of an unsigned map are stored as the
        nearest number, possibly zero, as in bitsandbytes.

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
      <https://arxiv.org/abs/2110.02861>`_, 2022; for nonzero second moments, Li et al.,
      `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023, its "zero-point problem".
    """

    signed: bool = True
    rounds_to_zero: bool = False
    name = "dynamic_int8"
    block = 256
    draws = False

    def stored(self, shape: tuple[int, ...]) -> Quantized:
        """Returns uint8 codes, and a float32 scale for each block."""
        return quantized_types(shape, self.block, jnp.uint8)

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> Quantized:
        """Stores a page."""
        values = to_blocks(page, self.block)
        scales = block_absmax(values)
        scaled = _scaled(values, scales[:, None])
        codes = _nearest(scaled, bits(values), self.signed, self.rounds_to_zero)
        codes = codes.astype(jnp.uint8)
        return Quantized(from_blocks(codes, page.shape), scales)

    def decode(
        self, stored: Quantized, shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32."""
        numbers = lax.platform_dependent(
            to_blocks(stored.codes, self.block).astype(jnp.int32),
            tpu=functools.partial(number_by_lines, _formula(self.signed), self.signed),
            default=functools.partial(entry_of, dynamic_map(self.signed)),
        )
        return from_blocks(numbers * stored.scales[:, None], shape)


def _scaled(
    x: Float32[Array, "blocks block"], scale: Float32[Array, "blocks 1"]
) -> Float32[Array, "blocks block"]:
    """Returns `abs(x) * (1 / scale)` with bitsandbytes' roundings, at most 1."""
    # Backends may flush denormal numbers to zero. Denormal `x` are converted from their
    # bits, times 2^126; a denormal reciprocal (of 2^126 and above) is rounded here,
    # times 2^126 too. Zero times the infinite reciprocal of a zero or tiny scale is
    # NaN, as in bitsandbytes.
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
    """Returns `1 / x`, for 1 <= x < 4, rounded to a multiple of 2^-23."""
    # The quotient is already rounded. The exact remainder, which fits 32 bits, decides
    # ties.
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
    """Returns the code nearest to a value of this scaled magnitude and these bits."""
    rounds = signed or rounds_to_zero
    formula, negative = _formula(signed, rounds_up=not rounds), pattern < 0
    # Of two equally near numbers, the lower: below zero the larger magnitude. The
    # lowest bit of a key distinguishes a midpoint that is a float from one between two
    # floats.
    key = 2 * bits(scaled) + (negative.astype(jnp.int32) if signed else 0)
    # A TPU gathers entries sequentially. Elsewhere the lines' sixty operations take
    # three times as long to compile as the table (H200, jax 0.10.2).
    index = lax.platform_dependent(
        scaled,
        key,
        tpu=functools.partial(position_by_lines, formula),
        default=functools.partial(position_by_table, formula),
    )
    stays = key > np.int32(formula.edges[0]) if rounds else pattern > 0
    index = jnp.where(stays, jnp.maximum(index, formula.zero + 1), formula.zero)
    if signed:
        code = jnp.where(negative, jnp.maximum(127 - index, 0), 127 + index)
    else:
        code = jnp.where(negative, 0, index - 1)
    return jnp.where(jnp.isnan(scaled), 0, code)
