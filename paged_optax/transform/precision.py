"""Moments and master weights in float32 for parameters in fewer bits.

Each wrapper is an Optax transformation around another, and knows nothing of paging.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master: The parameters in full precision.
      inner_state: The state of the wrapped transformation.
    """

    master: optax.Params
    inner_state: optax.OptState


def in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Computes in float32, whatever the dtypes of parameters and gradients.

    Args:
      inner: The transformation. It sees parameters and gradients in float32.

    Returns:
      The transformation; its updates have the gradients' dtype.
    """

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(wider(params, jnp.float32))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        changed, state = inner.update(
            wider(updates, jnp.float32),
            state,
            wider(params, jnp.float32),
            **extra_args,
        )
        return optax.tree.cast_like(changed, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def with_master_weights(
    inner: optax.GradientTransformationExtraArgs, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a master copy of the parameters, which the given parameters follow.

    .. math::
        m \leftarrow m + \mathrm{inner}(g, s, m), \qquad
        u = \mathrm{round}(m) - \theta,

    so that :math:`\theta + u` is the master copy rounded to the parameters' dtype. The
    update is the difference to the parameters as they are: what it cannot express in
    their dtype, the next step makes up for.

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
        # A step donates both: they may not be one array where the dtypes are equal.
        master = jax.tree.map(jnp.copy, wider(params, dtype))
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_dtype needs the parameters: call"
                " update(updates, state, params)."
            )
        changed, inner_state = inner.update(
            wider(updates, dtype), state.inner_state, state.master, **extra_args
        )
        master = jax.tree.map(lambda m, u: m + u.astype(m.dtype), state.master, changed)

        def difference(m: Array, p: Array) -> Array:
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

    step: ArrayLike
    inner_state: optax.OptState


def counted(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Counts updates, so that stochastic rounding draws other bits at each.

    Args:
      inner: The transformation.

    Returns:
      The transformation, its state inside a `CountedState`.
    """

    def init(params: optax.Params) -> CountedState:
        return CountedState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, CountedState]:
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, CountedState(optax.safe_increment(state.step), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def wider(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts floating point leaves of fewer bits than `dtype` to it."""

    def cast(x: Array) -> Array:
        fewer = (
            jnp.finfo(x.dtype).bits < jnp.finfo(dtype).bits if floating(x) else False
        )
        return x.astype(dtype) if fewer else x

    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(cast, tree)
