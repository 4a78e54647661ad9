"""Cross-entropy of a linear layer that never materializes its logits."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Integer

from paged_optax.backend.memory import on_host
from paged_optax.backend.types import (
    on_one_device,
    varying,
    varying_axes,
    with_automatic_axes,
)
from paged_optax.backend.validation import brief, check_count, check_rate
from paged_optax.losses.chunks import Chunks

_Labels = Array | np.ndarray
_Axes = tuple[tuple[int, ...], tuple[int, ...]]


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
    r"""Softmax cross-entropy of a linear layer that never materializes its logits.

    Computes `optax.softmax_cross_entropy_with_integer_labels(x @ head.T, labels)`, one
    loss for each token:

    .. math::
        \ell_t = \log \sum_v e^{z_{tv}} - z_{t y_t} + c \Bigl(\log \sum_v
        e^{z_{tv}}\Bigr)^2, \qquad
        z = s \tanh \frac{x W^\top + b}{s},

    with labels :math:`y`, `soft_cap` :math:`s` (None omits the tanh) and `z_loss`
    :math:`c`. The logits :math:`z` of one chunk of the vocabulary are in memory, in
    float32. The forward pass accumulates the tokens' sums of exponentials over chunks.
    The backward pass recomputes each chunk's logits. The chunk's rows of the head's
    gradient are then complete, and are written once, in the head's dtype.

    Scratch memory on the device in MiB for loss and gradients, with 8192 tokens of
    width 2560, a vocabulary of 151,936, and bfloat16, from XLA's buffer assignment
    (bounded in `tests/losses/test_linear_cross_entropy.py`):

    | | H200 | TPU v5e |
    | --- | --- | --- |
    | Optax, all logits | 7122 | 7122 |
    | `linear_cross_entropy` | 272 | 143 |

    The logits are computed twice: loss and gradients take four products of tokens,
    width and vocabulary, or three with a frozen head. Optax's loss takes three, or two.

    Any mesh is supported. A chunk has entries from the whole vocabulary, so that all
    devices with a shard of the head compute a part of each chunk. A device gathers at
    most one chunk of the head. This requires 2, 4, 8 and up to 64 devices, each with a
    multiple of 8 entries of the vocabulary, or of 128 with `vocab_axis=1`.

    The caller applies weights and masks, and computes means:

    ```python
    def epilogue(rest, x, kept, batch):
        x = normalise(x, rest["norm"])
        losses = po.linear_cross_entropy(x, rest["embed"], batch["labels"])
        return po.WeightedLoss((losses * batch["mask"]).sum(), batch["mask"].sum())
    ```

    `tokamax.linear_softmax_cross_entropy_loss(x, labels, head, reduction="none")` has a
    TPU kernel of the same losses (release 0.0.17), without soft cap and z-loss. Its
    gradient of a bfloat16 head is float32: the last figure of the table is then 1564.

    Args:
      x: The last layer's output, with all axes of a batch: under `jax.vmap` the head's
        gradient takes memory for each element of the mapped axis.
      head: The output matrix: `[vocab, width]` as in an embedding, tied or not, or
        `[width, vocab]` with `vocab_axis=1` as in Flax's `Dense` and `Linear`.
      labels: The index of each token's label in the vocabulary. A token with a negative
        label, such as PyTorch's -100, has loss 0 and no gradient.
      bias: Biases of the logits, or None.
      vocab_axis: The head's axis of the vocabulary.
      soft_cap: The bound of the logits' absolute values, such as 30.0 in Gemma 2.
      z_loss: The weight of the squared log of the softmax's denominator, such as 1e-4
        in PaLM.
      chunk: Most entries of the vocabulary in a chunk. None: 128 MiB of logits, or of
        the head's rows in float32, and at least 2048 entries.

    Returns:
      The tokens' losses in float32, or in float64 if `x` or `head` is. The loss is NaN
      if the label is `vocab` or more.

    Raises:
      ValueError: If shapes do not match, if an array is in host memory, if
        `vocab_axis` is neither 0 nor 1, or if `soft_cap`, `z_loss` or `chunk` is not
        positive.
      TypeError: If `labels` is not of integers, if `x`, `head` or `bias` is not of
        floating point numbers, if `chunk` is no int, or for a forward-mode derivative.

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
      <https://arxiv.org/abs/2411.09009>`_, 2024, a kernel of it for CUDA;
      `tokamax <https://openxla.org/tokamax/supported_ops>`_;
      Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_, 2022 (z-loss);
      Gemma Team, `Gemma 2 <https://arxiv.org/abs/2408.00118>`_, 2024 (soft caps).
    """
    x, head = jnp.asarray(x), jnp.asarray(head)
    bias = None if bias is None else jnp.asarray(bias)
    if not isinstance(labels, Array):
        labels = np.asarray(labels)  # without x64, JAX would wrap 64-bit labels
    _refuse_other_shapes(x, head, labels, bias, vocab_axis)
    _refuse_other_arrays(x, head, labels, bias)
    for name, rate in (("soft_cap", soft_cap), ("z_loss", z_loss or None)):
        if rate is not None:
            check_rate(name, rate)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    vocab, width = head.shape[vocab_axis], head.shape[1 - vocab_axis]
    # A head traced by its shape, also in `split_layers`, may be sharded when it runs.
    one = jax.device_count() == 1 and on_one_device(head)
    chunks = Chunks.of(vocab, vocab_axis, labels.size, width, chunk, one)
    # Clip in the labels' dtype, which may not hold `vocab`: a cast would wrap.
    bounds = jnp.iinfo(labels.dtype)
    labels = labels.clip(max(bounds.min, -1), min(bounds.max, vocab))
    labels = jnp.asarray(labels, jnp.int32)

    def losses(x: Array, head: Array, labels: Array, bias: Array | None) -> Array:
        # The axes that a cotangent is summed over are then known outside `_scores`.
        operands = _Inputs(x, head, bias), labels
        operands = varying(operands, varying_axes(operands))
        label, total = _scores(_ChunkedHead(chunks, soft_cap), *operands)
        loss = total - label
        if z_loss:
            loss += z_loss * jnp.square(total)
        loss = jnp.where(labels < chunks.vocab, loss, jnp.nan)
        return jnp.where(labels < 0, 0.0, loss)

    try:
        return with_automatic_axes(losses, (x, head, labels, bias), labels)
    except (NotImplementedError, TypeError) as error:
        if "custom_" not in str(error):
            raise
        raise TypeError(
            "linear_cross_entropy has only reverse-mode derivatives: apply jax.grad,"
            " jax.vjp or jax.jacrev before jax.jvp or jax.jacfwd, like jax.hessian,"
            " or use Optax's loss of all logits."
        ) from error


class _Sums(NamedTuple):
    """Running maximum, sum of shifted exponentials, and label's logit per token."""

    top: Array
    total: Array
    label: Array


