"""Shapes by Hugging Face's files of a model, without its weights.

Their JSON is written by strangers: it is bounded, checked field by field, never run.
"""

import collections
import dataclasses
import json
import math
import pathlib
import re
from typing import BinaryIO

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.models import MOST_PARAMETERS, Decoder

#: Bytes of one JSON text. The index of 100,000 tensors has two thirds of it. A text of
#: other letters than ASCII may have a quarter: Python keeps four bytes of each.
MOST_BYTES = 16 << 20
#: Tensors of one model.
MOST_TENSORS = 100_000
#: Values of one tensor: no machine holds as many.
_MOST_VALUES = 1 << 50
# Python takes up to 72 bytes for what each of these signs begins: 40 MB in all.
_BEGINNINGS = b",", b"[", b"{"
_MOST_ITEMS = 1 << 19


def opened(path: pathlib.Path) -> BinaryIO:
    """Opens a file to read; a device or a pipe might have no end."""
    try:
        if path.is_file():
            return path.open("rb")
        why = "it is no file"
    except OSError as error:
        why = error.strerror
    raise ValueError(f"{str(path)!r} cannot be read: {why}.")


class Fields:
    """The fields of a JSON object in a file.

    Every error names the file and the field.

    Args:
      path: The file.
      text: Its JSON, or the part of it that is JSON.

    Raises:
      ValueError: If it is no JSON object.
    """

    def __init__(self, path: pathlib.Path, text: bytes) -> None:
        self.path = path
        wide = not text.isascii() or b"\\u" in text
        if len(text) * (4 if wide else 1) > MOST_BYTES:
            raise self._too_large(f"{MOST_BYTES // (4 if wide else 1)} bytes")
        if sum(map(text.count, _BEGINNINGS)) > _MOST_ITEMS:
            raise self._too_large(f"{_MOST_ITEMS} items")
        try:
            entries = json.loads(text, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no JSON: {error}.") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{str(path)!r} holds JSON that is no object with fields.")
        self.entries: dict[str, object] = entries

    @classmethod
    def of_file(cls, path: pathlib.Path) -> "Fields":
        """Reads a whole file, if it is not too large."""
        with opened(path) as file:
            return cls(path, file.read(MOST_BYTES + 1))

    def _too_large(self, bound: str) -> ValueError:
        return ValueError(
            f"{str(self.path)!r} holds JSON of more than {bound}, which no model has."
        )

    def wrong(self, field: str, value: object, wanted: str) -> ValueError:
        """The error of a field that is not as it must be."""
        return ValueError(f"{self.shown(field, value)}, not {wanted}.")

    def shown(self, field: str, value: object) -> str:
        """A field and its value as a message names them."""
        name, value = _short(field, 200), _short(value, 60)
        return f"{str(self.path)!r}: field {name} is {value}"

    def mapping(self, field: str, value: object) -> dict[str, object]:
        """A field that is an object itself."""
        if not isinstance(value, dict):
            raise self.wrong(field, value, "an object")
        return value

    def number(self, field: str, otherwise: int | None = None) -> int:
        """A field that is a size: from 1 to 2^31."""
        value = self.entries.get(field)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or not 0 < value <= 1 << 31:
            raise self.wrong(field, value, "a whole number from 1 to 2147483648")
        return value

    def shape(self, field: str, value: object) -> tuple[int, ...]:
        """A field that is the shape of a tensor."""
        sizes = value if isinstance(value, list) and len(value) <= 32 else [-1]
        valid = all(type(size) is int and size >= 0 for size in sizes)
        if not valid or math.prod(sizes) > _MOST_VALUES:
            raise self.wrong(field, value, "the shape of a tensor")
        return tuple(sizes)

    def ends(self, field: str, value: object) -> tuple[int, int]:
        """A field that is where something begins in a file, and where it ends."""
        ends = value if isinstance(value, list) and len(value) == 2 else [0, -1]
        first, last = (x if type(x) is int else -1 for x in ends)
        if not 0 <= first <= last:
            raise self.wrong(field, value, "where it begins and where it ends")
        return first, last


def _short(value: object, most: int) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        ((twice, _),) = counts.most_common(1)
        raise ValueError(f"field {twice!r} is there twice")
    return fields


_PARTS = ("text_config", "vision_config", "audio_config")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """What transformers' class of a `model_type` takes where `config.json` is silent.

    Attributes:
      tied: Whether the embedding is the output's matrix.
      key_heads: Heads of keys and values; None: as many as of queries.
      head: Values of a head; None: the width by the heads.
      norms: Norms of a layer.
      null_key_heads: Whether null is taken, for as many as of queries.
    """

    tied: bool = False
    key_heads: int | None = None
    head: int | None = None
    norms: int = 2
    null_key_heads: bool = True


#: Decoders with gated feed-forward layers, as in transformers 5.24.
_DEFAULTS = {
    "llama": _Defaults(),
    "mistral": _Defaults(key_heads=8),
    "qwen2": _Defaults(key_heads=32),
    "qwen3": _Defaults(key_heads=32, head=128),
    "gemma": _Defaults(True, 16, 256, null_key_heads=False),
    "gemma2": _Defaults(True, 4, 256, norms=4, null_key_heads=False),
    "gemma3_text": _Defaults(True, 4, 256, norms=4, null_key_heads=False),
}


