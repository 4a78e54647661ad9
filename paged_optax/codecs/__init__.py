"""Storage formats of moments.

`codec` has the protocol; `floats`, `dynamic_int8` and `dynamic_int4` implement it.
`map_formula` computes codes of the 8-bit map, by a table or by arithmetic for a TPU.
`packing` splits values into blocks and packs codes into words. `layout` arranges codes
and scales in memory, and `identity` names the codec in a state.
"""

from collections.abc import Callable

from paged_optax.codecs.codec import Codec as Codec
from paged_optax.codecs.codec import Noise as Noise
from paged_optax.codecs.codec import Quantized as Quantized
from paged_optax.codecs.codec import draw as draw
from paged_optax.codecs.dynamic_int4 import DynamicInt4 as DynamicInt4
from paged_optax.codecs.dynamic_int8 import DynamicInt8 as DynamicInt8
from paged_optax.codecs.floats import BFloat16Codec as BFloat16Codec
from paged_optax.codecs.floats import Float8E4M3 as Float8E4M3
from paged_optax.codecs.layout import Arranged as Arranged
from paged_optax.codecs.layout import arranged as arranged
from paged_optax.codecs.layout import axis_of_blocks as axis_of_blocks
from paged_optax.codecs.layout import get_codes as get_codes
from paged_optax.codecs.layout import unarranged as unarranged
from paged_optax.codecs.layout import values_per_entry as values_per_entry

_BY_NAME: dict[str, Callable[[bool], Codec | None]] = {
    "float32": lambda signed: None,
    "bfloat16": lambda signed: BFloat16Codec(),
    "bfloat16_stochastic": lambda signed: BFloat16Codec(stochastic=True),
    **{codec.name: codec for codec in (DynamicInt8, DynamicInt4, Float8E4M3)},
}


def named(name: str, signed: bool) -> Codec | None:
    """Returns the codec of a name; None for `"float32"`.

    Args:
      name: One of `"float32"`, `"bfloat16"`, `"bfloat16_stochastic"`, `"dynamic_int8"`,
        `"dynamic_int4"` and `"float8_e4m3"`.
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
