"""Chunks of a vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Integer, PyTree

from paged_optax.backend.platforms import barrier

# Bytes of a chunk's float32 logits, and of its rows of the head's gradient. Half of it
# saves 0.1 GiB for 8192 tokens, but a chunk's part of the head's gradient then fills
# the 132 multiprocessors of an H200 only once.
_BYTES = 128 * 2**20
# With smaller chunks, accumulating the gradients of x dominates.
_LEAST = 2048
# Rows and columns of a TPU's tile: a reshape to blocks of whole tiles is a bitcast.
_TILES = (8, 128)
_MOST_BLOCKS = 64

Carry = TypeVar("Carry", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Division of a vocabulary into chunks.

    The vocabulary is divided into blocks of equal size, and a chunk has entries of each
    block. If a mesh shards the vocabulary, each device then has a part of each chunk. A
    chunk of consecutive entries would belong to one device, and XLA would gather the
    whole head.
    """

    vocab: int
    axis: int  # the head's axis of the vocabulary
    blocks: int  # number of blocks
    size: int  # entries of each block in a chunk

    @staticmethod
    def of(
        vocab: int,
        axis: int,
        tokens: int,
        width: int,
        chunk: int | None,
        one_device: bool = False,
    ) -> "Chunks":
        """Returns chunks of about `chunk` entries.

        On one device the last axis is one block: with two blocks, XLA:TPU copies the
        whole head for each chunk.
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
        """Calls `carry = step(start, size, carry)` for each chunk."""
        block = self.vocab // self.blocks
        turns, rest = divmod(block, self.size)
        if rest:
            # First: after the loop, XLA:GPU would hoist all computation that needs no
            # carry before the loop, and keep its results alive (jax 0.12.0.1).
            carry = step(turns * self.size, rest, carry)
        if turns > 1:
            run = lambda i, carry: step(i * self.size, self.size, carry)
            return lax.fori_loop(0, turns, run, carry)
        return step(0, self.size, carry) if turns else carry

    def entries(self, start: ArrayLike, size: int) -> Integer[Array, " chunk"]:
        """Indices of a chunk's entries in the vocabulary."""
        first = jnp.arange(self.blocks, dtype=jnp.int32) * (self.vocab // self.blocks)
        within = start + jnp.arange(size, dtype=jnp.int32)
        return (first[:, None] + within[None, :]).reshape(-1)

    def take(self, x: Array, axis: int, start: ArrayLike, size: int) -> Array:
        """Reads a chunk of an array along the vocabulary `axis`."""
        cut = lax.dynamic_slice_in_dim(self._in_blocks(x, axis), start, size, axis + 1)
        cut = lax.collapse(cut, axis, axis + 2)
        # XLA:GPU fuses a slice at a constant index with its products. For odd sizes of
        # the blocks' parts it then has no tiling ("No supported config found", jax
        # 0.12.0.1).
        part = size * self.blocks < self.vocab
        return barrier(cut) if part and isinstance(start, int) else cut

    def put(self, to: Array, x: Array, axis: int, start: ArrayLike) -> Array:
        """Writes a chunk of an array along the vocabulary `axis`."""
        return lax.dynamic_update_slice_in_dim(
            self._in_blocks(to, axis), self._in_blocks(x, axis), start, axis + 1
        ).reshape(to.shape)

    def _in_blocks(self, x: Array, axis: int) -> Array:
        divided = self.blocks, x.shape[axis] // self.blocks
        return x.reshape(x.shape[:axis] + divided + x.shape[axis + 1 :])
