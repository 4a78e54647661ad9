"""Master weights in 16 bits: those of a float32 that a bfloat16 parameter lacks.

An Optax transformation around another. It knows nothing of paging.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import BFloat16, Float32, Int16, Int32, PyTree

from paged_optax.transform.precision import rounded, way, widened, wider

#: The bits of -0, and the lowest int32.
_LOWEST = np.int32(-(2**31))


class MasterRemaindersState(NamedTuple):
    """The state of `with_master_remainders`.

    Attributes:
      remainder: For each parameter in bfloat16 what its master copy has more, in int16;
        `optax.MaskedNode` for others, which are their own masters.
      inner_state: The state of the wrapped transformation.
    """

    remainder: PyTree
    inner_state: optax.OptState


def with_master_remainders(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a float32 master copy of bfloat16 parameters in 16 bits beside them.

    .. math::
        m = \theta \oplus r, \qquad
        m' = m + \mathrm{inner}(g, s, m), \qquad
        u \approx \mathrm{round}(m') - \theta, \qquad
        r' = m' \ominus \mathrm{round}(\theta + u).

    Here :math:`\ominus` counts the float32 numbers between two of them, and
    :math:`\oplus` goes so many further. Two neighbouring bfloat16 numbers are 65,536
    float32 numbers apart. So 16 bits tell apart all masters that round to one
    parameter. Two kinds of masters are not kept to the last bit. One that is exactly
    between two bfloat16 numbers may be kept as the float32 number beside it. And where
    no update in bfloat16 leads to the rounded master, as where a sign changes, the
    update leads near it, and the master is kept as near as 16 bits reach: within 1/256
    of the step. (Within 1/64 if one program makes several steps of parameters on the
    device, as an unrolled `lax.scan` does: XLA then leaves out roundings to bfloat16 in
    between, `xla_allow_excess_precision`.)

    Half of a master is its parameter. So what else changes the parameter changes its
    master: a transformation chained after this one, a wrapper around it, a restore of
    weights alone. The remainder stays, less than a rounding of the parameter.

    Args:
      inner: The transformation. It sees the master copy as its parameters.

    Returns:
      The transformation; its updates have the parameters' dtype.

    References:
      Kalamkar et al., `Optimizing Deep Learning Recommender Systems' Training on CPU
      Cluster Architectures <https://arxiv.org/abs/2005.04680>`_, 2020, which splits a
      float32 number in two; NVIDIA Apex calls it `store_param_remainders`.
    """

    def init(params: optax.Params) -> MasterRemaindersState:
        def zeros(p: Array) -> Array | optax.MaskedNode:
            if p.dtype == jnp.bfloat16:
                return jnp.zeros(p.shape, jnp.int16)
            if wider(p, jnp.float32) is not p:
                raise ValueError(
                    f"master_remainders=True, and a parameter is {p.dtype}: 16 bits"
                    " more complete bfloat16 alone to float32. Use parameters in"
                    " bfloat16, or master_dtype='float32' alone."
                )
            return optax.MaskedNode()

        masters = wider(params, jnp.float32)
        return MasterRemaindersState(jax.tree.map(zeros, params), inner.init(masters))

    def update(
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, MasterRemaindersState]:
        if params is None:
            raise ValueError(
                "master_remainders needs the parameters: call"
                " update(updates, state, params)."
            )
        masters = jax.tree.map(master_of, params, state.remainder)
        changed, inner_state = inner.update(
            wider(updates, jnp.float32), state.inner_state, masters, **extra_args
        )

        def difference(p: Array, m: Array, u: Array, r: PyTree) -> Array:
            if not _is_split(r):
                return u.astype(p.dtype)
            return way(_wide(p), m + u.astype(m.dtype), p.dtype).astype(p.dtype)

        def remainder(p: Array, m: Array, u: Array, r: PyTree, moved: Array) -> PyTree:
            if not _is_split(r):
                return r
            new = rounded(_wide(p) + _wide(moved), p.dtype)
            return _between(new, m + u.astype(m.dtype))

        trees = params, masters, changed, state.remainder
        moved = jax.tree.map(difference, *trees)
        kept = jax.tree.map(remainder, *trees, moved)
        return moved, MasterRemaindersState(kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_split(remainder: PyTree) -> bool:
    """Whether a parameter is half of its master, and not all of it."""
    return bool(jax.tree.leaves(remainder))


def master_of(parameter: Array, remainder: PyTree) -> Array:
    """The master copy of a parameter, of both its halves.

    Args:
      parameter: The parameter.
      remainder: What its master has more, in int16, or a tree without an array.

    Returns:
      The master copy in float32.

    Raises:
      ValueError: If the parameter had another dtype when its state was made.
    """
    split = _is_split(remainder)
    if split != (parameter.dtype == jnp.bfloat16):
        raise ValueError(
            f"a parameter is {parameter.dtype}, and the state has"
            f" {'a' if split else 'no'} remainder of its master, which bfloat16 alone"
            " has: pass the parameters in the dtype that they had at init, or make the"
            " state anew."
        )
    return _further(_wide(parameter), remainder) if split else parameter


def _wide(parameter: BFloat16[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """A bfloat16 number in float32."""
    return widened(parameter, jnp.float32)


def _position(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The position of a float32 number among all of them; that of 0 is 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Bits of negative numbers count away from those of -0, which has the place of 0.
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _further(
    x: Float32[Array, "*shape"], count: Int16[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The float32 number that is `count` numbers above `x`."""
    position = _position(x) + count.astype(jnp.int32)
    bits = jnp.where(position < 0, _LOWEST - position, position)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _between(
    x: Float32[Array, "*shape"], y: Float32[Array, "*shape"]
) -> Int16[Array, "*shape"]:
    """How many float32 numbers above `x` the number `y` is, as near as int16 tells."""
    # As where a sign changes: the master is then as near as 16 bits reach.
    count = jnp.clip(_position(y) - _position(x), -(2**15), 2**15 - 1)
    return count.astype(jnp.int16)
