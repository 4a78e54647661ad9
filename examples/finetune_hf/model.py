"""Decoders of `eqx-zoo` for a folder's `config.json`, by the tensors' own names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from attention import attention
from jax.typing import DTypeLike

import paged_optax as po

from .folder import Folder, FolderError, Tensors, Values

try:
    import transformers
    from eqx_zoo import CausalLM
    from eqx_zoo.models.causal_lm.config import Config
    from huggingface_hub.errors import StrictDataclassError

    from .gemma import gemma
except ModuleNotFoundError as error:
    why = f'{error}: pip install ".[hf]" with Python 3.12 or newer'
    raise ModuleNotFoundError(why, name=error.name) from None

PyTree = Any

#: Values of fields by which transformers computes the same.
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
#: The same for each family.
FAMILIES = {
    "LlamaForCausalLM": SILU | NO_BIAS,
    "MistralForCausalLM": SILU | NO_BIAS,
    "Qwen2ForCausalLM": SILU,
    "Qwen3ForCausalLM": SILU | NO_BIAS,
    "Qwen3MoeForCausalLM": SILU | NO_BIAS,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": GEMMA,
}
#: Prefixes of a decoder's tensors beside a vision tower: the hub's, transformers'.
PREFIXES = ("language_model.model.", "model.language_model.")
PICTURES = ("vision_tower", "multi_modal_projector")
HEAD = "lm_head.weight"
UNUSABLE = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of a family, which is its class in transformers."""

    family: str
    config: Mapping[str, Any]  # of `config.json`, with transformers' defaults
    dtype: np.dtype  # of the parameters
    static: PyTree  # all but the parameters
    shapes: PyTree  # of the parameters
    experts: int  # of a layer
    prefix: str  # of the tensors' names
    module: str  # the same in transformers

    @classmethod
    def of(cls, folder: Folder, dtype: DTypeLike) -> "Decoder":
        (family, *_) = folder.config.get("architectures") or [None]
        config = folder.config.get("text_config") or folder.config
        for part in (folder.config, config):
            refuse(family, part)
        is_gemma = FAMILIES[family] is GEMMA
        kind = "Gemma3Text" if is_gemma else family.removesuffix("ForCausalLM")
        how, experts = {"key": jax.random.key(0), "dtype": dtype}, 0
        try:
            config = getattr(transformers, f"{kind}Config").from_dict(dict(config))
            config = {name: x for name, x in config.to_dict().items() if x is not None}
            if is_gemma:
                decoder = eqx.filter_eval_shape(gemma, config, **how)
            else:  # Mistral is Llama, but for its window
                name = family.replace("Mistral", "Llama")
                sizes = Config.from_hf(config | {"architectures": [name]})
                decoder = eqx.filter_eval_shape(CausalLM, sizes, **how)
                experts = sizes.num_experts
        except (*UNUSABLE, StrictDataclassError) as error:
            why = " ".join(str(error).split())
            raise FolderError(f"config.json cannot be used: {why}.") from None
        is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        shapes, static = eqx.partition(decoder, is_shape)
        prefixes = (x for x in PREFIXES if any(n.startswith(x) for n in folder.tensors))
        prefix = next(prefixes, "model.")
        module = "model." if prefix == "model." else PREFIXES[1]
        read = np.dtype(dtype), static, shapes, experts, prefix, module
        return cls(family, config, *read)

    def __call__(self, params: PyTree, row: Mapping[str, jax.Array]) -> po.WeightedLoss:
        return loss_of(eqx.combine(params, self.static), row)

    def read(self, folder: Folder) -> PyTree:
        """Returns a folder's weights as parameters, which are read when used."""
        used = set[str]()

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
        # Others see pictures, or are constants.
        sees = self.prefix != "model."
        for name in sorted({*folder.tensors} - used):
            if not (sees and _part(name)) and not name.endswith("rotary_emb.inv_freq"):
                raise FolderError(f"{name} in {folder.path} is no parameter here.")
        return params

    def length(self, asked: int | None, usual: int) -> int:
        """Returns the tokens of a row: as asked, or as usual within the positions."""
        fields = ["max_position_embeddings"]
        fields += ["sliding_window"] * self.family.startswith("Mistral")
        most = {x: self.config[x] for x in fields if x in self.config}
        length = asked or min([usual, *most.values()])
        for field, x in most.items():
            if length > x:
                raise FolderError(f"--length {length}: the model has {field}={x}.")
        return length

    def refuse_tokens(self, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
        names = "tokens", "labels"
        most = max((int(row[name].max()) for row in rows for name in names), default=0)
        if most >= (entries := self.config["vocab_size"]):
            raise FolderError(
                f"the tokenizer makes token {most}, and config.json says"
                f" vocab_size={entries}: resize the embedding first."
            )

    def untrained(self, folder: Folder) -> list[str]:
        """Lists the parts of a model that do not change, such as a vision tower."""
        return sorted({*filter(None, map(_part, folder.tensors))})

    def names(self, path: tuple[Any, ...]) -> list[str]:
        """Lists the tensors of a parameter: one, or one of each expert."""
        name = dotted(path)
        if path[0].name == "model":
            name = self.prefix + name.removeprefix("model.")
        if "experts" not in name:
            return [name]
        before, _, after = name.partition("experts.")
        return [f"{before}experts.{n}.{after}" for n in range(self.experts)]

    def tensors(self, folder: Folder, split: po.SplitModel, params: PyTree) -> Values:
        """Yields stacked parameters as the folder's tensors, a stack at a time."""
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


def loss_of(decoder: PyTree, row: Mapping[str, jax.Array]) -> po.WeightedLoss:
    """Sums the losses of a row, or of several, and counts the tokens."""
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
    """Joins a path's attributes and numbers, as tensors are named."""
    return ".".join(str(getattr(x, "name", getattr(x, "idx", x))) for x in path)


def _part(name: str) -> str | None:
    """Returns the part of a model that a tensor is in, if it sees pictures."""
    first, _, _ = name.removeprefix("model.").partition(".")
    return first if first in PICTURES else None


def refuse(family: str | None, config: Mapping[str, Any]) -> None:
    """Raises if transformers would compute something else."""
    if family not in FAMILIES:
        raise FolderError(
            f"config.json: architectures={[family]} is none of {', '.join(FAMILIES)}."
        )
    refuse_values("config.json", PLAIN | FAMILIES[family], config)
    ropes = [config[x] for x in ("rope_parameters", "rope_scaling") if config.get(x)]
    if len(ropes) > 1:
        raise FolderError("config.json: rope_parameters, rope_scaling: leave one.")
    (rope,) = ropes or [{}]
    for field in ("rope_theta", "original_max_position_embeddings"):
        if len({config.get(field), rope.get(field)} - {None}) > 1:
            raise FolderError(f"config.json has two values of {field}: leave one.")


def refuse_values(
    file: str, fields: Mapping[str, Sequence[Any]], config: Mapping[str, Any]
) -> None:
    for field, values in fields.items():
        value = config.get(field)
        if value is not None and value not in values:
            raise FolderError(
                f"{file}: {field}={value!r} is not computed here, only"
                f" {' or '.join(map(repr, values)) or 'none'}."
            )


def refuse_shape(folder: Folder, name: str, shape: tuple[int, ...]) -> None:
    if name not in folder.tensors:
        raise FolderError(f"{name} is missing in {folder.path}: is it another model's?")
    if (there := folder.tensors[name].shape) != shape:
        raise FolderError(
            f"{name} in {folder.path} has shape {there}, and config.json says {shape}."
        )
