"""The quantisation maps: which number a code stands for."""

import functools

import numpy as np


def _spaced(count: int) -> np.ndarray:
    """`torch.linspace(0.1, 1, count + 1)` in float32, as its vectorised CPU loop does.

    It steps from whichever end is nearer, multiplying and adding with one rounding;
    float64 holds the product exactly. Other formulas miss a few entries by one ulp.
    """
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

    Example:
      >>> dynamic_map(signed=True).shape, dynamic_map(signed=True)[127:130].tolist()
      ((256,), [0.0, 5.500000384017767e-07, 3.250000190746505e-06])

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022; Dettmers, `8-Bit Approximations for
      Parallelism in Deep Learning <https://arxiv.org/abs/1511.04561>`_, 2016.
    """
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
