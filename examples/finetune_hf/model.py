"""Decoders of `eqx-zoo`, for what a folder's `config.json` says.

Their parameters have the tensors' own names and shapes. What they do not compute as the
configuration says is refused by field and value.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from attention import attention
from jax.typing import DTypeLike

import paged_optax as po

from .folder import Folder, FolderError, Tensors

try:
    from eqx_zoo import CausalLM
    from eqx_zoo.models.causal_lm.config import Config

    from .gemma import DEFAULTS, Gemma
except ModuleNotFoundError as error:
    why = f'{error}: pip install ".[hf]" with Python 3.12 or newer'
    raise ModuleNotFoundError(why, name=error.name) from None

PyTree = Any

#: What transformers would compute otherwise, unless the field is one of these.
PLAIN = {
    "attention_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "quantization_config": (),
}
SILU = {"hidden_act": ("silu",), "use_sliding_window": (False,)}
NO_BIAS = {"attention_bias": (False,)}
GEMMA = NO_BIAS | {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False,),
}
#: The families, and which of their fields have but one value here.
FAMILIES = {
    "LlamaForCausalLM": SILU | NO_BIAS,
    "MistralForCausalLM": SILU | NO_BIAS,
    "Qwen2ForCausalLM": SILU,
    "Qwen3ForCausalLM": SILU | NO_BIAS,
    "Qwen3MoeForCausalLM": SILU | NO_BIAS,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": GEMMA,
}
#: What transformers takes if a configuration does not say.
UNSAID = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Qwen3MoeForCausalLM": {"head_dim": 128},
}
#: Fields whose meaning is theirs, under the name that eqx-zoo knows.
SAME = {"MistralForCausalLM": "LlamaForCausalLM"}
#: What the decoder's names begin with where a model sees pictures too: in files of the
#: hub, and in transformers.
PREFIXES = ("language_model.model.", "model.language_model.")
PICTURES = tuple(
    f"{start}{part}."
    for start in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of a family, which is its class in transformers."""

    family: str
    config: Mapping[str, Any]  # what `config.json` says of it
    dtype: np.dtype  # of its parameters
    static: PyTree  # what of it is no parameter
    shapes: PyTree  # of its parameters
    experts: int  # of a layer
    prefix: str  # that its tensors' names begin with
    module: str  # the same in transformers

    @classmethod
    def of(cls, folder: Folder, dtype: DTypeLike) -> "Decoder":
        """The decoder that a folder has."""
        (family, *_) = folder.config.get("architectures") or [None]
        config = folder.config.get("text_config") or folder.config
        for part in (folder.config, config):
            refuse(family, part)
        config = UNSAID.get(family, {}) | dict(config)
        config = {name: x for name, x in config.items() if x is not None}
        config = DEFAULTS | config if FAMILIES[family] is GEMMA else config
        try:
            decoder, experts = _shapes(family, config, dtype)
        except KeyError as error:
            raise FolderError(f"config.json has no {error.args[0]}.") from None
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise FolderError(f"config.json cannot be used: {error}.") from None
        is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        shapes, static = eqx.partition(decoder, is_shape)
        prefixes = (x for x in PREFIXES if any(n.startswith(x) for n in folder.tensors))
        prefix = next(prefixes, "model.")
        module = "model." if prefix == "model." else PREFIXES[1]
        read = np.dtype(dtype), static, shapes, experts, prefix, module
        return cls(family, config, *read)

    def __call__(self, params: PyTree, row: Mapping[str, jax.Array]) -> po.WeightedLoss:
        """The loss of a row; see `loss_of`."""
        return loss_of(eqx.combine(params, self.static), row)

    def read(self, folder: Folder) -> PyTree:
        """A folder's weights, as the parameters are named; they are read when used."""
        used: set[str] = set()

        def value(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Tensors:
            names = self.names(path)
            used.update(names)
            for name in names:
                refuse_shape(folder, name, shape.shape[len(names) > 1 :])
            return Tensors(folder, names, shape.shape, shape.dtype)

        params = jax.tree_util.tree_map_with_path(value, self.shapes)
        if HEAD in folder.tensors and self.static.lm_head is None:
            (embedding,) = (x for x in used if x.endswith("embed_tokens.weight"))
            if not np.array_equal(folder[HEAD], folder[embedding]):
                raise FolderError(
                    f"config.json says tie_word_embeddings, and {HEAD} in {folder.path}"
                    " is not the embedding: say false there, or remove the tensor."
                )
            used.add(HEAD)
        if left := {*self.own(folder)} - used:
            raise FolderError(
                f"{min(left)} in {folder.path} is no parameter of this model."
            )
        return params

    def length(self, asked: int | None, usual: int) -> int:
        """Tokens of a row: as asked, or as usual if the model has so many positions."""
        fields = ["max_position_embeddings"]
        if "sliding_window" in UNSAID.get(self.family, {}):
            fields.append("sliding_window")
        most = {x: self.config[x] for x in fields if x in self.config}
        length = asked or min([usual, *most.values()])
        for field, x in most.items():
            if length > x:
                raise FolderError(
                    f"--length {length} is more than the model's {field}={x}."
                )
        return length

    def refuse_tokens(self, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Refuses tokens that have no embedding."""
        names = "tokens", "labels"
        most = max((int(row[name].max()) for row in rows for name in names), default=0)
        if most >= (entries := self.config["vocab_size"]):
            raise FolderError(
                f"the tokenizer makes token {most}, and config.json says"
                f" vocab_size={entries}: resize the embedding first."
            )

    def own(self, folder: Folder) -> list[str]:
        """The tensors that are the decoder's; others see pictures, or are constants."""
        names = (x for x in folder.tensors if not x.endswith("rotary_emb.inv_freq"))
        others = () if self.prefix == "model." else PICTURES
        return [name for name in names if not name.startswith(others)]

    def untrained(self, folder: Folder) -> list[str]:
        """The parts of a model that are left as they are, such as a vision tower."""
        parts = {x for x in PICTURES for name in folder.tensors if name.startswith(x)}
        return sorted(x.removeprefix("model.").removesuffix(".") for x in parts)

    def names(self, path: tuple[Any, ...]) -> list[str]:
        """The tensors that a parameter is made of: one, or one of each expert."""
        name = self.prefix + dotted(path).removeprefix("model.")
        name = name if path[0].name == "model" else dotted(path)
        if "experts" not in name:
            return [name]
        before, _, after = name.partition("experts.")
        return [f"{before}experts.{n}.{after}" for n in range(self.experts)]

    def tensors(
        self, folder: Folder, split: po.SplitModel, params: PyTree
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The stacked parameters as the folder's tensors, a stack at a time."""
        leaves, structure = jax.tree.flatten(params)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        for n, leaf in enumerate(leaves):
            one = [*shapes[:n], np.asarray(leaf), *shapes[n + 1 :]]
            tree = split.unstack(jax.tree.unflatten(structure, one))
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                if not isinstance(x, np.ndarray):
                    continue
                names = self.names(path)
                yield from zip(names, x if len(names) > 1 else [x], strict=True)
                is_head = dotted(path) == "model.embed_tokens.weight"
                if is_head and self.static.lm_head is None and HEAD in folder.tensors:
                    yield HEAD, x
        for name in {*folder.tensors} - {*self.own(folder)}:
            yield name, folder[name]


def loss_of(decoder: PyTree, row: Mapping[str, jax.Array]) -> po.WeightedLoss:
    """The sum of a row's losses, or of several rows', and how many tokens count.

    Tokens see those before them in their own document, `row["segments"]`.
    """
    if row["segments"].ndim > 1:
        each = jax.vmap(lambda row: loss_of(decoder, row))(row)
        return po.WeightedLoss(*map(jnp.sum, each))
    segments = row["segments"]
    mask = jnp.tril(segments[:, None] == segments[None, :])
    # eqx-zoo's own function holds the scores.
    with mock.patch("eqx_zoo.layers.attention.dot_product_attention", attention):
        x, _ = decoder.model(row["tokens"], row["positions"], mask)
    head = decoder.lm_head or decoder.model.embed_tokens
    losses = po.linear_cross_entropy(x, head.weight, row["labels"])
    return po.WeightedLoss(jnp.sum(losses * row["weights"]), row["weights"].sum())


def dotted(path: tuple[Any, ...]) -> str:
    """A path of attributes and numbers, as tensors are named."""
    return ".".join(str(getattr(x, "name", getattr(x, "idx", x))) for x in path)


def _shapes(
    family: str, config: Mapping[str, Any], dtype: DTypeLike
) -> tuple[PyTree, int]:
    """A decoder of shapes, and how many experts its layers have."""
    how = {"key": jax.random.key(0), "dtype": dtype}
    if FAMILIES[family] is GEMMA:
        return eqx.filter_eval_shape(Gemma, config, **how), 0
    sizes = Config.from_hf({**config, "architectures": [SAME.get(family, family)]})
    return eqx.filter_eval_shape(CausalLM, sizes, **how), sizes.num_experts


def refuse(family: str | None, config: Mapping[str, Any]) -> None:
    """Refuses what would not be computed as transformers does."""
    if family not in FAMILIES:
        raise FolderError(
            f"config.json: architectures={[family]} is none of {', '.join(FAMILIES)}."
        )
    refuse_values("config.json", PLAIN | FAMILIES[family], config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise FolderError(
            "config.json has rope_parameters and rope_scaling: leave one of them."
        )
    for field in ("rope_theta", "original_max_position_embeddings"):
        said = {x for x in (config.get(field), rope.get(field)) if x is not None}
        if len(said) > 1:
            raise FolderError(f"config.json has two values of {field}: leave one.")


def refuse_values(
    file: str, fields: Mapping[str, Sequence[Any]], config: Mapping[str, Any]
) -> None:
    """Refuses fields that have other values than those that are computed."""
    for field, values in fields.items():
        value = config.get(field)
        if value is not None and value not in values:
            raise FolderError(
                f"{file}: {field}={value!r} is not computed here, only"
                f" {' or '.join(map(repr, values)) or 'none'}."
            )


def refuse_shape(folder: Folder, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor that is missing, or of another shape."""
    if name not in folder.tensors:
        raise FolderError(f"{name} is missing in {folder.path}: is it another model's?")
    found = folder.tensors[name].shape
    if found != shape:
        raise FolderError(
            f"{name} in {folder.path} has shape {found}, and config.json says {shape}."
        )
