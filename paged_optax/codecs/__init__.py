"""How moments are stored: codecs, and their names.

`codec` says what a codec is; `floats`, `dynamic_int8` and `dynamic_int4` are those
there are. `dynamic_map` has the numbers that codes stand for, as tables and as
arithmetic for a TPU. `packing` parts values into blocks and packs codes into words.
`layout` decides how codes and scales lie in memory, and `identity` tells in a state
which codec stored what.
"""

from collections.abc import Callable

from paged_optax.codecs.codec import Codec, Noise, Quantized, draw
from paged_optax.codecs.dynamic_int4 import DynamicInt4
from paged_optax.codecs.dynamic_int8 import DynamicInt8
from paged_optax.codecs.floats import BFloat16Codec, Float8E4M3, Float32Codec
from paged_optax.codecs.identity import (
    codes_field,
    fields_of,
    is_codes_field,
    of_one_part,
    quantized_as,
)
from paged_optax.codecs.layout import (
    Arranged,
    arranged,
    axis_of_blocks,
    codes_of,
    codes_per_word,
    unarranged,
    values_per_entry,
)

__all__ = [
    "Arranged",
    "BFloat16Codec",
    "Codec",
    "DynamicInt4",
    "DynamicInt8",
    "Float32Codec",
    "Float8E4M3",
    "Noise",
    "Quantized",
    "axis_of_blocks",
    "arranged",
    "codes_field",
    "codes_of",
    "draw",
    "fields_of",
    "is_codes_field",
    "named",
    "of_one_part",
    "codes_per_word",
    "quantized_as",
    "unarranged",
    "values_per_entry",
]

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
