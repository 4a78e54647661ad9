"""Decoders by name, and by their number of parameters."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with gated feed-forward layers, as Llama 3 and Qwen3 are.

    Attributes:
      hidden: Values of a token between layers.
      query: Values of its queries: heads times their size.
      key: Values of its keys, and of its values: key-value heads times their size.
      inner: Values inside a feed-forward layer.
      layers: Number of layers.
      vocabulary: Rows of the embedding; 0 for the layers alone.
      tied: Whether the embedding is the output's matrix too.
      dtype: The parameters' dtype.
    """

    hidden: int
    query: int
    key: int
    inner: int
    layers: int
    vocabulary: int = 0
    tied: bool = True
    dtype: DTypeLike = jnp.bfloat16

    def shapes(self) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
        """The parameters' `ShapeDtypeStruct`s, layers stacked under `"layers"`."""
        hidden, inner = self.hidden, self.inner
        layer = {
            "norm1": (hidden,),
            "q": (hidden, self.query),
            "k": (hidden, self.key),
            "v": (hidden, self.key),
            "o": (self.query, hidden),
            "norm2": (hidden,),
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }
        tree: dict[str, PyTree[tuple[int, ...]]] = {
            "layers": {name: (self.layers, *shape) for name, shape in layer.items()}
        }
        if self.vocabulary:
            tree |= {"embed": (self.vocabulary, hidden), "norm": (hidden,)}
            if not self.tied:
                tree["head"] = (hidden, self.vocabulary)
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, self.dtype),
            tree,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes()))


#: From the models' published configurations, without Qwen3's norms of queries and keys.
DECODERS = {
    "llama2-7b": Decoder(4096, 4096, 4096, 11008, 32, 32000, tied=False),
    "llama3.2-1b": Decoder(2048, 2048, 512, 8192, 16, 128256),
    "llama3.2-3b": Decoder(3072, 3072, 1024, 8192, 28, 128256),
    "llama3-8b": Decoder(4096, 4096, 1024, 14336, 32, 128256, tied=False),
    "llama3-70b": Decoder(8192, 8192, 1024, 28672, 80, 128256, tied=False),
    "llama3-405b": Decoder(16384, 16384, 1024, 53248, 126, 128256, tied=False),
    "qwen3-0.6b": Decoder(1024, 2048, 1024, 3072, 28, 151936),
    "qwen3-4b": Decoder(2560, 4096, 1024, 9728, 36, 151936),
    "qwen3-8b": Decoder(4096, 4096, 1024, 12288, 36, 151936, tied=False),
    "qwen3-32b": Decoder(5120, 8192, 1024, 25600, 64, 151936, tied=False),
}


def of_size(parameters: int | float) -> Decoder:
    """A decoder of about this many parameters, in the proportions of Llama 3.

    Feed-forward layers are 3.5 times as wide as the model, keys and values have 1024
    values, the vocabulary has 128256 rows, twice from 4 billion parameters on. Of the
    widths that are multiples of 256, the one whose layers number nearest to a 128th of
    the width.

    Example:
      >>> of_size(8e9) == DECODERS["llama3-8b"]
      True
    """
    found, smallest = [], math.inf
    for hidden in range(256, 32769, 256):
        decoder = Decoder(
            hidden,
            hidden,
            min(1024, hidden),
            7 * hidden // 2,
            1,
            128256,
            tied=parameters < 4e9,
        )
        smallest = min(smallest, decoder.size)
        one = decoder.size - dataclasses.replace(decoder, layers=0).size
        layers = round((parameters - decoder.size) / one) + 1
        if layers >= 1:
            found.append(dataclasses.replace(decoder, layers=layers))
    if not found:
        raise ValueError(
            f"{parameters:.3g} parameters are fewer than the {smallest:.3g} of the"
            " smallest decoder of this family: pass the shapes of your own model."
        )
    return min(found, key=lambda x: abs(math.log(128 * x.layers / x.hidden)))


def model_shapes(
    name: str, dtype: DTypeLike = "bfloat16"
) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of a decoder's parameters, by its name or its size.

    Args:
      name: `"llama3-8b"`, `"qwen3-4b"` and others that the message of a wrong name
        lists; or a number of parameters such as `"8B"` or `"350M"`, for a decoder in
        the proportions of Llama 3 with about as many.
      dtype: The parameters' dtype.

    Returns:
      `ShapeDtypeStruct`s, the layers stacked under `"layers"`.

    Raises:
      ValueError: If there is no such model, or no such dtype.

    Example:
      >>> import paged_optax as po
      >>> po.model_shapes("qwen3-4b")["embed"].shape
      (151936, 2560)
    """
    decoder = DECODERS.get(name.lower())
    if decoder is None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", name.strip().upper())
        if match is None:
            raise ValueError(
                f"model {name!r} is neither a number of parameters, such as '8B' or"
                f" '350M', nor one of {', '.join(DECODERS)}."
            )
        decoder = of_size(float(match[1]) * {"M": 1e6, "B": 1e9}[match[2]])
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"dtype={dtype!r} is none: pass such as 'bfloat16'."
        ) from error
    return dataclasses.replace(decoder, dtype=dtype).shapes()
