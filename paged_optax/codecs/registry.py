"""Codecs by name."""

from collections.abc import Callable

from paged_optax.codecs.codec import Codec
from paged_optax.codecs.dynamic_int4 import DynamicInt4
from paged_optax.codecs.dynamic_int8 import DynamicInt8
from paged_optax.codecs.floats import BFloat16Codec, Float8E4M3

_BY_NAME: dict[str, Callable[[bool], Codec | None]] = {
    "float32": lambda signed: None,
    "bfloat16": lambda signed: BFloat16Codec(),
    "bfloat16_stochastic": lambda signed: BFloat16Codec(stochastic=True),
    **{codec.name: codec for codec in (DynamicInt8, DynamicInt4, Float8E4M3)},
}


def named(name: str, signed: bool) -> Codec | None:
    """Returns the codec of a name; None for `"float32"`.

    Args:
      name: One of `"float32"`, `"bfloat16"`, `"bfloat16_stochastic"`,
        `"dynamic_int8"`, `"dynamic_int4"` and `"float8_e4m3"`.
      signed: If False, the moment has no negative values, and codecs may use the bit of
        the sign.

    Raises:
      ValueError: If no codec has this name.

    Example:
      >>> named("dynamic_int8", signed=False)
      DynamicInt8(signed=False, rounds_to_zero=False)
    """
    if name not in _BY_NAME:
        raise ValueError(
            f"codec {name!r} is unknown: use one of {', '.join(map(repr, _BY_NAME))},"
            " or an object with the methods of paged_optax.codecs.Codec."
        )
    return _BY_NAME[name](signed)
