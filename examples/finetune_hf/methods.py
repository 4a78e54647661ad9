"""Methods of training a decoder: in full, or adapters of its matrices."""

import json
import math
import pathlib
import re
import zlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import qwix
from safetensors.numpy import save_file

import paged_optax as po

from .folder import Folder, FolderError, Values, new_folder
from .model import Decoder, dotted, loss_of, refuse_shape, refuse_values

PyTree = Any
#: The matrices A and B of adapters, by PEFT's names.
Adapters = dict[str, np.ndarray]
#: Weights that share a scale, as in the QLoRA paper (https://arxiv.org/abs/2305.14314).
BLOCK = 64
#: Files of a tokenizer and licences, which are copied beside adapters.
TOKENIZER = ("*token*.json", "*.jinja", "*.model*", "*.tiktoken", "*tekken*", "vocab*")
TOKENIZER += ("merges.txt", "additional_chat_templates", "LICEN[CS]E*", "NOTICE*")
#: Values of fields of `adapter_config.json` by which PEFT computes the same.
PLAIN_LORA = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "lora_bias"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(("modules_to_save", "layer_replication"), ([],)),
}


class Full:
    """Trains all parameters."""

    takes, frozen, name = ("*",), None, "full"

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.params = decoder, decoder.shapes
        # As `split_layers` takes it, and the parameters to begin with.
        self.loss, self.first = decoder, decoder.read

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        folder.write(path, self.decoder.tensors(folder, split, params))


class Adapted(eqx.Module):
    r"""Computes :math:`Wx + \frac{\alpha}{r} BAx`, the adapter in float32 as PEFT."""

    matrix: eqx.nn.Linear
    lora_A: jax.Array
    lora_B: jax.Array
    scale: float = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        beside = self.lora_B @ (self.lora_A @ x.astype(self.lora_A.dtype))
        return (self.matrix(x) + self.scale * beside).astype(x.dtype)


class Packed(eqx.Module):
    """A matrix in NF4: two codes a byte, and a scale for every block of a row."""

    codes: jax.Array
    scale: jax.Array
    dtype: np.dtype = eqx.field(static=True)

    @classmethod
    def of(cls, x: jax.Array) -> "Packed":
        block, last = math.gcd(BLOCK, x.shape[-1]), x.ndim - 1
        tiles = {axis: 1 for axis in range(last)} | {last: block}
        made = qwix.quantize(x.astype(jnp.float32), "nf4", tiled_axes=tiles)
        codes = made.qvalue.astype(jnp.uint8)
        return cls(codes[..., ::2] << 4 | codes[..., 1::2], made.scale, x.dtype)

    def unpacked(self) -> jax.Array:
        codes = jnp.stack([self.codes >> 4, self.codes & 15], -1)
        shape = (*self.codes.shape[:-1], -1)
        made = qwix.QArray(codes.reshape(shape), self.scale, qtype="nf4")
        return qwix.dequantize(made).astype(self.dtype)