class _Inputs(NamedTuple):
    """Differentiable inputs of `_scores`, or their gradients."""

    x: Array
    head: Array
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class _ChunkedHead:
    """A linear layer, computed in chunks of the vocabulary."""

    chunks: Chunks
    soft_cap: float | None

    def weights(self, inputs: _Inputs, start: ArrayLike, size: int) -> Array:
        """The chunk's part of the output matrix."""
        return self.chunks.take(inputs.head, self.chunks.axis, start, size)

    def logits(
        self, inputs: _Inputs, weights: Array, start: ArrayLike, size: int
    ) -> Array:
        last = inputs.x.ndim - 1
        logits = _product(inputs, inputs.x, weights, ((last,), (1 - self.chunks.axis,)))
        if inputs.bias is not None:
            bias = self.chunks.take(inputs.bias, 0, start, size).astype(logits.dtype)
            logits = logits + jnp.expand_dims(bias, range(last))
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits

    def is_label(self, labels: Array, start: ArrayLike, size: int) -> Array:
        entries = self.chunks.entries(start, size)
        return labels[..., None] == jnp.expand_dims(entries, range(labels.ndim))


def _dtypes(inputs: _Inputs) -> tuple[np.dtype, np.dtype]:
    """Dtypes of the products' operands, and of their sums."""
    narrow = np.dtype(jnp.promote_types(inputs.x.dtype, inputs.head.dtype))
    return narrow, np.dtype(jnp.promote_types(narrow, jnp.float32))


def _product(inputs: _Inputs, left: Array, right: Array, over: _Axes) -> Array:
    """Product of two arrays, contracted over the axes `over`."""
    narrow, wide = _dtypes(inputs)
    return lax.dot_general(
        left.astype(narrow),
        right.astype(narrow),
        (over, ((), ())),
        preferred_element_type=wide,
    )


