"""What is trained of a decoder: all of it, or adapters beside its matrices."""

import json
import math
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import qwix

import paged_optax as po

from .folder import Folder, new_folder
from .model import Decoder, dotted, loss_of

PyTree = Any
#: Weights that share a scale, as in the QLoRA paper (https://arxiv.org/abs/2305.14314).
BLOCK = 64
#: Files of a tokenizer, which a folder of adapters has too.
TOKENIZER = ("*token*.json", "*.jinja", "*.model", "vocab*", "merges.txt")


class Method(Protocol):
    """What is trained.

    Attributes:
      params: The shapes of what is trained.
      frozen: The shapes of what is not; None: everything is.
    """

    params: PyTree
    frozen: PyTree | None

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        """As `split_layers` takes it: `loss(params, row)`, or with `frozen` between."""
        ...

    def first(self, folder: Folder) -> PyTree:
        """The trained parameters to begin with."""
        ...

    def read_frozen(self, folder: Folder) -> PyTree:
        """The frozen parameters."""
        ...

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        """Writes what was trained into a new folder."""
        ...


class Full:
    """All parameters are trained."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.params, self.frozen = decoder, decoder.shapes, None

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        return self.decoder(params, *given)

    def first(self, folder: Folder) -> PyTree:
        return self.decoder.read(folder)

    def read_frozen(self, folder: Folder) -> PyTree:
        return None

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        folder.write(path, self.decoder.tensors(folder, split, params))


class Adapted(eqx.Module):
    r"""A matrix with an adapter: :math:`W x + \frac{\alpha}{r} B A x`.

    The adapter is computed in float32, whatever `x` is in, as PEFT does.
    """

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
        """Rounds a matrix, or several; see `BLOCK`."""
        block, last = math.gcd(BLOCK, x.shape[-1]), x.ndim - 1
        tiles = {axis: 1 for axis in range(last)} | {last: block}
        made = qwix.quantize(x.astype(jnp.float32), "nf4", tiled_axes=tiles)
        codes = made.qvalue.astype(jnp.uint8)
        return cls(codes[..., ::2] << 4 | codes[..., 1::2], made.scale, x.dtype)

    def unpacked(self) -> jax.Array:
        """The matrix, in the dtype that it had."""
        codes = jnp.stack([self.codes >> 4, self.codes & 15], -1)
        shape = (*self.codes.shape[:-1], -1)
        made = qwix.QArray(codes.reshape(shape), self.scale, qtype="nf4")
        return qwix.dequantize(made).astype(self.dtype)


class Lora:
    """Adapters are trained beside the matrices of attention and MLPs.

    Experts and their router have none. Adapters are in float32.

    Args:
      decoder: The decoder.
      rank: Rows of `lora_A`.
      alpha: The adapters' factor is `alpha / rank`.
      in_four_bits: Whether the layers' matrices are in NF4, but for the router's.
      seed: Of the first `lora_A`; `lora_B` is zero.
    """

    def __init__(
        self, decoder: Decoder, rank: int, alpha: float, in_four_bits: bool, seed: int
    ) -> None:
        self.decoder, self.rank, self.alpha, self.seed = decoder, rank, alpha, seed
        self.packed = set[str]()
        self.params = dict[str, dict[str, jax.ShapeDtypeStruct]]()
        flat, _ = jax.tree_util.tree_flatten_with_path(decoder.shapes)
        for path, x in flat:
            name, _, kind = dotted(path).rpartition(".")
            in_layer = kind == "weight" and ".layers." in name and x.ndim > 1
            if not in_layer or name.endswith(".mlp.gate"):
                continue
            if in_four_bits:
                self.packed.add(f"{name}.{kind}")
            if ".experts." not in name:
                shapes = {"lora_A": (rank, x.shape[1]), "lora_B": (x.shape[0], rank)}
                shape = lambda x: jax.ShapeDtypeStruct(x, jnp.float32)
                self.params[name] = {n: shape(x) for n, x in shapes.items()}
        pack = lambda x: jax.eval_shape(Packed.of, x)
        self.frozen = self._each_packed(pack, decoder.shapes)

    def _each_packed(self, do: Callable[[Any], PyTree], params: PyTree) -> PyTree:
        """What `do` makes of the matrices that are in four bits; others as they are."""
        each = lambda path, x: do(x) if dotted(path) in self.packed else x
        return jax.tree_util.tree_map_with_path(each, params)

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        frozen, row = given
        is_packed = lambda x: isinstance(x, Packed)
        unpacked = lambda x: x.unpacked() if is_packed(x) else x
        whole = jax.tree.map(unpacked, frozen, is_leaf=is_packed)
        decoder = eqx.combine(self.decoder.static, whole)

        def adapted(path: tuple[Any, ...], x: PyTree) -> PyTree:
            found = params.get(dotted(path))
            return Adapted(x, **found, scale=self.alpha / self.rank) if found else x

        is_linear = lambda x: isinstance(x, eqx.nn.Linear)
        decoder = jax.tree_util.tree_map_with_path(adapted, decoder, is_leaf=is_linear)
        return loss_of(decoder, row)

    def first(self, folder: Folder) -> PyTree:
        return {name: self._first(name) for name in self.params}

    def read_frozen(self, folder: Folder) -> PyTree:
        round_ = jax.jit(Packed.of)
        pack = lambda x: jax.tree.map(np.asarray, round_(np.asarray(x)))
        return self._each_packed(pack, self.decoder.read(folder))

    def _first(self, name: str) -> dict[str, np.ndarray]:
        """An adapter that does nothing yet, as PEFT begins."""
        a, b = self.params[name]["lora_A"].shape, self.params[name]["lora_B"].shape
        draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        most = a[1] ** -0.5  # Kaiming's with a = sqrt(5)
        first = draw.uniform(-most, most, a).astype(np.float32)
        return {"lora_A": first, "lora_B": np.zeros(b, np.float32)}

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        """Writes adapters as PEFT does; checked with version 0.21.2.

        https://huggingface.co/docs/peft/developer_guides/checkpoint
        """
        from safetensors.numpy import save_file

        theirs = {name: self._module(name) for name in self.params}
        tensors = {
            f"base_model.model.{theirs[name]}.{kind}.weight": np.asarray(x)
            for name, adapter in split.unstack(params).items()
            for kind, x in adapter.items()
        }
        kinds = sorted({".".join(name.split(".")[-2:]) for name in self.params})
        layer = re.escape(f"{self.decoder.module}layers.")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(folder.path.absolute()),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": rf"{layer}[0-9]+\.({'|'.join(map(re.escape, kinds))})",
        }
        with new_folder(path) as partial:
            folder.copy(partial, TOKENIZER)
            save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
            text = json.dumps(config, indent=2)
            (partial / "adapter_config.json").write_text(text)

    def _module(self, name: str) -> str:
        """What transformers calls a matrix."""
        return self.decoder.module + name.removeprefix("model.")
