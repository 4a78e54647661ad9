"""The name of a moment's codec in the structure of a state.

Codes of one codec are valid codes of another, and a restore casts to its target's
dtype. The field of the codes is therefore named after the codec, so that Orbax,
`flax.serialization`, and `update` after pickle compare names and refuse other codes.

The name is `codes_`, the codec's `name`, `_unsigned` for a map without negative
numbers, and the rows and columns of values in an entry if it has several: `_4x1` for
words of four rows, followed by `_less_2` if the last word lacks two rows. The codes'
shape and the name determine the moment's shape. `_in_2x1` follows if the shards' blocks
differ from the whole moment's.
"""

import collections
import copyreg
import functools
import math
import re
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from paged_optax.backend.types import Shape
from paged_optax.codecs.codec import Codec, Quantized
from paged_optax.codecs.layout import axis_of_blocks, get_codes, values_per_entry


def codes_field(codec: Codec, shape: Shape, divisions: tuple[int, ...] = ()) -> str:
    """Returns the name of the field of codes, of a moment or of a device's shard.

    `divisions` has the number of shards along each axis, and is empty for one.
    """
    inner = getattr(codec, "codec", codec)  # of an `Arranged`
    parts = ["codes", getattr(inner, "name", type(inner).__name__)]
    if not codec.signed:
        parts.append("unsigned")
    packed = values_per_entry(codec, shape)
    if any(n > 1 for n in packed):
        parts.append("x".join(map(str, ([1, *packed])[-2:])))
        entries = get_codes(codec.stored(shape)).shape
        less = [n * k - m for n, k, m in zip(entries, packed, shape, strict=True)]
        if any(less):
            parts += ["less", str(max(less))]
    divided = math.prod(divisions) > 1 and axis_of_blocks(codec) is None
    if divided and (math.prod(divisions[1:]) > 1 or math.prod(shape) % codec.block):
        parts += ["in", "x".join(map(str, divisions))]
    return "_".join(parts)


def of_one_part(field: str) -> str:
    """Returns the name of the field of one shard's codes."""
    return re.sub(r"_in_\d+(x\d+)*$", "", field)


def is_codes_field(name: str) -> bool:
    """Returns whether a field of this name has a moment's codes."""
    return name.startswith("codes_")


def quantized_as(field: str, codes: PyTree, scales: PyTree) -> Quantized:
    """Returns a moment with its codes in a field of this name."""
    return _class_of(field)(codes, scales)


class _Named(type):
    """The metaclass of containers named after a codec, which no module defines.

    Attributes:
      field: The name of the field of the codes.
    """

    field: str


# Pickled states name this function and module.
@functools.cache  # Structures are equal only if their classes are identical.
def _class_of(field: str) -> type[Quantized]:
    fields = collections.namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
        "Quantized", (field, "scales")
    )
    name = f"Quantized[{field.removeprefix('codes_')}]"
    return _Named(name, (fields, Quantized), {"__slots__": (), "field": field})


def _by_field(named: _Named) -> tuple[Callable[[str], type], tuple[str]]:
    return _class_of, (named.field,)


copyreg.pickle(_Named, _by_field)


def codec_fields(stored: PyTree) -> tuple[str, ...]:
    """Returns the names of a container's fields for a stored moment, none in a list."""
    fields = lambda x: x is not stored
    paths = [x for x, _ in jax.tree_util.tree_leaves_with_path(stored, is_leaf=fields)]
    keys = [getattr(x, "name", getattr(x, "key", None)) for path in paths for x in path]
    return tuple(filter(None, keys))
