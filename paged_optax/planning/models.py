"""Shapes of a model: by name, by size, or of a function that makes it."""

import dataclasses
import functools
import importlib
import math
import operator
import os
import re
import sys

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.validation import floating_dtype


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with gated feed-forward layers: Llama, Qwen, Gemma."""

    hidden: int  # width between layers
    query: int  # values of a token's queries: heads times head size
    key: int  # values of a token's keys: key-value heads times head size
    inner: int  # width inside a feed-forward layer
    layers: int
    vocabulary: int = 0  # 0: the layers alone
    tied: bool = True  # the embedding is the output matrix
    dtype: DTypeLike = jnp.bfloat16
    norms: int = 2  # of a layer, of `hidden` values each
    head: int = 128  # head size

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return max(1, self.query // self.head)

    def shapes(self) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
        """The parameters' `ShapeDtypeStruct`s, layers stacked under `"layers"`."""
        hidden, inner = self.hidden, self.inner
        shape = lambda *axes: jax.ShapeDtypeStruct(axes, self.dtype)
        stack = functools.partial(shape, self.layers)
        tree: dict[str, PyTree[jax.ShapeDtypeStruct]] = {
            "layers": {
                **{f"norm{i + 1}": stack(hidden) for i in range(self.norms)},
                "q": stack(hidden, self.query),
                "k": stack(hidden, self.key),
                "v": stack(hidden, self.key),
                "o": stack(self.query, hidden),
                "gate": stack(hidden, inner),
                "up": stack(hidden, inner),
                "down": stack(inner, hidden),
            }
        }
        if self.vocabulary:
            tree |= {"embed": shape(self.vocabulary, hidden), "norm": shape(hidden)}
            if not self.tied:
                tree["head"] = shape(hidden, self.vocabulary)
        return tree

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes()))


# Gemma 2 and 3 have norms before and after attention and feed-forward layers.
_FOUR = functools.partial(Decoder, norms=4, head=256)

TEXT_ONLY = "weights that see pictures are left out; the decoder's are counted."
#: From the published configurations, without the norms of queries and keys of Qwen3 and
#: Gemma 3, and the biases of Qwen2.5. "text" marks decoders beside a vision tower.
DECODERS = {
    "llama2-7b": Decoder(4096, 4096, 4096, 11008, 32, 32000, tied=False),
    "llama3.2-1b": Decoder(2048, 2048, 512, 8192, 16, 128256, head=64),
    "llama3.2-3b": Decoder(3072, 3072, 1024, 8192, 28, 128256),
    "llama3-8b": Decoder(4096, 4096, 1024, 14336, 32, 128256, tied=False),
    "llama3-70b": Decoder(8192, 8192, 1024, 28672, 80, 128256, tied=False),
    "llama3-405b": Decoder(16384, 16384, 1024, 53248, 126, 128256, tied=False),
    "qwen3-0.6b": Decoder(1024, 2048, 1024, 3072, 28, 151936),
    "qwen3-4b": Decoder(2560, 4096, 1024, 9728, 36, 151936),
    "qwen3-8b": Decoder(4096, 4096, 1024, 12288, 36, 151936, tied=False),
    "qwen3-32b": Decoder(5120, 8192, 1024, 25600, 64, 151936, tied=False),
    "mistral-7b": Decoder(4096, 4096, 1024, 14336, 32, 32768, tied=False),
    "mistral-7b-v0.1": Decoder(4096, 4096, 1024, 14336, 32, 32000, tied=False),
    "mistral-7b-v0.3": Decoder(4096, 4096, 1024, 14336, 32, 32768, tied=False),
    "qwen2.5-0.5b": Decoder(896, 896, 128, 4864, 24, 151936, head=64),
    "qwen2.5-1.5b": Decoder(1536, 1536, 256, 8960, 28, 151936),
    "qwen2.5-3b": Decoder(2048, 2048, 256, 11008, 36, 151936),
    "qwen2.5-7b": Decoder(3584, 3584, 512, 18944, 28, 152064, tied=False),
    "qwen2.5-14b": Decoder(5120, 5120, 1024, 13824, 48, 152064, tied=False),
    "qwen2.5-32b": Decoder(5120, 5120, 1024, 27648, 64, 152064, tied=False),
    "gemma-2b": Decoder(2048, 2048, 256, 16384, 18, 256000, head=256),
    "gemma-7b": Decoder(3072, 4096, 4096, 24576, 28, 256000, head=256),
    "gemma2-2b": _FOUR(2304, 2048, 1024, 9216, 26, 256000),
    "gemma2-9b": _FOUR(3584, 4096, 2048, 14336, 42, 256000),
    "gemma2-27b": _FOUR(4608, 4096, 2048, 36864, 46, 256000, head=128),
    "gemma3-270m": _FOUR(640, 1024, 256, 2048, 18, 262144),
    "gemma3-1b": _FOUR(1152, 1024, 256, 6912, 26, 262144),
    "gemma3-4b-text": _FOUR(2560, 2048, 1024, 10240, 34, 262208),
    "gemma3-12b-text": _FOUR(3840, 4096, 2048, 15360, 48, 262208),
    "gemma3-27b-text": _FOUR(5376, 4096, 2048, 21504, 62, 262208, head=128),
}


