"""Moments and master weights in float32 for parameters in fewer bits.

Each wrapper is an Optax transformation around another, independent of paging.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.validation import check_enabled_bits

#: An update is large if this fraction of it still moves its parameter. At 1, small
#: steps would not add up if a later transformation shrinks them. At 1/2 it would round
#: whole units.
_LARGE = 0.8


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`."""

    master: optax.Params  # in full precision
    inner_state: optax.OptState


def in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Computes in float32, whatever the dtypes of parameters and gradients.

    The updates have the gradients' dtype.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        wide = wider(updates, jnp.float32), state, wider(params, jnp.float32)
        changed, state = inner.update(*wide, **extra_args)
        return optax.tree.cast_like(changed, updates), state

    init = lambda params: inner.init(wider(params, jnp.float32))
    return optax.GradientTransformationExtraArgs(init, update)


def with_master_weights(
    inner: optax.GradientTransformationExtraArgs, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a master copy of the parameters, which the given parameters follow.

    .. math::
        m' = m + \mathrm{inner}(g, s, m), \qquad
        u \approx \mathrm{round}(m') - \theta,

    so that :math:`\theta + u` is the master copy rounded to the parameters' dtype. If
    anything else changes the parameter, the next step first moves the master copy by
    the same amount: a transformation chained after this one, a wrapper around it, a
    restore of weights alone. If no update in the parameters' dtype reaches the rounded
    master copy, as at a change of sign, the master absorbs the difference: at most
    1/128 of the step, for parameters in bfloat16. Moments and computation have the
    master's dtype; updates have the parameters'.

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018.
    """

    def init(params: optax.Params) -> MasterWeightsState:
        check_enabled_bits("master_dtype", dtype)
        # A step donates both: they may not be one array if the dtypes are equal.
        master = jax.tree.map(jnp.copy, wider(params, dtype))
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "master_dtype needs the parameters: call"
                " update(updates, state, params)."
            )
        master = jax.tree.map(current_master, params, state.master)
        changed, inner_state = inner.update(
            wider(updates, dtype), state.inner_state, master, **extra_args
        )
        master = jax.tree.map(lambda m, u: m + u.astype(m.dtype), master, changed)
        towards = lambda p, m: update_towards(widened(p, m.dtype), m, p.dtype)
        moved = jax.tree.map(lambda p, m: towards(p, m).astype(p.dtype), params, master)
        return moved, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def current_master(param: Array, master: Array) -> Array:
    """Returns the master copy of a parameter that may have changed since.

    `master` rounds to the former parameter, and moves by the parameter's change. If the
    moved copy does not round to the parameter, as after a replacement by a much smaller
    number, the parameter itself is the copy.
    """
    if master.dtype == param.dtype:
        return param
    before = rounded(master, param.dtype)
    # XLA would drop the rounding in a comparison of numbers of more bits.
    unsigned = jnp.dtype(f"uint{8 * param.dtype.itemsize}")
    bits, bits_before = (
        lax.bitcast_convert_type(x.astype(param.dtype), unsigned)
        for x in (param, before)
    )
    zeros = (bits | bits_before) << unsigned.type(1) == 0  # of either sign
    x = widened(param, master.dtype)
    moved = x + (master - before)
    moved = jnp.where(rounded(moved, param.dtype) == x, moved, x)
    return jnp.where((bits == bits_before) | zeros, master, moved)


def update_towards(x: Array, master: Array, dtype: DTypeLike) -> Array:
    """Returns the update from a parameter to its master copy, rounded to a dtype.

    It reaches the rounded master copy if any update does. The smallest updates move the
    parameter by a whole unit in its last place: a later transformation then counts each
    unit once, and smaller steps accumulate exactly. If it halves them, none moves the
    parameter. Larger updates are as near to the difference as the dtype allows, so that
    a later transformation rounds them no worse than updates without a master copy. `x`
    is the parameter in the master's dtype, and `dtype` its own.
    """
    target, near = rounded(master, dtype), rounded(master - x, dtype)
    exact = rounded(jnp.where(target == x, 0, target - x), dtype)  # of infinities, 0
    leads = lambda update: rounded(x + update, dtype) == target
    large = rounded(x + _LARGE * near, dtype) != x
    return jnp.where((leads(near) & large) | ~leads(exact), near, exact)


def widened(param: Array, dtype: DTypeLike) -> Array:
    """Converts to a dtype of more bits, without excess bits that XLA may have kept."""
    return rounded(param.astype(dtype), param.dtype)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Rounds to the values of a dtype of fewer bits, without a change of dtype.

    XLA may drop a conversion to fewer bits and back (`xla_allow_excess_precision`), but
    not `lax.reduce_precision`, which flushes denormal numbers to zero and has no
    largest number of eight-bit floats.
    """
    if x.dtype == dtype:
        return x
    info, converted = jnp.finfo(dtype), x.astype(dtype).astype(x.dtype)
    if info.bits < 16:
        return converted
    reduced = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return reduced
    return jnp.where(abs(x) < float(info.tiny), converted, reduced)


class CountedState(NamedTuple):
    """The state of `counted`."""

    step: ArrayLike  # the number of updates
    inner_state: optax.OptState


def counted(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Counts updates, so that stochastic rounding draws new bits at each."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, CountedState(optax.safe_increment(state.step), inner_state)

    init = lambda params: CountedState(jnp.zeros((), jnp.int32), inner.init(params))
    return optax.GradientTransformationExtraArgs(init, update)


def wider(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts floating point leaves of fewer bits than `dtype` to it."""
    bits = lambda dtype: jnp.finfo(dtype).bits
    fewer = lambda x: (
        jnp.issubdtype(x.dtype, jnp.floating) and bits(x.dtype) < bits(dtype)
    )
    return jax.tree.map(lambda x: x.astype(dtype) if fewer(x) else x, tree)
