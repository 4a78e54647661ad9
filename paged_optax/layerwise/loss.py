"""Losses with and without a weight, and the metrics of a layerwise step."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree


class WeightedLoss(NamedTuple):
    """The sum of a loss, and its weight, such as the number of unmasked tokens.

    An epilogue returns it in place of a mean. With `accumulate=True` the step divides
    the sum of all totals by the sum of all weights, which is the step of the whole
    batch. A mean of means differs if the weights differ, for example in padded or
    masked batches.

    If all weights are zero, the loss is zero, and so are its gradients. The weight is
    data: no gradient goes through it.

    Attributes:
      total: The sum of the losses of all tokens, of shape ().
      weight: Their number, or the sum of their weights, of shape ().

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> def epilogue(rest, x, kept, batch):
      ...     errors = jnp.square(x[:, 0] - batch["y"])
      ...     total = jnp.sum(errors * batch["mask"])
      ...     return po.WeightedLoss(total, batch["mask"].sum())
      >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
      >>> step = po.layerwise_step(
      ...     po.LayerwiseModel(lambda rest, batch: (batch["x"], None),
      ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
      ...     epilogue),
      ...     tx := po.paged_adamw(1e-2),
      ...     accumulate=True,
      ... )
      >>> mask = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
      >>> batch = {"x": jnp.zeros((2, 3, 64)), "y": jnp.eye(2, 3) * 2, "mask": mask}
      >>> workspace = po.GradientWorkspace.allocate(params["layers"])
      >>> *_, output = step(params, tx.init(params), workspace, batch)
      >>> float(output.loss)  # 4 by 4 tokens, and not the mean of 4 / 3 and 0
      1.0
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]


def loss_and_metrics(output: PyTree) -> tuple[ArrayLike | WeightedLoss, PyTree]:
    """Splits an epilogue's output into the loss, and its metrics or None.

    Raises:
      ValueError: If the loss, or its weight, is not one number.
      TypeError: If it has no gradient.
    """
    check_loss("epilogue", output)
    loss, metrics = output if has_metrics(output) else (output, None)
    return loss, metrics


def has_metrics(output: PyTree) -> bool:
    """True if an output has metrics; a `WeightedLoss` is a loss without metrics."""
    return isinstance(output, tuple) and not isinstance(output, WeightedLoss)


def check_loss(function: str, output: PyTree) -> None:
    """Raises if an output has no scalar loss.

    Raises:
      ValueError: If the loss, or its weight, is not one number.
      TypeError: If it has no gradient.
    """
    loss = output
    if has_metrics(output):
        if len(output) != 2:
            raise TypeError(
                f"{function} returns a tuple of {len(output)}: it returns the loss, or"
                " (loss, metrics), of which metrics may be any tree."
            )
        loss = output[0]
    if isinstance(loss, WeightedLoss):
        for name, x in zip(loss._fields, loss, strict=True):
            if jnp.shape(x):
                raise ValueError(
                    f"{function} returns a WeightedLoss whose {name} has shape"
                    f" {jnp.shape(x)}: it is one number, such as"
                    f" {'mask' if name == 'weight' else '(losses * mask)'}.sum()."
                )
    elif not hasattr(loss, "dtype") and not isinstance(loss, float | int):
        raise TypeError(
            f"{function} returns a loss of type {type(loss).__name__}: a loss is one"
            " number, or a WeightedLoss. What else there is comes second, as in"
            " (loss, metrics)."
        )
    elif jnp.shape(loss):
        raise ValueError(
            f"{function} returns a loss of shape {jnp.shape(loss)}: a loss is"
            " one number, such as its mean."
        )
    value = loss.total if isinstance(loss, WeightedLoss) else loss
    if not jnp.issubdtype(dtype := jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"{function} returns a loss of dtype {dtype}: a loss is a floating-point"
            " number, or it has no gradient."
        )


def over(total: Array, weight: Array, last: ArrayLike = True) -> Array:
    """Divides a sum by its weight; without weight, value and gradients are zero.

    Args:
      total: The sum.
      weight: The weight, in the dtype to divide in, or a wider one.
      last: If false, more weight may follow, and a sum without weight stays a sum.
    """
    wide = total.astype(np.promote_types(total.dtype, weight.dtype))
    mean = wide / weight_divisor(weight)
    return jnp.where((weight == 0) & last, jnp.zeros_like(mean), mean)


def weight_divisor(weight: Array) -> Array:
    """The divisor of a sum: its weight, or 1 if it has none yet."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def mean_of(losses: Array | WeightedLoss) -> Array:
    """Averages the losses of micro-batches."""
    if isinstance(losses, WeightedLoss):
        total, weight = losses
        wide = np.promote_types(total.dtype, weight.dtype)  # a sum may exceed float16
        return over(jnp.sum(total, dtype=wide), jnp.sum(weight))
    return jnp.mean(losses) if losses.ndim else losses


class LayerwiseOutput(NamedTuple):
    """Metrics of a layerwise step.

    Attributes:
      loss: The loss, averaged over micro-batches, by their weights if it has any.
      metrics: The epilogue's metrics of each micro-batch, or None.
      gradient_norm: The global norm of the gradients, before any clipping.
    """

    loss: Float[Array, ""]
    metrics: PyTree
    gradient_norm: Float[Array, ""]
