"""Shapes of Hugging Face models from their `config.json`, without the weights.

The files are untrusted: they are read within bounds and checked field by field.
"""

import json
import pathlib

import jax
from jaxtyping import PyTree

from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.models import TEXT_ONLY, Decoder

# Largest JSON text: the metadata of 10,000 arrays has about as much. Python allocates
# up to 72 bytes for each entry, list and object.
_MOST_BYTES, _MOST_ITEMS = 4 << 20, 1 << 19


class Fields:
    """A JSON object in a file. Errors name the file and the field.

    With `header` it is a safetensors file, which begins with the length of the text.
    """

    def __init__(self, path: pathlib.Path, header: bool = False) -> None:
        self.path = path
        if not path.is_file():  # a pipe or a device may never end
            raise ValueError(f"{str(path)!r} cannot be read: it is no file.")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little") if header else 1 << 64
            text = file.read(min(length, _MOST_BYTES + 1))
        items = sum(map(text.count, (b",", b"[", b"{")))
        if len(text) > _MOST_BYTES or items > _MOST_ITEMS:
            raise ValueError(
                f"{str(path)!r} holds JSON of more than {_MOST_BYTES} bytes or"
                f" {_MOST_ITEMS} items, which no model has."
            )
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no JSON: {error}.") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{str(path)!r} holds JSON that is no object with fields.")
        self.entries: dict[str, object] = entries

    def shown(self, field: str) -> str:
        """A field and its value, for messages."""
        value = f"{self.entries.get(field)!r:.60}"
        return f"{str(self.path)!r}: field {field!r:.200} is {value}"

    def wrong(self, field: str, wanted: str) -> ValueError:
        """Error for a field with an unusable value."""
        return ValueError(f"{self.shown(field)}, not {wanted}.")

    def number(self, field: str, default: int | None = None) -> int:
        """Reads a size from 1 to 2^31."""
        value = self.entries.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= 1 << 31:
            raise self.wrong(field, "a whole number from 1 to 2147483648")
        return value


_GEMMA: dict[str, object] = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 16,
    "head_dim": 256,
}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4}
#: Decoders with gated feed-forward layers: the fields' defaults, as in transformers
#: 5.24. Absent ones follow from the number of heads.
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    # `gemma-3-4b-it` states two of these.
    "gemma3_text": {
        **_GEMMA2,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "vocab_size": 262_208,
    },
}
_DTYPES = ("float32", "bfloat16", "float16")


def config_heads(path: pathlib.Path) -> int | None:
    """Attention heads in the `config.json` of a checkpoint; None without either."""
    if path.suffix != ".json":
        path = (path if path.is_dir() else path.parent) / "config.json"
    if not path.is_file():
        return None
    fields, name = _decoder_fields(path), "num_attention_heads"
    return fields.number(name) if name in fields.entries else None


def _decoder_fields(path: pathlib.Path) -> Fields:
    """Fields of a decoder, of which a model of several parts has a `text_config`."""
    fields = Fields(path)
    part, kind = fields.entries.get("text_config"), fields.entries.get("model_type")
    if isinstance(part, dict) and part.get("model_type") == f"{kind}_text":
        fields.entries |= part
    # transformers distinguishes an absent field from null for the heads of keys alone.
    heads = "num_key_value_heads"
    stated = {n: x for n, x in fields.entries.items() if x is not None or n == heads}
    defaults = _DEFAULTS.get(str(fields.entries.get("model_type")), {})
    fields.entries = defaults | stated
    return fields


def config_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model that a `config.json` describes.

    Layers are stacked under `"layers"`. Biases and the norms within heads, under a
    thousandth of the parameters, are left out. Warns of quantized weights.
    """
    fields = _decoder_fields(path)
    entries, kind = fields.entries, fields.entries.get("model_type")
    if "vision_config" in entries:
        warn_user(f"{str(path)!r}: {TEXT_ONLY}")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        hint = "other models: --module, or their weights"
        raise fields.wrong("model_type", f"one of {', '.join(_DEFAULTS)}; {hint}")
    hidden, heads = map(fields.number, ("hidden_size", "num_attention_heads"))
    head = fields.number("head_dim", hidden // heads)
    tied = entries.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise fields.wrong("tie_word_embeddings", "true or false")
    name = "dtype" if "dtype" in entries else "torch_dtype"
    dtype = entries.get(name, "float32")
    if dtype not in _DTYPES:
        raise fields.wrong(name, f"one of {', '.join(_DTYPES)}")
    if entries.get("quantization_config"):
        warn_user(
            f"{fields.shown('quantization_config')}; weights are counted as they are"
            " before they are quantized."
        )
    return Decoder(
        hidden,
        heads * head,
        fields.number("num_key_value_heads", heads) * head,
        fields.number("intermediate_size"),
        fields.number("num_hidden_layers"),
        fields.number("vocab_size"),
        tied,
        str(dtype),
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
    ).shapes()
