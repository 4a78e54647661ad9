"""Shapes of Hugging Face models from their JSON files, without the weights.

The files are untrusted: they are read within bounds and checked field by field.
"""

import json
import pathlib
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.models import MOST_PARAMETERS, Decoder

#: Largest JSON text in bytes; the index of 100,000 tensors has two thirds of it.
MOST_BYTES = 16 << 20
# Python allocates up to 72 bytes for each entry, list and object.
_MOST_ITEMS = 1 << 19


class Fields:
    """A JSON object in a file. Errors name the file and the field.

    Args:
      path: The file, for messages.
      text: The JSON text.
    """

    def __init__(self, path: pathlib.Path, text: bytes) -> None:
        self.path = path
        items = sum(map(text.count, (b",", b"[", b"{")))
        # Python stores four bytes a character if one is not ASCII.
        wide = 1 if text.isascii() and b"\\u" not in text else 4
        if wide * len(text) > MOST_BYTES or items > _MOST_ITEMS:
            raise ValueError(
                f"{str(path)!r} holds JSON of more than {MOST_BYTES // wide} bytes or"
                f" {_MOST_ITEMS} items, which no model has."
            )
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no JSON: {error}.") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{str(path)!r} holds JSON that is no object with fields.")
        self.entries: dict[str, object] = entries

    @classmethod
    def of_file(cls, path: pathlib.Path) -> "Fields":
        """Reads a regular file; a pipe or a device may never end."""
        if not path.is_file():
            raise ValueError(f"{str(path)!r} cannot be read: it is no file.")
        with path.open("rb") as file:
            return cls(path, file.read(MOST_BYTES + 1))

    def shown(self, field: str, value: object) -> str:
        """A field and its value, for messages."""
        return f"{str(self.path)!r}: field {field!r:.200} is {value!r:.60}"

    def wrong(self, field: str, value: object, wanted: str) -> ValueError:
        """Error for a field with an unusable value."""
        return ValueError(f"{self.shown(field, value)}, not {wanted}.")

    def mapping(self, field: str, value: object) -> dict[str, object]:
        """Checks that a field is an object."""
        if not isinstance(value, dict):
            raise self.wrong(field, value, "an object")
        return value

    def number(self, field: str, default: int | None = None) -> int:
        """Reads a size from 1 to 2^31."""
        value = self.entries.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= 1 << 31:
            raise self.wrong(field, value, "a whole number from 1 to 2147483648")
        return value


class _Defaults(NamedTuple):
    """Defaults of transformers' class for a `model_type`; None: as many as heads."""

    tied: bool = False
    key_heads: int | None = None
    head: int | None = None
    norms: int = 2
    null_key_heads: bool = True  # null is accepted, and stands for as many as heads


#: Decoders with gated feed-forward layers, as in transformers 5.24.
_DEFAULTS = {
    "llama": _Defaults(),
    "mistral": _Defaults(key_heads=8),
    "qwen2": _Defaults(key_heads=32),
    "qwen3": _Defaults(key_heads=32, head=128),
    "gemma": _Defaults(True, 16, 256, null_key_heads=False),
    "gemma2": _Defaults(True, 4, 256, 4, null_key_heads=False),
    "gemma3_text": _Defaults(True, 4, 256, 4, null_key_heads=False),
}
_DTYPES = ("float32", "bfloat16", "float16")
_PARTS = ("text_config", "vision_config", "audio_config")


def decoder_fields(path: pathlib.Path) -> Fields | None:
    """The decoder's fields in the `config.json` of a checkpoint; None without one.

    The path is the file, another file of its folder, or the folder. A model of several
    parts has the decoder's fields in `text_config`.
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
    """Attention heads in the `config.json` of a checkpoint; None without either."""
    fields = decoder_fields(path)
    if fields is None or fields.entries.get("num_attention_heads") is None:
        return None
    return fields.number("num_attention_heads")


def config_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model that a `config.json` describes.

    Layers are stacked under `"layers"`. Biases and the norms within heads, under a
    thousandth of the parameters, are left out. Warns of quantized weights and of
    experts, which are left out too.
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
    decoder = Decoder(
        fields.number("hidden_size"),
        *_projections(fields, default),
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
    for name, value in fields.entries.items():
        if value and name == "quantization_config":
            left_out = "weights are counted as they are before they are quantized"
        elif value and "expert" in name:
            left_out = f"a {kind} has no experts, none is counted"
        else:
            continue
        warn_user(f"{fields.shown(name, value)}; {left_out}.")
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


def _projections(fields: Fields, default: _Defaults) -> tuple[int, int]:
    """Values of a token's queries, and of its keys."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    key_heads, head, entries = default.key_heads or heads, default.head, fields.entries
    # transformers distinguishes an absent field from null.
    if "num_key_value_heads" in entries:
        null = heads if default.null_key_heads else None
        key_heads = fields.number("num_key_value_heads", null)
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
