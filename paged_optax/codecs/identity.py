"""What tells in a state how its moments are stored.

The codes of one codec are numbers of another one too, only other numbers. Their dtype
does not tell them apart: a restore casts to the dtype of its target. So a state names
its codec in its structure, by the name of the codes' field. Then all that compares
structures refuses to read them otherwise: Orbax, `flax.serialization`, and `update`
after pickle.

The name is `codes_`, the codec's `name`, `_unsigned` of a map without negative numbers,
and how many rows and columns of values one entry holds if it holds several: `_4x1` are
words of four rows. `_less_2` follows if the last of them lacks two rows. So the shape
of the codes and the name give the moment's shape. `_in_2x1` follows if blocks end where
the parts of two devices meet, and would not otherwise.
"""

import collections
import copyreg
import functools
import math
import re
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from paged_optax.backend.types import KeyPath
from paged_optax.codecs.codec import Codec, Leaf, Quantized
from paged_optax.codecs.layout import axis_of_blocks, codes_of, values_per_entry


def codes_field(
    codec: Codec, shape: tuple[int, ...], divisions: tuple[int, ...] = ()
) -> str:
    """The name of the field in which a state has the codes of a moment.

    Args:
      codec: The codec, as it is arranged for the moment.
      shape: The moment's shape, or that of one device's part of it.
      divisions: Into how many parts each axis of the moment is cut; empty: into one.
    """
    parts = ["codes", _name_of(codec)]
    if not codec.signed:
        parts.append("unsigned")
    packed = values_per_entry(codec, shape)
    if any(n > 1 for n in packed):
        parts.append("x".join(map(str, ([1, *packed])[-2:])))
        entries = codes_of(codec.stored(shape)).shape
        # The last word along an axis may lack some rows or columns.
        less = [n * k - m for n, k, m in zip(entries, packed, shape, strict=True)]
        if any(less):
            parts += ["less", str(max(less))]
    # Whether blocks end where the parts of two devices meet, and would not otherwise.
    divided = math.prod(divisions) > 1 and axis_of_blocks(codec) is None
    if divided and (math.prod(divisions[1:]) > 1 or math.prod(shape) % codec.block):
        parts += ["in", "x".join(map(str, divisions))]
    return "_".join(parts)


def of_one_part(field: str) -> str:
    """The name that the codes of one device's part have by themselves."""
    return re.sub(r"_in_\d+(x\d+)*$", "", field)


def is_codes_field(name: str) -> bool:
    """Whether a field of this name has a moment's codes, and says of which codec."""
    return name.startswith("codes_")


def _name_of(codec: Codec) -> str:
    inside = getattr(codec, "codec", codec)  # of an `Arranged`
    name = getattr(inside, "name", type(inside).__name__)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"codec {codec!r} has name={name!r}, which becomes a part of a field's"
            " name: use letters, digits and '_', as in 'fixed8'."
        )
    return name


def quantized_as(field: str, codes: Leaf, scales: Leaf) -> Quantized[Leaf]:
    """A moment whose codes are in a field of this name."""
    return _class_of(field)(codes, scales)


class _Named(type):
    """The class of the classes that name a codec. No module has these by their names.

    Attributes:
      field: The name of the field of the codes.
    """

    field: str


# Saved states name this function and this module: pickle finds classes through it.
@functools.cache  # Structures are equal if their classes are the same.
def _class_of(field: str) -> type[Quantized[PyTree]]:
    fields = collections.namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
        "Quantized", (field, "scales")
    )
    name = f"Quantized[{field.removeprefix('codes_')}]"
    return _Named(name, (fields, Quantized), {"__slots__": (), "field": field})


def _by_field(named: _Named) -> tuple[Callable[[str], type], tuple[str]]:
    return _class_of, (named.field,)


copyreg.pickle(_Named, _by_field)


def fields_of(stored: PyTree) -> tuple[str, ...]:
    """The names that a container has for what a codec stored; none in a list."""
    flat = jax.tree_util.tree_flatten_with_path(
        stored, is_leaf=lambda x: x is not stored
    )[0]
    return tuple(name for path, _ in flat if (name := _text(path)) is not None)


def _text(path: KeyPath) -> str | None:
    key = path[-1] if path else None
    return getattr(key, "name", None) or getattr(key, "key", None)
