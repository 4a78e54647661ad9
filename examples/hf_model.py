"""Decoders of `eqx-zoo`, for what a folder's `config.json` says.

Its parameters have the tensors' own names and shapes. What it does not compute as the
configuration says is refused by field and value.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqx_zoo import CausalLM
from eqx_zoo.models.causal_lm.config import Config
from hf_folder import Folder, FolderError
from jax.typing import DTypeLike

import paged_optax as po

PyTree = Any

#: What transformers would compute otherwise, unless the field is one of these.
PLAIN = {
    "attention_dropout": (0, 0.0),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "use_sliding_window": (False,),
}
#: Those of which eqx-zoo has the biases of queries, keys and values, and no others.
NO_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
FAMILIES = (*NO_BIAS, "Qwen2ForCausalLM", "MistralForCausalLM")
#: Fields whose meaning is theirs, under the name that eqx-zoo knows.
SAME = {"MistralForCausalLM": "LlamaForCausalLM"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
      static: What of it is no parameter.
      shapes: Its parameters' shapes.
      experts: How many experts layers have.
    """

    static: PyTree
    shapes: PyTree
    experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: DTypeLike) -> "Model":
        """The decoder that a configuration describes.

        Raises:
          FolderError: If it is of another family, or says what is not computed so.
        """
        refuse(config)
        family = config["architectures"][0]
        known = {**config, "architectures": [SAME.get(family, family)]}
        try:
            sizes = Config.from_hf(known)
        except (KeyError, NotImplementedError, ValueError) as error:
            raise FolderError(f"config.json: {error}.") from None
        key = jax.random.key(0)
        decoder = eqx.filter_eval_shape(CausalLM, sizes, key=key, dtype=dtype)
        is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        shapes, static = eqx.partition(decoder, is_shape)
        return cls(static, shapes, sizes.num_experts)

    def loss(self, params: PyTree, row: Mapping[str, jax.Array]) -> po.WeightedLoss:
        """The sum of a row's losses, and how many of its tokens count.

        Tokens see those before them in their own document, `row["segments"]`.
        """
        decoder = eqx.combine(params, self.static)
        segments = row["segments"]
        mask = jnp.tril(segments[:, None] == segments[None, :])
        x, _ = decoder.model(row["tokens"], row["positions"], mask)
        head = decoder.lm_head or decoder.model.embed_tokens
        losses = po.linear_cross_entropy(x, head.weight, row["labels"])
        return po.WeightedLoss(jnp.sum(losses * row["weights"]), row["weights"].sum())

    def read(self, folder: Folder) -> PyTree:
        """A folder's weights, as the parameters are named.

        Raises:
          FolderError: If a tensor is missing, of another shape, or is left over.
        """
        used: set[str] = set()

        def value(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> np.ndarray:
            names = self.names(path)
            used.update(names)
            for name in names:
                _refuse_other(folder, name, shape.shape[len(names) > 1 :])
            if len(names) == 1:
                return np.asarray(folder[names[0]]).astype(shape.dtype, copy=False)
            return np.stack([folder[name] for name in names]).astype(shape.dtype)

        params = jax.tree_util.tree_map_with_path(value, self.shapes)
        tied = {"lm_head.weight"} if self.static.lm_head is None else set()
        if left := set(folder.tensors) - used - tied:
            raise FolderError(
                f"{min(left)} in {folder.path} is no parameter of this model."
            )
        return params

    def names(self, path: tuple[Any, ...]) -> list[str]:
        """The tensors that a parameter is made of: one, or one of each expert."""
        parts = [str(getattr(key, "name", getattr(key, "idx", None))) for key in path]
        if "experts" not in parts:
            return [".".join(parts)]
        at = parts.index("experts") + 1
        numbered = ([*parts[:at], str(n), *parts[at:]] for n in range(self.experts))
        return [".".join(each) for each in numbered]

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
                if (
                    names == ["model.embed_tokens.weight"]
                    and self.static.lm_head is None
                ):
                    if "lm_head.weight" in folder.tensors:
                        yield "lm_head.weight", x


def refuse(config: Mapping[str, Any]) -> None:
    """Refuses what eqx-zoo would not compute as transformers does."""
    family = (config.get("architectures") or [None])[0]
    if family not in FAMILIES:
        raise FolderError(
            f"config.json: architectures={[family]} is none of {', '.join(FAMILIES)}."
        )
    plain = dict(PLAIN)
    if family in NO_BIAS or family in SAME:
        plain["attention_bias"] = (False,)
    if family in SAME:
        plain["sliding_window"] = ()
    for field, values in plain.items():
        value = config.get(field)
        if value is not None and value not in values:
            raise FolderError(
                f"config.json: {field}={value!r} is not computed by eqx-zoo, only"
                f" {' or '.join(map(repr, values)) or 'none'}."
            )


def _refuse_other(folder: Folder, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor that is missing, or of another shape."""
    if name not in folder.tensors:
        raise FolderError(f"{name} is missing in {folder.path}: is it another model's?")
    found = folder.tensors[name].shape
    if found != shape:
        raise FolderError(
            f"{name} in {folder.path} has shape {found}, and config.json says {shape}."
        )
