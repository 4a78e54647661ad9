"""Cross-entropy of a linear layer that never materializes its logits."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Integer, PyTree

from paged_optax.backend.platforms import barrier
from paged_optax.backend.types import (
    on_one_device,
    varying,
    varying_axes,
    with_automatic_axes,
)

# Bytes of a chunk's float32 logits, and of its rows of the head's gradient. With half,
# the latter would fill the 132 multiprocessors of an H200 only once.
_BYTES = 128 * 2**20
_LEAST = 2048
# Rows and columns of a TPU's tile: blocks of whole tiles need no copy.
_TILES = (8, 128)
_MOST_BLOCKS = 64

_Axes = tuple[tuple[int, ...], tuple[int, ...]]
#: Per token the largest logit, the sum of exponentials, and the label's logit.
_Sums = tuple[Array, Array, Array]
Carry = TypeVar("Carry", bound=PyTree)


def linear_cross_entropy(
    x: Float[Array, "*tokens width"],
    head: Float[Array, "vocab width"] | Float[Array, "width vocab"],
    labels: Integer[Array, "*tokens"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    vocab_axis: Literal[0, 1] = 0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Float[Array, "*tokens"]:
    r"""Softmax cross-entropy of a linear layer, without its logits in memory.

    The losses equal `optax.softmax_cross_entropy_with_integer_labels(x @ head.T,
    labels)`, one for each token:

    .. math::
        \ell_t = \log \sum_v e^{z_{tv}} - z_{t y_t} + c \Bigl(\log \sum_v
        e^{z_{tv}}\Bigr)^2, \qquad
        z = s \tanh \frac{x W^\top + b}{s},

    with labels :math:`y`, `soft_cap` :math:`s` (no tanh if None) and `z_loss`
    :math:`c`. Only one chunk of the vocabulary has its logits :math:`z` in memory, in
    float32. The backward pass recomputes them, and writes the chunk's rows of the
    head's gradient once, in the head's dtype.

    MiB of device memory for loss and gradients, without arguments and results, for 8192
    tokens, width 2560, a vocabulary of 151,936, and bfloat16, from XLA's buffer
    assignment (`tests/losses/test_linear_cross_entropy.py` bounds it):

    | | H200 | TPU v5e |
    | --- | --- | --- |
    | Optax, all logits | 7122 | 7122 |
    | `linear_cross_entropy` | 272 | 143 |

    The logits are computed twice: four products of tokens, width and vocabulary instead
    of three, or three instead of two with a frozen head. With `chunk=vocab`, XLA:GPU
    computes them once, and keeps them for the backward pass.

    On a mesh of 2, 4, 8 and up to 64 devices that shard the head by the vocabulary, all
    work on each chunk, and none gathers more of the head than one chunk. Each must have
    a multiple of 8 entries of the vocabulary, or of 128 with `vocab_axis=1`.

    Args:
      x: The last layer's output, with all batch axes rather than under `jax.vmap`.
      head: The output matrix: `[vocab, width]` as in an embedding, tied or not, or
        `[width, vocab]` with `vocab_axis=1` as in Flax's `Dense` and `Linear`.
      labels: The token's index in the vocabulary. A negative label, such as PyTorch's
        -100, has loss 0 and no gradient.
      bias: Added to the logits, or None.
      vocab_axis: The head's axis of the vocabulary.
      soft_cap: The bound of the logits' absolute values, such as 30.0 in Gemma 2.
      z_loss: The weight of the squared log-sum-exp, such as 1e-4 in PaLM.
      chunk: The maximum entries of a chunk. None: 128 MiB of logits, or of the head's
        rows in float32, and at least 2048 entries.

    Returns:
      The tokens' losses in float32, or in float64 if `x` or `head` is float64. The loss
      of a label of `vocab` or more is NaN.

    Raises:
      ValueError: If there is not one label for each token.

    Example:
      >>> import jax, jax.numpy as jnp, paged_optax as po
      >>> x, head = jnp.ones((2, 3, 8)), jnp.eye(100, 8)
      >>> labels = jnp.array([[0, 1, 2], [50, 60, -100]])
      >>> losses = po.linear_cross_entropy(x, head, labels)
      >>> losses.shape, float(losses[1, 2])
      ((2, 3), 0.0)
      >>> mean = lambda head: po.linear_cross_entropy(x, head, labels).mean()
      >>> jax.grad(mean)(head).shape
      (100, 8)

    References:
      Wijmans et al., `Cut Your Losses in Large-Vocabulary Language Models
      <https://arxiv.org/abs/2411.09009>`_, 2024, a CUDA kernel;
      Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_, 2022 (z-loss);
      Gemma Team, `Gemma 2 <https://arxiv.org/abs/2408.00118>`_, 2024 (soft caps).
    """
    x, head = jnp.asarray(x), jnp.asarray(head)
    bias = None if bias is None else jnp.asarray(bias)
    if not isinstance(labels, Array):
        labels = np.asarray(labels)  # without x64, JAX would wrap what has 64 bits
    if labels.shape != x.shape[:-1]:  # would be broadcast
        raise ValueError(
            f"labels has shape {labels.shape} and x {x.shape}: there is one label for"
            f" each token, in an array of shape {x.shape[:-1]}."
        )
    vocab, width = head.shape[vocab_axis], head.shape[1 - vocab_axis]
    # A trace by shapes, as in `split_layers`, may run on a mesh.
    one = jax.device_count() == 1 and on_one_device(head)
    chunks = Chunks.of(vocab, vocab_axis, labels.size, width, chunk, one)
    # Clipped in the labels' dtype, which may not hold `vocab`: a cast would wrap.
    bounds = jnp.iinfo(labels.dtype)
    labels = labels.clip(max(bounds.min, -1), min(bounds.max, vocab))
    labels = jnp.asarray(labels, jnp.int32)

    def losses(x: Array, head: Array, labels: Array, bias: Array | None) -> Array:
        # The axes over which cotangents are summed must vary outside `_scores`.
        operands = _Inputs(x, head, bias), labels
        operands = varying(operands, varying_axes(operands))
        label, total = _scores(_ChunkedHead(chunks, soft_cap), *operands)
        loss = total - label
        if z_loss:
            loss += z_loss * jnp.square(total)
        loss = jnp.where(labels < chunks.vocab, loss, jnp.nan)
        return jnp.where(labels < 0, 0.0, loss)

    return with_automatic_axes(losses, (x, head, labels, bias), labels)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A vocabulary in chunks.

    A chunk has `size` entries of each of `blocks` equal blocks, so that each device has
    a part of each chunk if a mesh shards the vocabulary, the head's `axis`. XLA would
    gather the whole head for chunks of consecutive entries.
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
        """Returns chunks of at most about `chunk` entries.

        On one device the last axis is one block: with two, XLA:TPU copies the whole
        head for each chunk.
        """
        if chunk is None:
            chunk = max(_LEAST, _BYTES // (4 * max(tokens, width, 1)))
        size, tile, blocks = max(1, min(chunk, vocab)), _TILES[axis], 1
        maximum = 1 if one_device and axis == 1 else _MOST_BLOCKS
        while blocks < maximum and 2 * blocks * tile <= size:
            if vocab % (2 * blocks * tile):
                break
            blocks *= 2
        size //= blocks
        return Chunks(vocab, axis, blocks, size - size % tile if size > tile else size)

    def fold(self, step: Callable[..., Carry], carry: Carry) -> Carry:
        """Folds `step(start, size, carry)` over the chunks."""
        block = self.vocab // self.blocks
        iterations, rest = divmod(block, self.size)
        if rest:
            # First: XLA:GPU would hoist it before the loop (jax 0.12.0.1).
            carry = step(iterations * self.size, rest, carry)
        if iterations > 1:
            run = lambda i, carry: step(i * self.size, self.size, carry)
            return lax.fori_loop(0, iterations, run, carry)
        return step(0, self.size, carry) if iterations else carry

    def entries(self, start: ArrayLike, size: int) -> Integer[Array, " chunk"]:
        """Returns a chunk's entries of the vocabulary."""
        first = jnp.arange(self.blocks, dtype=jnp.int32) * (self.vocab // self.blocks)
        within = start + jnp.arange(size, dtype=jnp.int32)
        return (first[:, None] + within[None, :]).reshape(-1)

    def take(self, x: Array, axis: int, start: ArrayLike, size: int) -> Array:
        """Returns a chunk of an array along its axis of the vocabulary."""
        cut = lax.dynamic_slice_in_dim(self._in_blocks(x, axis), start, size, axis + 1)
        cut = lax.collapse(cut, axis, axis + 2)
        # XLA:GPU fuses a slice at a constant index with its products, and finds no
        # tiling for odd sizes ("No supported config found", jax 0.12.0.1).
        part = size * self.blocks < self.vocab
        return barrier(cut) if part and isinstance(start, int) else cut

    def put(self, to: Array, x: Array, axis: int, start: ArrayLike) -> Array:
        """Writes a chunk of an array."""
        return lax.dynamic_update_slice_in_dim(
            self._in_blocks(to, axis), self._in_blocks(x, axis), start, axis + 1
        ).reshape(to.shape)

    def _in_blocks(self, x: Array, axis: int) -> Array:
        divided = self.blocks, x.shape[axis] // self.blocks
        return x.reshape(x.shape[:axis] + divided + x.shape[axis + 1 :])


class _Inputs(NamedTuple):
    x: Array
    head: Array
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class _ChunkedHead:
    """A linear layer, evaluated by chunks of the vocabulary."""

    chunks: Chunks
    soft_cap: float | None

    def logits(
        self, inputs: _Inputs, start: ArrayLike, size: int
    ) -> tuple[Array, Array]:
        """Returns the logits of a chunk, and its part of the output matrix."""
        last, axis = inputs.x.ndim - 1, self.chunks.axis
        weights = self.chunks.take(inputs.head, axis, start, size)
        logits = _product(inputs, inputs.x, weights, ((last,), (1 - axis,)))
        if inputs.bias is not None:
            bias = self.chunks.take(inputs.bias, 0, start, size).astype(logits.dtype)
            logits = logits + jnp.expand_dims(bias, range(last))
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits, weights

    def is_label(self, labels: Array, start: ArrayLike, size: int) -> Array:
        entries = self.chunks.entries(start, size)
        return labels[..., None] == jnp.expand_dims(entries, range(labels.ndim))


def _dtypes(inputs: _Inputs) -> tuple[np.dtype, np.dtype]:
    narrow = np.dtype(jnp.promote_types(inputs.x.dtype, inputs.head.dtype))
    return narrow, np.dtype(jnp.promote_types(narrow, jnp.float32))


def _product(inputs: _Inputs, left: Array, right: Array, over: _Axes) -> Array:
    narrow, wide = _dtypes(inputs)
    return lax.dot_general(
        left.astype(narrow),
        right.astype(narrow),
        (over, ((), ())),
        preferred_element_type=wide,
    )


def _zeros(inputs: _Inputs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return varying(jnp.zeros(shape, dtype), varying_axes(inputs.x))


def _scored(head: _ChunkedHead, inputs: _Inputs, labels: Array) -> tuple[Array, Array]:
    """Returns per token the label's logit and the log of the sum of exponentials."""

    def step(start: ArrayLike, size: int, sums: _Sums) -> _Sums:
        last_top, last_total, last_label = sums
        logits, _ = head.logits(inputs, start, size)
        top = jnp.maximum(last_top, jnp.max(logits, axis=-1))
        # A bias of minus infinity may mask all entries of a chunk.
        base = jnp.where(top == -jnp.inf, 0.0, top)
        total = jnp.sum(jnp.exp(logits - base[..., None]), axis=-1)
        total = last_total * jnp.exp(last_top - base) + total
        label = jnp.where(head.is_label(labels, start, size), logits, 0.0)
        return top, total, last_label + jnp.sum(label, axis=-1)

    zeros = _zeros(inputs, labels.shape, _dtypes(inputs)[1])
    top, total, label = head.chunks.fold(step, (zeros - jnp.inf, zeros, zeros))
    return label, top + jnp.log(total)


# JAX's own derivative would store the logits of all chunks.
_scores = jax.custom_vjp(_scored, nondiff_argnums=(0,))
_Scores = tuple[Array, Array]
_Residuals = tuple[_Inputs, Array, Array]


def _forward(
    head: _ChunkedHead, inputs: _Inputs, labels: Array
) -> tuple[_Scores, _Residuals]:
    scores = _scored(head, inputs, labels)
    return scores, (inputs, labels, scores[1])


def _backward(
    head: _ChunkedHead, residuals: _Residuals, cotangents: _Scores
) -> tuple[_Inputs, None]:
    (inputs, labels, total), (by_label, by_total) = residuals, cotangents
    tokens, axis = tuple(range(labels.ndim)), head.chunks.axis

    def step(start: ArrayLike, size: int, carry: _Inputs) -> _Inputs:
        logits, weights = head.logits(inputs, start, size)
        # The softmax times its cotangent, and the label's cotangent.
        by_logit = by_total[..., None] * jnp.exp(logits - total[..., None])
        is_label = head.is_label(labels, start, size)
        by_logit += jnp.where(is_label, by_label[..., None], 0.0)
        if head.soft_cap is not None:
            by_logit *= 1.0 - jnp.square(logits / head.soft_cap)
        # The gradient of x accumulates in float32; the chunk's part of the head's
        # gradient is complete, and rounded here.
        x = carry.x + _product(inputs, by_logit, weights, ((labels.ndim,), (axis,)))
        order = (by_logit, inputs.x) if axis == 0 else (inputs.x, by_logit)
        part = _product(inputs, *order, (tokens, tokens)).astype(carry.head.dtype)
        matrix = head.chunks.put(carry.head, part, axis, start)
        bias = carry.bias
        if bias is not None:
            part = jnp.sum(by_logit, axis=tokens).astype(bias.dtype)
            bias = head.chunks.put(bias, part, 0, start)
        return _Inputs(x, matrix, bias)

    zeros = jax.tree.map(lambda x: _zeros(inputs, x.shape, x.dtype), inputs)
    wide = zeros.x.astype(_dtypes(inputs)[1])
    grads = head.chunks.fold(step, zeros._replace(x=wide))
    return grads._replace(x=grads.x.astype(inputs.x.dtype)), None


_scores.defvjp(_forward, _backward)
