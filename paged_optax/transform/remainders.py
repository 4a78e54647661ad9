"""Master weights in 16 or 8 bits, which complete a bfloat16 parameter to float32.

An Optax transformation around another, independent of paging.
"""

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float32, Int, Int32, PyTree

from paged_optax.transform.precision import (
    current_master,
    rounded,
    update_towards,
    widened,
    wider,
)

#: The bits of -0, and the lowest int32.
_LOWEST = np.int32(-(2**31))


class MasterRemaindersState(NamedTuple):
    """The state of `with_master_remainders`."""

    # For each bfloat16 parameter the distance to its master copy, in int16;
    # `optax.MaskedNode` for others, which are their own masters.
    remainder: PyTree
    inner_state: optax.OptState


class MasterRemaindersInt8State(NamedTuple):
    """The state of `with_master_remainders` in 8 bits.

    Its field has another name, because a restore would cast int8 to int16 or back.
    """

    remainder_int8: PyTree  # of matrices in int8, of vectors in int16
    inner_state: optax.OptState


def with_master_remainders(
    inner: optax.GradientTransformationExtraArgs, dtype: DTypeLike = jnp.int16
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a float32 master copy of bfloat16 parameters in 16 or 8 bits each.

    .. math::
        m = \theta \oplus r, \qquad
        m' = m + \mathrm{inner}(g, s, m), \qquad
        u \approx \mathrm{round}(m') - \theta, \qquad
        r' = m' \ominus \mathrm{round}(\theta + u).

    Here :math:`\ominus` counts the float32 numbers between two of them, and
    :math:`\oplus` adds such a count. Neighbouring bfloat16 numbers are 65,536 float32
    numbers apart: 16 bits distinguish all masters that round to one parameter. Two
    kinds of masters are not exact to the last bit. A master midway between two bfloat16
    numbers may become the neighbouring float32 number. If no update in bfloat16 reaches
    the rounded master, as at a change of sign, the update comes near it, and the master
    is as near as 16 bits reach: within 1/256 of the step. (Within 1/64 if one program
    makes several steps of parameters on the device, such as an unrolled `lax.scan`: XLA
    then drops roundings to bfloat16 in between, `xla_allow_excess_precision`.)

    In 8 bits the count is rounded to the nearest multiple of 256: a master has 16
    significant bits. A step of less than 2^-17 of a parameter moves no master, and one
    of less than 2^-14 is rounded by up to a sixteenth or more, each time alike; weight
    decay where no gradient is, too. Vectors keep 16 bits.

    The parameter is half of its master. Any other change of the parameter changes the
    master too: a transformation chained after this one, a wrapper around it, a restore
    of weights alone. The remainder stays, and is less than a rounding of the parameter.
    `dtype`, int16 or int8, is the one of matrices' remainders.

    References:
      Kalamkar et al., `Optimizing Deep Learning Recommender Systems' Training on CPU
      Cluster Architectures <https://arxiv.org/abs/2005.04680>`_, 2020, which splits a
      float32 number in two; NVIDIA Apex calls it `store_param_remainders`.
    """
    in_int8 = jnp.dtype(dtype) == jnp.int8
    kind = MasterRemaindersInt8State if in_int8 else MasterRemaindersState
    get = operator.attrgetter(kind._fields[0])

    def init(params: optax.Params) -> PyTree:
        def zeros(p: Array) -> Array | optax.MaskedNode:
            if p.dtype == jnp.bfloat16:
                # Vectors are small, and scales of norms are large beside their steps.
                return jnp.zeros(p.shape, dtype if p.ndim > 1 else jnp.int16)
            if wider(p, jnp.float32) is not p:
                raise ValueError(
                    f"master_remainders complete bfloat16 alone to float32, and a"
                    f" parameter is {p.dtype}: use parameters in bfloat16, or"
                    " master_dtype='float32' alone."
                )
            return optax.MaskedNode()

        masters = wider(params, jnp.float32)
        return kind(jax.tree.map(zeros, params), inner.init(masters))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "master_remainders needs the parameters: call"
                " update(updates, state, params)."
            )
        remainders = get(state)
        masters = jax.tree.map(get_master, params, remainders)
        changed, inner_state = inner.update(
            wider(updates, jnp.float32), state.inner_state, masters, **extra_args
        )

        def difference(p: Array, m: Array, u: Array, r: PyTree) -> Array:
            if not _is_split(r):
                return u.astype(p.dtype)
            moved = update_towards(_wide(p), m + u.astype(m.dtype), p.dtype)
            return moved.astype(p.dtype)

        def remainder(p: Array, m: Array, u: Array, r: PyTree, moved: Array) -> PyTree:
            if not _is_split(r):
                return r
            new = rounded(_wide(p) + _wide(moved), p.dtype)
            return _between(new, m + u.astype(m.dtype), r.dtype)

        trees = params, masters, changed, remainders
        moved = jax.tree.map(difference, *trees)
        kept = jax.tree.map(remainder, *trees, moved)
        return moved, kind(kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_split(remainder: PyTree) -> bool:
    """Returns whether a parameter has a remainder."""
    return bool(jax.tree.leaves(remainder))


def get_master(param: Array, remainder: PyTree) -> Array:
    """Returns the float32 master copy of a parameter.

    A parameter that is its own master has a tree without an array as its remainder.
    """
    split = _is_split(remainder)
    if split != (param.dtype == jnp.bfloat16):
        raise ValueError(
            f"a parameter is {param.dtype}, and the state has"
            f" {'a' if split else 'no'} remainder of its master, which bfloat16 alone"
            " has: pass the parameters in the dtype that they had at init, or make the"
            " state anew."
        )
    return _further(_wide(param), remainder) if split else param


#: Computes a parameter's master from its half in the state, by the half's field.
MASTERS = {
    "master": current_master,
    "remainder": get_master,
    "remainder_int8": get_master,
}


def _wide(param: BFloat16[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return widened(param, jnp.float32)


def _position(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns the rank of a float32 number among all of them; 0 has rank 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Negative numbers count downwards from -0, which has the rank of 0.
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _dropped(dtype: DTypeLike) -> int:
    """Returns the bits of a remainder that a dtype does not store."""
    return 16 - jnp.iinfo(dtype).bits


def _further(
    x: Float32[Array, "*shape"], count: Int[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns the float32 number at a remainder's distance above `x`."""
    numbers = count.astype(jnp.int32)
    if dropped := _dropped(count.dtype):
        numbers = numbers << np.int32(dropped)
    index = _position(x) + numbers
    bits = jnp.where(index < 0, _LOWEST - index, index)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _between(
    x: Float32[Array, "*shape"], y: Float32[Array, "*shape"], dtype: DTypeLike
) -> Int[Array, "*shape"]:
    """Returns the remainder from `x` to `y`, rounded and clipped to a dtype."""
    count = _position(y) - _position(x)
    if dropped := _dropped(dtype):
        count = (count + np.int32(2 ** (dropped - 1))) >> np.int32(dropped)
    minimum = jnp.iinfo(dtype).min
    return jnp.clip(count, minimum, -minimum - 1).astype(dtype)
