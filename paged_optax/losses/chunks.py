"""A vocabulary, a chunk at a time."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Integer, PyTree

from paged_optax.backend.platforms import barrier

# Float32 logits of one chunk, and its rows of the head's gradient. Half of it saves 0.1
# GiB of 8192 tokens, but an H200 has 132 multiprocessors, which a chunk's part of the
# head's gradient then fills once.
_BYTES = 128 * 2**20
# With fewer entries a chunk adds to the gradients of x too often for what it computes.
_LEAST = 2048
# Rows and columns of a TPU's tile: an array in blocks of whole tiles is no copy.
_TILES = (8, 128)
_MOST_BLOCKS = 64

Carry = TypeVar("Carry", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A vocabulary in chunks.

    It is divided into blocks of equal size, and a chunk has entries of each block. If a
    mesh divides the vocabulary, each device then has a part of each chunk. A chunk of
    consecutive entries would be one device's, and XLA would gather the whole head.

    Attributes:
      vocab: Its size.
      axis: The head's axis that has it.
      blocks: How many blocks.
      size: The entries of each block that a chunk has.
    """

    vocab: int
    axis: int
    blocks: int
    size: int

    @staticmethod
    def of(
        vocab: int,
        axis: int,
        tokens: int,
        width: int,
        chunk: int | None,
        one_device: bool = False,
    ) -> "Chunks":
        """Chunks of about as many entries as asked for.

        On one device the last axis is one block: for two, XLA:TPU copies the whole head
        for each chunk.
        """
        if chunk is None:
            chunk = max(_LEAST, _BYTES // (4 * max(tokens, width, 1)))
        size, tile, blocks = max(1, min(chunk, vocab)), _TILES[axis], 1
        most = 1 if one_device and axis == 1 else _MOST_BLOCKS
        while blocks < most and 2 * blocks * tile <= size:
            if vocab % (2 * blocks * tile):
                break
            blocks *= 2
        size //= blocks
        return Chunks(vocab, axis, blocks, size - size % tile if size > tile else size)

    def fold(self, step: Callable[..., Carry], carry: Carry) -> Carry:
        """Calls `step(start, size, carry)` for each chunk, which returns the carry."""
        block = self.vocab // self.blocks
        turns, rest = divmod(block, self.size)
        if rest:
            # First: after the loop, XLA:GPU would compute all of it that needs no carry
            # before the loop, and hold it meanwhile (jax 0.12.0.1).
            carry = step(turns * self.size, rest, carry)
        if turns > 1:
            run = lambda i, carry: step(i * self.size, self.size, carry)
            return lax.fori_loop(0, turns, run, carry)
        return step(0, self.size, carry) if turns else carry

    def entries(self, start: ArrayLike, size: int) -> Integer[Array, " chunk"]:
        """A chunk's entries of the vocabulary."""
        first = jnp.arange(self.blocks, dtype=jnp.int32) * (self.vocab // self.blocks)
        within = start + jnp.arange(size, dtype=jnp.int32)
        return (first[:, None] + within[None, :]).reshape(-1)

    def take(self, x: Array, axis: int, start: ArrayLike, size: int) -> Array:
        """A chunk of an array whose `axis` is the vocabulary."""
        cut = lax.dynamic_slice_in_dim(self._in_blocks(x, axis), start, size, axis + 1)
        cut = lax.collapse(cut, axis, axis + 2)
        # XLA:GPU fuses a slice at a constant place with its products. If the blocks'
        # parts have odd sizes, it then finds no tiling ("No supported config found",
        # jax 0.12.0.1).
        part = size * self.blocks < self.vocab
        return barrier(cut) if part and isinstance(start, int) else cut

    def put(self, to: Array, x: Array, axis: int, start: ArrayLike) -> Array:
        """The array with this chunk in its place."""
        return lax.dynamic_update_slice_in_dim(
            self._in_blocks(to, axis), self._in_blocks(x, axis), start, axis + 1
        ).reshape(to.shape)

    def _in_blocks(self, x: Array, axis: int) -> Array:
        divided = self.blocks, x.shape[axis] // self.blocks
        return x.reshape(x.shape[:axis] + divided + x.shape[axis + 1 :])
