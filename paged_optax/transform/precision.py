"""Moments and master weights in float32 for parameters in fewer bits.

Both are Optax transformations around another, that know nothing of paging.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master: The parameters in full precision.
      inner_state: The state of the wrapped transformation.
    """

    master: Any
    inner_state: Any


def in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Computes in float32, whatever the parameters' and gradients' dtype.

    Args:
      inner: The transformation. It sees parameters and gradients in float32.

    Returns:
      The transformation; its updates have the gradients' dtype.
    """

    def init(params: optax.Params) -> Any:
        return inner.init(_wider(params, jnp.float32))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        changed, state = inner.update(
            _wider(updates, jnp.float32),
            state,
            _wider(params, jnp.float32),
            **extra_args,
        )
        return optax.tree.cast_like(changed, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def with_master_weights(
    inner: optax.GradientTransformationExtraArgs, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the parameters in full precision, and moves the given ones after them.

    .. math::
        m \leftarrow m + \mathrm{inner}(g, s, m), \qquad
        u = \mathrm{round}(m) - \theta,

    so that :math:`\theta + u` is the master copy rounded to the parameters' dtype. It
    is computed from the parameters as they are, so that a difference the dtype cannot
    express is made good at the next step.

    Args:
      inner: The transformation. It sees the master copy as its parameters.
      dtype: The dtype of the master copy, of the moments, and of the computation.

    Returns:
      The transformation; its updates have the parameters' dtype.

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018.
    """

    def init(params: optax.Params) -> MasterWeightsState:
        # Parameters that have this dtype already are copied: both will be donated.
        master = jax.tree.map(jnp.copy, _wider(params, dtype))
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_dtype needs the parameters: call"
                " update(updates, state, params)."
            )
        changed, inner_state = inner.update(
            _wider(updates, dtype), state.inner_state, state.master, **extra_args
        )
        master = jax.tree.map(lambda m, u: m + u.astype(m.dtype), state.master, changed)

        def difference(m: jax.Array, p: jax.Array) -> jax.Array:
            return (m.astype(p.dtype).astype(m.dtype) - p.astype(m.dtype)).astype(
                p.dtype
            )

        moved = jax.tree.map(difference, master, params)
        return moved, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class CountedState(NamedTuple):
    """The state of `counted`.

    Attributes:
      step: How many updates there have been.
      inner_state: The state of the wrapped transformation.
    """

    step: Any
    inner_state: Any


def counted(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Counts updates, for stochastic rounding to draw other bits at each.

    Args:
      inner: The transformation.

    Returns:
      The transformation, its state inside a `CountedState`.
    """

    def init(params: optax.Params) -> CountedState:
        return CountedState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CountedState]:
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, CountedState(optax.safe_increment(state.step), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _wider(tree: Any, dtype: Any) -> Any:
    """Casts floating point leaves of fewer bits than `dtype` to it."""

    def cast(x: Any) -> Any:
        fewer = (
            jnp.finfo(x.dtype).bits < jnp.finfo(dtype).bits if floating(x) else False
        )
        return x.astype(dtype) if fewer else x

    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(cast, tree)
