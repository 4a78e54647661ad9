"""Codecs by name, and where a new one begins.

What a codec must be, `paged_optax.codecs.codec.Codec` says. A new one is a file here
beside `dynamic_int8`, or a class in `floats`, and an entry in the table below. A user's
own needs no name: `paged(..., codec=...)` takes the object.
"""

from collections.abc import Callable

from paged_optax.codecs.codec import Codec
from paged_optax.codecs.dynamic_int4 import DynamicInt4
from paged_optax.codecs.dynamic_int8 import DynamicInt8
from paged_optax.codecs.floats import BFloat16Codec, Float8E4M3, Float32Codec

_BY_NAME: dict[str, Callable[[bool], Codec]] = {
    "float32": lambda signed: Float32Codec(),
    "bfloat16": lambda signed: BFloat16Codec(),
    "bfloat16_stochastic": lambda signed: BFloat16Codec(stochastic=True),
    **{codec.name: codec for codec in (DynamicInt8, DynamicInt4, Float8E4M3)},
}


def named(name: str, signed: bool) -> Codec:
    """Finds a codec by its name.

    Args:
      name: One of `"float32"`, `"bfloat16"`, `"bfloat16_stochastic"`,
        `"dynamic_int8"`, `"dynamic_int4"` and `"float8_e4m3"`.
      signed: Whether the moment has negative values. Where it has none, codecs that
        can use the sign's bit for a digit do.

    Returns:
      The codec.

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
