"""What is trained of a decoder: all of it, or adapters beside its matrices."""

import json
import math
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import qwix
from safetensors.numpy import save_file

import paged_optax as po

from .folder import Folder, FolderError, new_folder
from .model import Decoder, dotted, loss_of, refuse_shape, refuse_values

PyTree = Any
#: Adapters by the name of their matrix: `lora_A` and `lora_B`.
Adapters = Mapping[str, Mapping[str, np.ndarray]]
#: Weights that share a scale, as in the QLoRA paper (https://arxiv.org/abs/2305.14314).
BLOCK = 64
#: Files of a tokenizer and licences, which a folder of adapters has too.
TOKENIZER = ("*token*.json", "*.jinja", "*.model*", "*.tiktoken", "*tekken*", "vocab*")
TOKENIZER += ("merges.txt", "additional_chat_templates", "LICEN[CS]E*", "NOTICE*")
#: What PEFT would compute otherwise, unless a field of its file is one of these.
PLAIN_LORA = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "lora_bias"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(("modules_to_save", "layer_replication"), ([],)),
}


class Full:
    """All parameters are trained."""

    takes = ("*",)  # of the folder's other files

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.params, self.frozen = decoder, decoder.shapes, None

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        """As `split_layers` takes it: `loss(params, row)`."""
        return self.decoder(params, *given)

    def first(self, folder: Folder) -> PyTree:
        """Returns the trained parameters to begin with."""
        return self.decoder.read(folder)

    def read_frozen(self, folder: Folder) -> PyTree:
        """Returns the frozen parameters."""
        return None

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        """Writes what was trained into a new folder."""
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

    Experts and their router have none. Adapters are in float32, and begin as another's,
    by its rank and alpha, or do nothing. In four bits are all matrices of layers but
    the router's. Adapters are written for a base of some name (None: that of before, or
    the folder's path), or merged into the folder's weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        rank: int,
        alpha: float,
        in_four_bits: bool,
        seed: int,
        adapter: pathlib.Path | None = None,
        merge: bool = False,
        base_name: str | None = None,
    ) -> None:
        self.decoder, self.seed, self.merge = decoder, seed, merge
        self.adapter = adapter and Folder.of_adapter(adapter)
        config = self.adapter.config if self.adapter else {}
        refuse_values("adapter_config.json", PLAIN_LORA, config)
        if dropout := config.get("lora_dropout"):
            print(
                f"adapter: it was trained with lora_dropout={dropout}, and is without"
            )
        self.rank = config.get("r", rank)
        self.base_name = base_name or config.get("base_model_name_or_path")
        self.config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": alpha,
            "bias": "none",
            **config,
            "lora_dropout": 0.0,
            "inference_mode": True,
        }
        self.scale = self.config["lora_alpha"] / self.config["r"]
        self.takes = ("*",) if merge else TOKENIZER
        self.packed, self.params = set[str](), dict[str, Any]()
        self.matrices = set[str]()
        flat, _ = jax.tree_util.tree_flatten_with_path(decoder.shapes)
        for path, x in flat:
            name, _, kind = dotted(path).rpartition(".")
            in_layer = kind == "weight" and ".layers." in name and x.ndim > 1
            if not in_layer or name.endswith(".mlp.gate"):
                continue
            self.matrices.add(name)
            if in_four_bits:
                self.packed.add(f"{name}.{kind}")
            known = (
                self.adapter is None
                or self._tensor(name, "lora_A") in self.adapter.tensors
            )
            if known and ".experts." not in name:
                shapes = {"lora_A": (self.rank, x.shape[1])}
                shapes["lora_B"] = x.shape[0], self.rank
                shape = lambda x: jax.ShapeDtypeStruct(x, jnp.float32)
                self.params[name] = {n: shape(x) for n, x in shapes.items()}
        if self.adapter is not None:
            self._refuse_others(self.adapter)
        pack = lambda x: jax.eval_shape(Packed.of, x)
        self.frozen = self._each_packed(pack, decoder.shapes)

    def _each_packed(self, do: Callable[[Any], PyTree], params: PyTree) -> PyTree:
        """What `do` makes of the matrices that are in four bits; others as they are."""
        each = lambda path, x: do(x) if dotted(path) in self.packed else x
        return jax.tree_util.tree_map_with_path(each, params)

    def _refuse_others(self, adapter: Folder) -> None:
        """Refuses adapters of other matrices, or of other shapes."""
        left = {*adapter.tensors}
        for name, pair in self.params.items():
            for kind, x in pair.items():
                refuse_shape(adapter, self._tensor(name, kind), x.shape)
                left.remove(self._tensor(name, kind))
        if left or not self.params:
            raise FolderError(
                f"{min(left, default='no tensor')} in {adapter.path} is no adapter of"
                " a matrix that this model has in its layers."
            )

    def loss(self, params: PyTree, *given: PyTree) -> po.WeightedLoss:
        """As `split_layers` takes it: `loss(params, frozen, row)`."""
        frozen, row = given
        is_packed = lambda x: isinstance(x, Packed)
        unpacked = lambda x: x.unpacked() if is_packed(x) else x
        whole = jax.tree.map(unpacked, frozen, is_leaf=is_packed)
        decoder = eqx.combine(self.decoder.static, whole)

        def adapted(path: tuple[Any, ...], x: PyTree) -> PyTree:
            found = params.get(dotted(path))
            return Adapted(x, **found, scale=self.scale) if found else x

        is_linear = lambda x: isinstance(x, eqx.nn.Linear)
        decoder = jax.tree_util.tree_map_with_path(adapted, decoder, is_leaf=is_linear)
        return loss_of(decoder, row)

    def first(self, folder: Folder) -> Adapters:
        """Returns the adapters to begin with."""
        return {name: self._first(name) for name in self.params}

    def read_frozen(self, folder: Folder) -> PyTree:
        """Returns the folder's weights, with matrices in four bits."""
        round_ = jax.jit(Packed.of)
        pack = lambda x: jax.tree.map(np.asarray, round_(np.asarray(x)))
        return self._each_packed(pack, self.decoder.read(folder))

    def _first(self, name: str) -> dict[str, np.ndarray]:
        """The adapter of before, or one that does nothing yet, as PEFT begins."""
        if (before := self.adapter) is not None:
            read = lambda kind: before[self._tensor(name, kind)].astype(np.float32)
            return {kind: read(kind) for kind in self.params[name]}
        a, b = self.params[name]["lora_A"].shape, self.params[name]["lora_B"].shape
        draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        most = a[1] ** -0.5  # Kaiming's with a = sqrt(5)
        first = draw.uniform(-most, most, a).astype(np.float32)
        return {"lora_A": first, "lora_B": np.zeros(b, np.float32)}

    def write(
        self, folder: Folder, path: pathlib.Path, split: po.SplitModel, params: PyTree
    ) -> None:
        """Writes the adapters, or the weights with them, into a new folder."""
        self.save(folder, path, jax.tree.map(np.asarray, split.unstack(params)))

    def save(self, folder: Folder, path: pathlib.Path, adapters: Adapters) -> None:
        """Writes adapters as PEFT does, or merged; checked with version 0.21.2.

        https://huggingface.co/docs/peft/developer_guides/checkpoint
        """
        if self.merge:
            folder.write(path, self.merged(folder, adapters))
            return
        tensors = {
            self._tensor(name, kind): x
            for name, adapter in adapters.items()
            for kind, x in adapter.items()
        }
        config = {"target_modules": self._targets()} | self.config
        config["base_model_name_or_path"] = self.base_name or str(
            folder.path.absolute()
        )
        with new_folder(path) as partial:
            folder.copy(partial, *TOKENIZER)
            save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
            text = json.dumps(config, indent=2)
            (partial / "adapter_config.json").write_text(text)

    def merged(
        self, folder: Folder, adapters: Adapters
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the folder's tensors with the adapters added, as PEFT merges them.

        Matrices that are in four bits are those that the codes stand for.
        """
        rounded = jax.jit(lambda x: Packed.of(x).unpacked())
        left = {*folder.tensors}
        for path, _ in jax.tree_util.tree_leaves_with_path(self.decoder.shapes):
            pair = adapters.get(dotted(path).removesuffix(".weight"))
            for name in self.decoder.names(path):
                x = folder[name]
                if dotted(path) in self.packed:
                    x = np.asarray(rounded(x.astype(self.decoder.dtype)))
                if pair is not None:
                    x = x.astype(np.float32)
                    x += self.scale * (pair["lora_B"] @ pair["lora_A"])
                left.remove(name)
                yield name, x
        yield from ((name, folder[name]) for name in left)

    def _tensor(self, name: str, kind: str) -> str:
        """What PEFT calls a part of a matrix's adapter."""
        module = self.decoder.module + name.removeprefix("model.")
        return f"base_model.model.{module}.{kind}.weight"

    def _targets(self) -> str | list[str]:
        """The adapted matrices: their last names, if no other module has one."""
        last = lambda name: name.rpartition(".")[2]
        kinds = {last(name) for name in self.params}
        others = self.matrices - self.params.keys()
        if self.decoder.module == "model." and kinds.isdisjoint(map(last, others)):
            return sorted(kinds)
        kinds = sorted({".".join(name.split(".")[-2:]) for name in self.params})
        layer = re.escape(f"{self.decoder.module}layers.")
        return rf"{layer}[0-9]+\.({'|'.join(map(re.escape, kinds))})"
