"""Shapes by what Hugging Face keeps beside a model's weights; these are not needed."""

import pathlib
import re

import jax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.planning.shapes.decoder import MOST_PARAMETERS, Decoder
from paged_optax.planning.shapes.untrusted import Fields

#: Decoders with gated feed-forward layers, and whether their embedding is the output's
#: matrix where `config.json` does not say: the defaults of transformers' classes.
_TIED = {
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": False,
    "gemma": True,
}

_DTYPES = ("float32", "bfloat16", "float16")


def config_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model that a `config.json` describes.

    Biases, and norms within heads, are left out: under a thousandth of the parameters.

    Args:
      path: The file.

    Returns:
      `ShapeDtypeStruct`s, the layers stacked under `"layers"`.

    Raises:
      ValueError: If it describes another kind of model, or a field is not usable.
    """
    fields = Fields.of_file(path)
    kind = fields.given.get("model_type")
    if not isinstance(kind, str) or kind not in _TIED:
        wanted = f"one of {', '.join(_TIED)}; other models: --module, or their weights"
        raise fields.wrong("model_type", kind, wanted)
    tied = fields.given.get("tie_word_embeddings", _TIED[kind])
    if not isinstance(tied, bool):
        raise fields.wrong("tie_word_embeddings", tied, "true or false")
    either = "dtype" if "dtype" in fields.given else "torch_dtype"
    dtype = fields.given.get(either) or "float32"
    if dtype not in _DTYPES:
        raise fields.wrong(either, dtype, f"one of {', '.join(_DTYPES)}")
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    each = fields.number("head_dim", max(1, hidden // heads))
    decoder = Decoder(
        hidden,
        heads * each,
        fields.number("num_key_value_heads", heads) * each,
        fields.number("intermediate_size"),
        fields.number("num_hidden_layers"),
        fields.number("vocab_size"),
        tied,
        str(dtype),
    )
    if decoder.size > MOST_PARAMETERS:
        raise ValueError(
            f"{str(path)!r} describes {decoder.size:.3g} parameters, more than any"
            " model has."
        )
    return decoder.shapes()


def index_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that an index names, which may not be there.

    Raises:
      ValueError: If the index names none, or one outside its folder.
    """
    fields = Fields.of_file(path)
    names = fields.mapping("weight_map", fields.given.get("weight_map")).values()
    for name in names:
        # No other folder's: the index is not to say what is read.
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)
        if not plain:
            raise fields.wrong("weight_map", name, "the name of a .safetensors file")
    if not names:
        raise fields.wrong("weight_map", {}, "a file for each tensor")
    return [path.with_name(str(name)) for name in dict.fromkeys(names)]


def index_shapes(path: pathlib.Path) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of the model of an index whose weights are not there, by `config.json`.

    Raises:
      ValueError: If there is no `config.json` beside it, or one of another size.
    """
    config = path.with_name("config.json")
    if not config.exists():
        raise ValueError(
            f"{str(path)!r} names tensors and no shapes: put config.json beside it, or"
            " the .safetensors files, of which the header is enough."
        )
    shapes = config_shapes(config)
    fields = Fields.of_file(path)
    metadata = fields.mapping("metadata", fields.given.get("metadata", {}))
    own = nbytes(shapes)
    size = metadata.get("total_size", own)
    if not isinstance(size, int | float) or not 0.99 * own < size < 1.01 * own:
        wanted = f"the {own} bytes of {str(config)!r}, within 1%"
        raise fields.wrong("metadata.total_size", size, wanted)
    return shapes
