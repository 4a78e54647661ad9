"""Storage formats of moments.

`codec` has the protocol; `floats`, `dynamic_int8` and `dynamic_int4` implement it, and
`registry` names them. `map_formula` computes codes of the 8-bit map, by a table or by
arithmetic for a TPU. `packing` splits values into blocks and packs codes into words.
`layout` arranges codes and scales in memory, and `identity` names the codec in a state.
"""

from paged_optax.codecs.codec import Codec, Noise, Quantized, draw
from paged_optax.codecs.dynamic_int4 import DynamicInt4
from paged_optax.codecs.dynamic_int8 import DynamicInt8
from paged_optax.codecs.floats import BFloat16Codec, Float8E4M3
from paged_optax.codecs.identity import (
    codec_fields,
    codes_field,
    is_codes_field,
    of_one_part,
    quantized_as,
)
from paged_optax.codecs.layout import (
    Arranged,
    arranged,
    axis_of_blocks,
    codes_per_word,
    get_codes,
    unarranged,
    values_per_entry,
)
from paged_optax.codecs.registry import named

__all__ = [
    "Arranged",
    "BFloat16Codec",
    "Codec",
    "DynamicInt4",
    "DynamicInt8",
    "Float8E4M3",
    "Noise",
    "Quantized",
    "axis_of_blocks",
    "arranged",
    "codes_field",
    "get_codes",
    "draw",
    "codec_fields",
    "is_codes_field",
    "named",
    "of_one_part",
    "codes_per_word",
    "quantized_as",
    "unarranged",
    "values_per_entry",
]
