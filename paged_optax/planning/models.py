"""Shapes of a model: by its name, by its size, or of a function that makes it."""

import dataclasses
import difflib
import functools
import importlib
import math
import operator
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.validation import floating_dtype


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with gated feed-forward layers: Llama, Qwen, Gemma.

    Attributes:
      hidden: Values of a token between layers.
      query: Values of its queries: heads times their size.
      key: Values of its keys, and of its values: key-value heads times their size.
      inner: Values inside a feed-forward layer.
      layers: Number of layers.
      vocabulary: Rows of the embedding; 0 for the layers alone.
      tied: Whether the embedding is the output's matrix too.
      dtype: The parameters' dtype.
      norms: Norms of a layer, of `hidden` values each.
      head: Values of one head.
    """

    hidden: int
    query: int
    key: int
    inner: int
    layers: int
    vocabulary: int = 0
    tied: bool = True
    dtype: DTypeLike = jnp.bfloat16
    norms: int = 2
    head: int = 128

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return max(1, self.query // self.head)

    def shapes(self) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
        """The parameters' `ShapeDtypeStruct`s, layers stacked under `"layers"`."""
        hidden, inner = self.hidden, self.inner
        layer = {
            **{f"norm{i + 1}": (hidden,) for i in range(self.norms)},
            "q": (hidden, self.query),
            "k": (hidden, self.key),
            "v": (hidden, self.key),
            "o": (self.query, hidden),
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


# Gemma 2 and 3: a norm before attention and feed-forward layer, and one after.
_FOUR = functools.partial(Decoder, norms=4, head=256)

#: From the models' published configurations, without the norms of queries and keys that
#: Qwen3 and Gemma 3 have. Of Gemma 3, the larger ones are text decoders beside a vision
#: tower: "text" says that this is left out.
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


#: More parameters than any model has: a larger number is a slip of the keys.
MOST_PARAMETERS = 1e14


def of_size(parameters: int | float) -> Decoder:
    """A decoder of about this many parameters, in the proportions of Llama 3.

    Feed-forward layers are 3.5 times as wide as the model, keys and values have 1024
    values, the vocabulary has 128256 rows, twice from 4 billion parameters on. Of the
    widths that are multiples of 256, the one whose layers number nearest to a 128th of
    the width.
    """
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{parameters:.3g} parameters are more than any model has, which is fewer"
            f" than {MOST_PARAMETERS:.0e}."
        )
    decoders, smallest = [], math.inf
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
        # A decoder's size is linear in its layers.
        one = decoder.size - dataclasses.replace(decoder, layers=0).size
        layers = round((parameters - decoder.size) / one) + 1
        if layers >= 1:
            decoders.append(dataclasses.replace(decoder, layers=layers))
    if not decoders:
        raise ValueError(
            f"{parameters:.3g} parameters are fewer than the {smallest:.3g} of the"
            " smallest decoder of this family. Smaller models: --module, --checkpoint,"
            " or what_fits with your own parameters."
        )
    return min(decoders, key=lambda x: abs(math.log(128 * x.layers / x.hidden)))


def model_shapes(
    name: str, dtype: DTypeLike = "bfloat16"
) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Shapes of a decoder's parameters, by its name or its size.

    Args:
      name: `"llama3-8b"`, `"gemma2-9b"` and others that the message of a wrong name
        lists, also as `"Llama-3-8B"` or `"meta-llama/Llama-3-8B"`; or a number of
        parameters such as `"8B"`, `"350M"` or `"8e9"`, for a decoder in the proportions
        of Llama 3 with about as many.
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
    decoder = decoder_of(name)
    dtype = floating_dtype("dtype", dtype)
    return dataclasses.replace(decoder, dtype=dtype).shapes()


def decoder_of(name: str) -> Decoder:
    """The decoder of a name or a size, as `model_shapes` takes it."""
    if not isinstance(name, str):
        raise ValueError(f"model {name!r} is no text: pass one such as '8B'.")
    return _named(name) or of_size(_count(name))


def _named(name: str) -> Decoder | None:
    return {_words(known): decoder for known, decoder in DECODERS.items()}.get(
        _words(name)
    )


#: Words of a name that say who trained a model, or for what.
_ASIDES = ("meta", "hf", "base", "instruct", "it", "pt")


def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])
    return tuple(x for x in words if x not in _ASIDES)


def _count(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?)([MBT]?)", text.strip().upper())
    if match is None:
        written = "".join(_words(text))
        longer = [x for x in DECODERS if "".join(_words(x)).startswith(written)]
        close = longer[:2] if written else []
        close = close or difflib.get_close_matches(written, DECODERS, n=2)
        guess = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"model {text!r} is neither a number of parameters, such as '8B' or"
            f" '350M', nor one of {', '.join(DECODERS)}.{guess}"
        )
    count = float(match[1]) * {"": 1, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]
    # Nobody means a model of eight parameters.
    if not match[2] and count < 1e4:
        way_out = f"Did you mean {match[1]}B?" if count else "Pass one such as '8B'."
        raise ValueError(f"model {text!r} would have {count:g} parameters. {way_out}")
    return count


_FORM = "--module names a function as package.module:function"


def module_shapes(name: str) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the parameters that a function makes; nothing is allocated.

    Args:
      name: `"package.module:function"`. The function takes no arguments and returns a
        Flax NNX module; or a Linen module and its example inputs, `(module, *inputs)`;
        or the parameters themselves, as arrays or `ShapeDtypeStruct`s.

    Returns:
      A pytree of `ShapeDtypeStruct`s.

    Raises:
      ValueError: If there is no such function, or it fails, or it returns none.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f"{name!r}: {_FORM}, such as mymodel:make_model.")
    place, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # As `python -m` does, for a console script.
    try:
        make = operator.attrgetter(attribute)(importlib.import_module(place))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {_FORM}, and {error}.") from error
    except (Exception, SystemExit) as error:  # Whatever a module does at its import.
        raise ValueError(f"{name!r}: importing {place} {_failed(error)}") from error
    try:
        params = jax.eval_shape(lambda: _parameters(make()))
    except (Exception, SystemExit) as error:  # Whatever the function does.
        raise ValueError(
            f"{name!r}: calling it without arguments {_failed(error)}"
        ) from error
    if not jax.tree.leaves(params):
        raise ValueError(f"{name!r} returns no parameters.")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _failed(error: BaseException) -> str:
    first, *_ = [*str(error).splitlines(), ""]
    return f"failed with {type(error).__name__}: {first}".rstrip(": ")


def _parameters(model: PyTree) -> PyTree[ArrayLike]:
    if "flax" in sys.modules:  # Or it is no Flax module.
        from flax import linen, nnx

        if isinstance(model, nnx.Module):
            return nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[1])
        module, *inputs = model if isinstance(model, tuple) and model else (model,)
        if isinstance(module, linen.Module):
            return module.init(jax.random.key(0), *inputs)["params"]
    return jax.tree.map(_array, model)


def _array(x: ArrayLike | jax.ShapeDtypeStruct) -> ArrayLike:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.lax.empty(x.shape, x.dtype)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"it returns a {type(x).__name__}, and that is no parameter")
    return x