def _zeros(inputs: _Inputs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros with the manual axes of `inputs.x`."""
    return varying(jnp.zeros(shape, dtype), varying_axes(inputs.x))


def _scored(head: _ChunkedHead, inputs: _Inputs, labels: Array) -> tuple[Array, Array]:
    """Returns each token's logit of the label, and the log-sum-exp of its logits.

    JAX differentiates the loss of these two.
    """

    def step(start: ArrayLike, size: int, sums: _Sums) -> _Sums:
        logits = head.logits(inputs, head.weights(inputs, start, size), start, size)
        top = jnp.maximum(sums.top, jnp.max(logits, axis=-1))
        # A bias of minus infinity may mask all entries of a chunk.
        base = jnp.where(top == -jnp.inf, 0.0, top)
        total = jnp.sum(jnp.exp(logits - base[..., None]), axis=-1)
        # Rescale the sum so far to the new maximum.
        total = sums.total * jnp.exp(sums.top - base) + total
        label = jnp.where(head.is_label(labels, start, size), logits, 0.0)
        return _Sums(top, total, sums.label + jnp.sum(label, axis=-1))

    zeros = _zeros(inputs, labels.shape, _dtypes(inputs)[1])
    sums = head.chunks.fold(step, _Sums(zeros - jnp.inf, zeros, zeros))
    return sums.label, sums.top + jnp.log(sums.total)


# Custom, because JAX would save all chunks' logits for the backward pass.
_scores = jax.custom_vjp(_scored, nondiff_argnums=(0,))
_Residuals = tuple[_Inputs, Array, Array]


def _forward(
    head: _ChunkedHead, inputs: _Inputs, labels: Array
) -> tuple[tuple[Array, Array], _Residuals]:
    label, total = _scored(head, inputs, labels)
    return (label, total), (inputs, labels, total)


def _backward(
    head: _ChunkedHead, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[_Inputs, None]:
    r"""Computes the gradients.

    With the softmax p and the cotangents of `_scores`, the gradient by the logit of
    entry v is :math:`\bar t p_v`, plus :math:`\bar l` if v is the label.
    """
    (inputs, labels, total), (by_label, by_total) = residuals, cotangents
    tokens, axis = tuple(range(labels.ndim)), head.chunks.axis

    def step(start: ArrayLike, size: int, carry: _Inputs) -> _Inputs:
        weights = head.weights(inputs, start, size)
        logits = head.logits(inputs, weights, start, size)
        by_logit = by_total[..., None] * jnp.exp(logits - total[..., None])
        is_label = head.is_label(labels, start, size)
        by_logit += jnp.where(is_label, by_label[..., None], 0.0)
        if head.soft_cap is not None:
            # Derivative of the tanh, in terms of the capped logit.
            by_logit *= 1.0 - jnp.square(logits / head.soft_cap)
        # The gradient of x is a float32 sum over chunks. The chunk's part of the head's
        # gradient is complete, and is rounded here.
        x = carry.x + _product(inputs, by_logit, weights, ((labels.ndim,), (axis,)))
        # The head is [vocab, width] or [width, vocab].
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
    gradients = head.chunks.fold(step, zeros._replace(x=wide))
    return gradients._replace(x=gradients.x.astype(inputs.x.dtype)), None


_scores.defvjp(_forward, _backward)


def _refuse_other_shapes(
    x: Array,
    head: Array,
    labels: Array | np.ndarray,
    bias: Array | None,
    vocab_axis: int,
) -> None:
    if vocab_axis not in (0, 1):
        raise ValueError(
            f"vocab_axis={brief(vocab_axis)}: pass 0 for a head of [vocab, width], or 1"
            " for one of [width, vocab]."
        )
    if head.ndim != 2:
        raise ValueError(
            f"head has shape {head.shape}: pass a matrix, [vocab, width], or"
            " [width, vocab] with vocab_axis=1."
        )
    vocab, width = head.shape[vocab_axis], head.shape[1 - vocab_axis]
    if x.shape[-1:] != (width,):
        other = f" Pass vocab_axis={1 - vocab_axis}." * (x.shape[-1:] == (vocab,))
        raise ValueError(
            f"x has shape {x.shape} and head {head.shape}, whose vocab_axis is"
            f" {vocab_axis}: the other axis of head must be as long as the last one of"
            f" x.{other}"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels has shape {labels.shape} and x {x.shape}: there is one label for"
            f" each token, in an array of shape {x.shape[:-1]}."
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(
            f"bias has shape {bias.shape} and head {head.shape}: there is one number"
            f" for each of the {vocab} entries of the vocabulary."
        )


def _refuse_other_arrays(
    x: Array, head: Array, labels: _Labels, bias: Array | None
) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels is of dtype {labels.dtype}: a label is the number of an entry of"
            " the vocabulary, an int."
        )
    floats = {"x": x, "head": head} | ({} if bias is None else {"bias": bias})
    for name, value in {"labels": labels, **floats}.items():
        if name in floats and not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name} is of dtype {value.dtype}: pass floating point numbers."
            )
        if on_host(value):
            raise ValueError(
                f"{name} is in host memory, where nothing is computed: pass"
                f" jax.device_put({name}, jax.memory.Space.Device)."
            )
