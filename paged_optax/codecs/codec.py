"""What a codec is: the protocol that the engine calls once a page.

A new codec has the methods of `Codec`, in a file beside `dynamic_int8` or as a class in
`floats`. An entry in `paged_optax.codecs.registry` gives it a name; a user's own is
passed as an object, `paged(..., codec=...)`. How its codes lie in memory, `layout`
decides by `Codec.stored`: they have the moment's shape, or are pairs along its last
axis. Those of fewer bits than eight say so by an attribute, `bits`.
"""

import math
from typing import (
    TYPE_CHECKING,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float32, PyTree, UInt32

Leaf = TypeVar("Leaf")


if TYPE_CHECKING:

    class Quantized(NamedTuple, Generic[Leaf]):
        """A moment stored in blocks that share a scale."""

        codes: Leaf
        scales: Leaf

else:
    # No generic at run time, for beartype 0.23.1 checks no generic named tuple.

    class Quantized(NamedTuple):
        """A moment stored in blocks that share a scale.

        In a state the codes are in a field whose name tells how to read them: see
        `paged_optax.codecs.identity`. `codes` and `scales` read any.

        Attributes:
          codes: One code a value, in the moment's own shape; two 4-bit codes a byte.
          scales: One float32 scale a block, in the order of the flattened moment.
        """

        codes: PyTree
        scales: PyTree


class Noise(NamedTuple):
    """What stochastic rounding draws its bits from.

    The bits of a value are a function of the two words and of the value's own
    offset in its moment, so that they do not depend on how it was paged.

    Attributes:
      words: Random words, of one moment at one step.
      start: The offset in the flattened moment of the page's first value.
      strides: For each axis of the page how far apart in the flattened moment its
        entries are; None: the page is a range of it.
    """

    words: UInt32[Array, "2"]
    start: UInt32[Array, ""]
    strides: tuple[int, ...] | None = None


@runtime_checkable
class Codec(Protocol):
    """How a moment is stored.

    A codec is a frozen dataclass: it is hashed as a static argument of `jit`. Its
    functions are pure, and a page of whole blocks is stored as the whole moment
    would be: encoding page by page and concatenating changes no bit.

    A state names the codec that made its codes: by the codec's `name`, a string, or by
    the name of its class. Give another name to codes that mean other numbers.

    A second moment that is not zero must not decode to zero, nor a finite value to
    infinity. Where the second moment vanishes and the first does not, a step is
    hundreds of learning rates. `signed` is False for second moments alone. A first
    update shows none of that, because a page is encoded after it.

    Every value of a block that holds NaN or an infinity decodes to NaN or infinity, so
    that a diverged loss is seen and not trained on. Other blocks keep their values.
    `paged_optax.apply_if_finite` skips such steps, and no moment ever holds one.
    """

    @property
    def block(self) -> int:
        """Consecutive values of the flattened moment that share a scale."""
        ...

    @property
    def signed(self) -> bool:
        """Whether the moment may have negative values; False: none is expected."""
        ...

    @property
    def draws(self) -> bool:
        """Whether `encode` needs noise.

        The engine draws it by the codec's `seed`, an int, or by 0 where it has none.
        """
        ...

    def stored(self, shape: tuple[int, ...]) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes in which a moment, or page, of this shape is stored."""
        ...

    def encode(
        self, page: Float32[Array, "*shape"], noise: Noise | None = None
    ) -> PyTree[Array]:
        """Stores a page.

        Args:
          page: The values, a whole number of blocks unless the moment ends here.
          noise: Required where `draws`, unused elsewhere.

        Returns:
          Arrays of the shapes and dtypes that `stored` states.
        """
        ...

    def decode(
        self, stored: PyTree[Array], shape: tuple[int, ...]
    ) -> Float32[Array, "*shape"]:
        """Gives a page back, in float32.

        Args:
          stored: What `encode` returned.
          shape: The page's shape.
        """
        ...


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart in a flattened array the entries of each axis are."""
    return tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])


def draw(key: Array, step: ArrayLike, start: ArrayLike = 0) -> Noise:
    """The noise of one page of a moment, which has the key.

    `start` is the offset in the flattened moment of the page's first value. Nothing
    else differs between pages of one moment.
    """
    # Each step has its own words, and each moment its own key.
    words = jax.random.bits(jax.random.fold_in(key, step), (2,), "uint32")
    return Noise(words, jnp.asarray(start, jnp.uint32))
