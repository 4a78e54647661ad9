"""Protocol that every codec implements.

A new codec has the methods of `Codec`, in a file of its own or in `floats`, and a name
in `paged_optax.codecs`; a user's own is passed as an object, `paged(...,
codec=...)`. `layout` arranges its codes, of the moment's shape, in memory. A codec of
fewer than eight bits has an attribute `bits`.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float32, PyTree, UInt32


class Quantized(NamedTuple):
    """A moment stored in blocks that share a scale.

    In a state the field of the codes is named after the codec: see
    `paged_optax.codecs.identity`. `codes` and `scales` read any container.

    Attributes:
      codes: A code for each value, in the moment's shape.
      scales: A float32 scale for each block of the flattened moment.
    """

    codes: PyTree
    scales: PyTree


class Noise(NamedTuple):
    """Random words for stochastic rounding.

    The bits of a value depend on these words and on the value's offset in its moment,
    not on the pages.

    Attributes:
      words: Random words of one moment at one step.
      start: The offset of the page's first value in the flattened moment.
      strides: For each axis of the page the distance of its entries in the flattened
        moment; None if the page is a range of it.
    """

    words: UInt32[Array, "2"]
    start: UInt32[Array, ""]
    strides: tuple[int, ...] | None = None


@runtime_checkable
class Codec(Protocol):
    """Storage of a moment.

    A codec is a frozen dataclass with pure functions: it is a static argument of `jit`.
    A page of whole blocks is stored as in the whole moment, so that encoding by pages
    changes no bit.

    A state names the codec of its codes by the codec's `name`, a string, or by its
    class. Codecs whose codes stand for other numbers need another name.

    A nonzero second moment must not decode to zero, nor a finite value to infinity:
    where the second moment vanishes and the first does not, a step is hundreds of
    learning rates. A first update does not show this, because a page is encoded after
    its use. `signed` is False for second moments only.

    All values of a block with NaN or an infinity decode to NaN or infinity, so that a
    diverged loss is noticed. Other blocks keep their values.
    `paged_optax.apply_if_finite` skips such steps.
    """

    @property
    def block(self) -> int:
        """Consecutive values of the flattened moment that share a scale."""
        ...

    @property
    def signed(self) -> bool:
        """True if the moment may have negative values."""
        ...

    @property
    def draws(self) -> bool:
        """True if `encode` needs noise.

        The engine draws it from the codec's `seed`, an int, by default 0.
        """
        ...

    def stored(self, shape: tuple[int, ...]) -> PyTree[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes in which a moment, or page, is stored."""
        ...

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> PyTree[Array]:
        """Stores a page.

        Args:
          page: The values: whole blocks, unless the moment ends here.
          noise: Required if `draws`.

        Returns:
          Arrays of the shapes and dtypes of `stored`.
        """
        ...

    def decode(
        self, stored: PyTree[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Returns a page in float32.

        Args:
          stored: The result of `encode`.
          shape: The page's shape.
        """
        ...


def quantized_types(shape: tuple[int, ...], block: int, dtype: DTypeLike) -> Quantized:
    """Returns the types of codes, and of a float32 scale for each block."""
    # The last block may be incomplete.
    scales = jax.ShapeDtypeStruct((-(-math.prod(shape) // block),), jnp.float32)
    return Quantized(jax.ShapeDtypeStruct(shape, dtype), scales)


def get_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns for each axis the distance of its entries in the flattened array."""
    return tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])


def draw(key: Array, step: ArrayLike, start: ArrayLike = 0) -> Noise:
    """Returns the noise of a page, by its moment's key, at one step."""
    words = jax.random.bits(jax.random.fold_in(key, step), (2,), "uint32")
    return Noise(words, jnp.asarray(start, jnp.uint32))