class Lora:
    """Trains adapters in float32 of attention's and MLPs' matrices, not of experts."""

    def __init__(self, decoder: Decoder, args: Namespace) -> None:
        self.decoder, self.seed, self.merge = decoder, args.seed, args.merge
        self.takes = ("*",) if args.merge else TOKENIZER
        self.adapter = args.adapter and Folder.of_adapter(args.adapter)
        before = dict(self.adapter.config) if self.adapter else {}
        refuse_values("adapter_config.json", PLAIN_LORA, before)
        if dropout := before.get("lora_dropout"):
            print(f"adapter: trained with lora_dropout={dropout}, continues without")
        plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": args.rank}
        plain |= {"lora_alpha": args.alpha, "bias": "none"}
        self.config = plain | before | {"lora_dropout": 0.0, "inference_mode": True}
        self.base_name = args.base_name or before.get("base_model_name_or_path")
        rank, alpha = self.config["r"], self.config["lora_alpha"]
        self.scale = alpha / rank
        merges = f", merged into the weights{' in NF4' * (args.method == 'qlora')}"
        self.name = f"{args.method}, rank {rank}, alpha {alpha:g}{merges * args.merge}"
        self.matrices, self.adapted = list[str](), list[str]()
        self.params = dict[str, jax.ShapeDtypeStruct]()
        shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
        for path, x in jax.tree_util.tree_leaves_with_path(decoder.shapes):
            name, _, kind = dotted(path).rpartition(".")
            in_layer = kind == "weight" and ".layers." in name and x.ndim > 1
            if not in_layer or name.endswith(".mlp.gate"):
                continue
            self.matrices.append(name)
            a, b = self._tensors(name)
            known = self.adapter is None or a in self.adapter.tensors
            if known and ".experts." not in name:
                self.adapted.append(name)
                self.params |= {a: shape(rank, x.shape[1]), b: shape(x.shape[0], rank)}
        four_bits = self.matrices if args.method == "qlora" else ()
        self.packed = {f"{name}.weight" for name in four_bits}
        if self.adapter is not None:
            self._refuse_others(self.adapter)
        pack = lambda x: jax.eval_shape(Packed.of, x)
        self.frozen = self._pack(pack, decoder.shapes)

    def _tensors(self, name: str) -> tuple[str, str]:
        """Returns PEFT's names of a matrix's adapter, A and B."""
        module = f"base_model.model.{self.decoder.module}{name.removeprefix('model.')}"
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def _pack(self, pack: Callable[[Any], PyTree], params: PyTree) -> PyTree:
        each = lambda path, x: pack(x) if dotted(path) in self.packed else x
        return jax.tree_util.tree_map_with_path(each, params)

    def _refuse_others(self, adapter: Folder) -> None:
        for name, x in self.params.items():
            refuse_shape(adapter, name, x.shape)
        left = adapter.tensors.keys() - self.params.keys()
        if left or not self.params:
            raise FolderError(
                f"{min(left, default='no tensor')} in {adapter.path} is no adapter of"
                " a matrix that this model has in its layers."
            )

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        """Computes `loss(params, frozen, row)`, as `split_layers` takes it."""
        frozen, row = given
        is_packed = lambda x: isinstance(x, Packed)
        unpacked = lambda x: x.unpacked() if is_packed(x) else x
        whole = jax.tree.map(unpacked, frozen, is_leaf=is_packed)
        decoder = eqx.combine(self.decoder.static, whole)

        def adapted(path: tuple[Any, ...], x: PyTree) -> PyTree:
            a, b = map(params.get, self._tensors(dotted(path)))
            return x if a is None else Adapted(x, a, b, self.scale)

        is_linear = lambda x: isinstance(x, eqx.nn.Linear)
        decoder = jax.tree_util.tree_map_with_path(adapted, decoder, is_leaf=is_linear)
        return loss_of(decoder, row)

    def first(self, folder: Folder) -> Adapters:
        """Returns the other folder's adapters, or some without effect, as PEFT's."""
        if (before := self.adapter) is not None:
            return {name: before[name].astype(np.float32) for name in self.params}
        first = dict[str, np.ndarray]()
        for name in self.adapted:
            a, b = self._tensors(name)
            shape = self.params[a].shape
            most = shape[1] ** -0.5  # Kaiming's with a = sqrt(5)
            draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            first[a] = draw.uniform(-most, most, shape).astype(np.float32)
            first[b] = np.zeros(self.params[b].shape, np.float32)
        return first

    def read_frozen(self, folder: Folder) -> PyTree:
        """Returns the folder's weights, with matrices in four bits."""
        round_ = jax.jit(Packed.of)
        pack = lambda x: jax.tree.map(np.asarray, round_(np.asarray(x)))
        return self._pack(pack, self.decoder.read(folder))

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        """Writes the adapters, or the weights with them, into a new folder."""
        self.save(folder, path, jax.tree.map(np.asarray, split.unstack(params)))

    def save(self, folder: Folder, path: pathlib.Path, adapters: Adapters) -> None:
        """Writes adapters as PEFT does, or merged; checked with version 0.21.2."""
        # https://huggingface.co/docs/peft/developer_guides/checkpoint
        if self.merge:
            folder.write(path, self.merged(folder, adapters))
            return
        config = {"target_modules": self._targets()} | self.config
        base = self.base_name or str(folder.path.absolute())
        text = json.dumps(config | {"base_model_name_or_path": base}, indent=2)
        with new_folder(path) as partial:
            folder.copy(partial, *TOKENIZER)
            save_file(adapters, partial / "adapter_model.safetensors", {"format": "pt"})
            (partial / "adapter_config.json").write_text(text)

    def merged(self, folder: Folder, adapters: Adapters) -> Values:
        """Yields the decoder's tensors with the adapters added, as PEFT merges them."""
        rounded = jax.jit(lambda x: Packed.of(x).unpacked())
        for path, _ in jax.tree_util.tree_leaves_with_path(self.decoder.shapes):
            name = dotted(path)
            a, b = map(adapters.get, self._tensors(name.removesuffix(".weight")))
            for tensor in self.decoder.names(path):
                x = folder[tensor]
                if name in self.packed:
                    x = np.asarray(rounded(x.astype(self.decoder.dtype)))
                if a is not None:
                    x = x.astype(np.float32)
                    x += self.scale * (b @ a)
                yield tensor, x

    def _targets(self) -> str | list[str]:
        """Lists the matrices' last names, or a pattern if other modules have them."""
        last = lambda name: name.rpartition(".")[2]
        kinds = {*map(last, self.adapted)}
        others = {*self.matrices} - {*self.adapted}
        if self.decoder.module == "model." and kinds.isdisjoint(map(last, others)):
            return sorted(kinds)
        kinds = sorted({".".join(name.split(".")[-2:]) for name in self.adapted})
        layer = re.escape(f"{self.decoder.module}layers.")
        return rf"{layer}[0-9]+\.({'|'.join(map(re.escape, kinds))})"