def of_size(parameters: int | float) -> Decoder:
    """A decoder of about this many parameters, in the proportions of Llama 3.

    Feed-forward layers are 3.5 times the width, keys have 1024 values, the vocabulary
    has 128256 rows, untied from 4 billion parameters on. The width is the multiple of
    256 for which the number of layers is nearest to a 128th of it.
    """
    if not 4e7 <= parameters <= 1e14:
        raise ValueError(f"model of {parameters:.3g} parameters: pass 40M to 100T.")
    decoders = []
    for hidden in range(256, 32769, 256):
        inner, tied = 7 * hidden // 2, parameters < 4e9
        sizes = hidden, hidden, min(1024, hidden), inner
        none, one = (Decoder(*sizes, n, 128256, tied).size for n in (0, 1))
        # A decoder's size is linear in its layers.
        layers = round((parameters - one) / (one - none)) + 1
        if layers >= 1:
            decoders.append(Decoder(*sizes, layers, 128256, tied))
    return min(decoders, key=lambda x: abs(math.log(128 * x.layers / x.hidden)))


def model_shapes(
    name: str, dtype: DTypeLike = "bfloat16"
) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of a decoder's parameters, by its name or its size.

    Args:
      name: A name such as `"llama3-8b"`, `"Llama-3-8B"` or `"meta-llama/Llama-3-8B"`;
        the error of a wrong name lists all. Or a number of parameters such as `"8B"`,
        `"350M"` or `"8e9"`, for a decoder in the proportions of Llama 3.
      dtype: Dtype of the parameters.

    Returns:
      `ShapeDtypeStruct`s, the layers stacked under `"layers"`.

    Raises:
      ValueError: If the model or the dtype is unknown.

    Example:
      >>> import paged_optax as po
      >>> po.model_shapes("qwen3-4b")["embed"].shape
      (151936, 2560)
    """
    decoder = find_decoder(name)
    dtype = floating_dtype("dtype", dtype)
    return dataclasses.replace(decoder, dtype=dtype).shapes()


def find_decoder(name: str) -> Decoder:
    """The decoder of a name or a size, as in `model_shapes`."""
    text, words = str(name), _words(str(name))
    named = {_words(known): decoder for known, decoder in DECODERS.items()}
    if words in named:
        return named[words]
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?)([MBT]?)", text.strip().upper())
    if match is None:
        raise ValueError(
            f"model {text!r} is neither a number of parameters, such as '8B' or"
            f" '350M', nor one of {', '.join(DECODERS)}."
        )
    return of_size(float(match[1]) * {"": 1, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]])


# Words of a name that state the training, its author or the part that is counted.
_IGNORED = ("meta", "hf", "base", "instruct", "it", "pt", "text")


def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])
    return tuple(x for x in words if x not in _IGNORED)


def module_shapes(name: str) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the parameters that `"package.module:function"` makes.

    Nothing is allocated. The function takes no arguments and returns a Flax NNX module;
    a Linen module and its inputs, `(module, *inputs)`; or the parameters, as arrays or
    `ShapeDtypeStruct`s.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        make = operator.attrgetter(attribute)(importlib.import_module(module))
        return jax.eval_shape(lambda: _parameters(make()))
    except (Exception, SystemExit) as error:  # from the module's code
        first, *_ = [*str(error).splitlines(), ""]
        raise ValueError(
            f"--module {name!r} failed with {type(error).__name__}: {first[:300]} It"
            " names a function of no arguments as package.module:function."
        ) from error


def _parameters(model: PyTree) -> PyTree[ArrayLike]:
    if "flax" in sys.modules:  # otherwise it is no Flax module
        from flax import linen, nnx

        if isinstance(model, nnx.Module):
            return nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[1])
        module, *inputs = model if isinstance(model, tuple) and model else (model,)
        if isinstance(module, linen.Module):
            return module.init(jax.random.key(0), *inputs)["params"]
    described = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    empty = lambda x: jax.lax.empty(x.shape, x.dtype) if described(x) else x
    return jax.tree.map(empty, model)