def decoder_fields(path: pathlib.Path) -> Fields | None:
    """The decoder's fields by the `config.json` of a checkpoint; None if none is there.

    The path is the file, another one beside it, or the folder of both. A model of
    several parts has its decoder's fields in `text_config`.
    """
    config = path
    if path.is_dir() or not path.name.endswith("config.json"):
        config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.is_file():
        return None
    fields = Fields.of_file(config)
    if part := fields.entries.get("text_config"):
        fields.entries = fields.mapping("text_config", part)
    return fields


def config_heads(path: pathlib.Path) -> int | None:
    """Heads of queries by the `config.json` of a checkpoint; None if none says."""
    fields = decoder_fields(path)
    if fields is None or fields.entries.get("num_attention_heads") is None:
        return None
    return fields.number("num_attention_heads")


def config_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model that a `config.json` describes.

    Layers are stacked under `"layers"`. Biases, and norms within heads, are left out:
    under a thousandth of the parameters. What is said of quantized weights, or of
    experts, which these models do not have, is left out too, with a warning.
    """
    fields = Fields.of_file(path)
    kind = fields.entries.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        others = "other models: --module, or their weights"
        wanted = f"one of {', '.join(_DEFAULTS)}; {others}"
        raise fields.wrong("model_type", kind, wanted)
    default = _DEFAULTS[kind]
    _check_whole(fields)
    tied = fields.entries.get("tie_word_embeddings", default.tied)
    if not isinstance(tied, bool):
        raise fields.wrong("tie_word_embeddings", tied, "true or false")
    query, key = _heads(fields, default)
    decoder = Decoder(
        fields.number("hidden_size"),
        query,
        key,
        fields.number("intermediate_size"),
        fields.number("num_hidden_layers"),
        fields.number("vocab_size"),
        tied,
        _dtype(fields),
        default.norms,
    )
    if decoder.size > MOST_PARAMETERS:
        raise ValueError(
            f"{str(path)!r} describes {decoder.size:.3g} parameters, more than any"
            " model has."
        )
    _warn_of_what_is_left_out(fields)
    return decoder.shapes()


def _check_whole(fields: Fields) -> None:
    for name, value in fields.entries.items():
        if not isinstance(value, dict) or name == "quantization_config":
            continue
        if name in _PARTS or {"hidden_size", "model_type"} & {*value}:
            wanted = "absent; a model of several parts: --module, or its weights"
            raise fields.wrong(name, value, wanted)
    classes = fields.entries.get("architectures") or []
    for name in classes if isinstance(classes, list) else [classes]:
        if not isinstance(name, str) or not name.endswith("ForCausalLM"):
            wanted = "the class of a whole decoder, ...ForCausalLM"
            raise fields.wrong("architectures", classes, wanted)


def _dtype(fields: Fields) -> str:
    for name in ("dtype", "torch_dtype"):
        dtype = fields.entries.get(name)
        if isinstance(dtype, str) and dtype in _DTYPES:
            return dtype
        if dtype is not None:
            raise fields.wrong(name, dtype, f"one of {', '.join(_DTYPES)}")
    return "float32"


def _heads(fields: Fields, default: _Defaults) -> tuple[int, int]:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    key_heads, head = default.key_heads or heads, default.head
    # To transformers, absent is not null.
    if "num_key_value_heads" in fields.entries:
        null = heads if default.null_key_heads else None
        key_heads = fields.number("num_key_value_heads", null)
    entries = fields.entries
    if "head_dim" in entries and (head or entries["head_dim"] is not None):
        head = fields.number("head_dim")
    elif head is None:
        head = hidden // heads
        if hidden % heads:
            wanted = f"a divisor of hidden_size, {hidden}, where there is no head_dim"
            raise fields.wrong("num_attention_heads", heads, wanted)
    if heads % key_heads:
        wanted = f"a divisor of num_attention_heads, {heads}"
        raise fields.wrong("num_key_value_heads", key_heads, wanted)
    return heads * head, key_heads * head


def _warn_of_what_is_left_out(fields: Fields) -> None:
    for name, value in fields.entries.items():
        if not value:
            continue
        if name == "quantization_config":
            left_out = "weights are counted as they are before they are quantized"
        elif "expert" in name:
            left_out = (
                f"a {fields.entries['model_type']} has no experts, none is counted"
            )
        else:
            continue
        warn_user(f"{fields.shown(name, value)}; {left_out}.")


def index_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that an index names, which may not be there."""
    fields = Fields.of_file(path)
    names = fields.mapping("weight_map", fields.entries.get("weight_map")).values()
    for name in names:
        # No other folder's: the index is not to say what is read.
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)
        if not plain:
            raise fields.wrong("weight_map", name, "the name of a .safetensors file")
    if not names:
        raise fields.wrong("weight_map", {}, "a file for each tensor")
    return [path.with_name(str(name)) for name in dict.fromkeys(names)]


def index_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model of an index whose weights are not there, by `config.json`."""
    config = path.with_name("config.json")
    if not config.exists():
        raise ValueError(
            f"{str(path)!r} names tensors and no shapes: put config.json beside it, or"
            " the .safetensors files, of which the header is enough."
        )
    shapes = config_shapes(config)
    fields = Fields.of_file(path)
    metadata = fields.mapping("metadata", fields.entries.get("metadata", {}))
    counted = nbytes(shapes)
    size = metadata.get("total_size", counted)
    if not isinstance(size, int | float) or not 0.99 * counted < size < 1.01 * counted:
        wanted = f"the {counted} bytes of {str(config)!r}, within 1%"
        raise fields.wrong("metadata.total_size", size, wanted)
    return shapes
