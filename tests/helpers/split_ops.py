"""Where a random layer is, and its equations that need no weights, of one shape."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name


class Sizes(NamedTuple):
    """Of a random model: axes of its batch and of its weights."""

    batch: int
    time: int
    width: int
    hidden: int
    words: int
    layers: int


@dataclasses.dataclass
class Place:
    """Where a layer is, and what it sees besides its input."""

    sizes: Sizes  # the model's
    number: int | Array  # the layer's number: a Python int, or traced within a scan
    kind: int  # which of two kinds the layer is of, 0 or 1
    mask: str  # how attention is masked
    #: Where rotary tables are made: "before" the layers, in "each", or None.
    rotary: str | None
    key: Array  # the layer's own key, from which its dropout and noise are drawn
    seen: Mapping[str, Any]  # what all layers see, by name
    #: What a scan gives each layer of the stacks in `seen`, by name.
    rows: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    count: Array | None = None  # what is counted from layer to layer, or None
    _keys: int = 0

    def new_key(self) -> Array:
        """Another one each time."""
        self._keys += 1
        return jax.random.fold_in(self.key, self._keys)

    def row(self, name: str) -> Array | np.ndarray:
        """This layer's part of a stack."""
        if name in self.rows:
            return self.rows[name]
        stack, at = self.seen[name], self.number
        return stack[at] if isinstance(at, int) else jnp.asarray(stack)[at]

    def count_of_tokens(self) -> Array:
        """An integer of the batch, or what is counted from layer to layer."""
        if self.count is not None:
            return self.count
        return jnp.sum(self.seen["tokens"] % 2)

    def allowed(self, local: bool) -> Array | np.ndarray:
        """Which keys each query may see, [1 or batch, time, time]."""
        time = self.sizes.time
        if self.mask == "before":
            return self.seen["local" if local else "causal"]
        if self.mask == "each":
            return _causal(time, 2 if local else time)
        if self.mask == "numpy":
            return np.asarray(np.tril(np.ones((1, time, time), bool), 0 - local))
        if self.mask == "window by layer":
            return _causal(time, 1 + self.number % 3 + 2 * (not local))
        assert self.mask == "padding"
        return _causal(time, 2 if local else time) & self.seen["valid"][:, None]

    def tables(self) -> tuple[Array, Array] | None:
        """Rotary cosines and sines, [time, 1]."""
        if self.rotary == "each":
            return rotary(self.sizes.time)
        return self.seen["rotary"] if self.rotary == "before" else None


def _causal(time: int, window: int | Array) -> Array:
    behind = jnp.arange(time)[:, None] - jnp.arange(time)
    return ((behind >= 0) & (behind < window))[None]


def prepared(time: int) -> dict[str, Array]:
    """Masks that are made before the layers."""
    return {"causal": _causal(time, time), "local": _causal(time, 2)}


def rotary(time: int) -> tuple[Array, Array]:
    """Cosines and sines, [time, 1]."""
    angles = jnp.arange(time, dtype=jnp.float32)[:, None] * np.float32(0.3)
    return jnp.cos(angles), jnp.sin(angles)


# -- equations ----------------------------------------------------------------------

#: The latest value, one made before, and where the layer is.
Op = Callable[[Array, Array, Place], Array]


_own_jvp = jax.custom_jvp(jnp.tanh)
_own_jvp.defjvps(lambda t, result, x: 0.7 * t * jnp.cos(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _own_vjp(x: Array, factor: float) -> Array:
    return factor * jnp.tanh(x)


_own_vjp.defvjp(
    lambda x, factor: (_own_vjp(x, factor), x),
    lambda factor, x, g: (factor * g / (1 + x * x),),
)


@jax.custom_vjp
def _rounded(x: Array) -> Array:
    """Straight through."""
    return jnp.round(4 * x) / 4


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, g: (g,))


@jax.custom_gradient
def _reversed_gradient(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    return jnp.sin(x), lambda g: -0.3 * g


@jax.jit
def _compiled(x: Array, y: Array) -> Array:
    return jnp.where(x > 0, x, jnp.tanh(y))


def _fresh_jvp(x: Array, place: Place) -> Array:
    """A function of this layer's own, as libraries make them within a call."""

    bend = jax.custom_jvp(lambda x: jnp.tanh(x))
    bend.defjvps(lambda t, result, x: t * (1 - 0.5 * result * result))
    return bend(x)


def _fresh_vjp(x: Array, place: Place) -> Array:
    scale = 0.5 + 0.25 * place.kind
    bend = jax.custom_vjp(lambda x: jnp.sin(x))
    bend.defvjp(lambda x: (bend(x), jnp.cos(x)), lambda kept, g: (g * scale * kept,))
    return bend(x)


def _while(x: Array) -> Array:
    """Its derivative is zero: a loop without a known end has none."""
    norm = lax.stop_gradient(jnp.sum(jnp.abs(x)))
    count, _ = lax.while_loop(
        lambda at: (at[1] > 0.01) & (at[0] < 20),
        lambda at: (at[0] + 1, at[1] / 3),
        (0, norm),
    )
    return x / (1 + 0.1 * count).astype(x.dtype)


def _over_time(x: Array, **how: Any) -> Array:
    def body(h, now):
        h = (0.5 * h + now).astype(now.dtype)
        return h, jnp.tanh(h)

    _, made = lax.scan(body, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1), **how)
    return jnp.swapaxes(made, 0, 1)


def _associative(x: Array) -> Array:
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    decay = jnp.full_like(x, 0.5)
    return lax.associative_scan(combine, (decay, x), axis=1)[1]


def _largest(x: Array) -> Array:
    count = min(2, x.shape[-1])
    values, at = lax.top_k(x, count)
    chosen = jax.nn.one_hot(at, x.shape[-1], dtype=x.dtype)
    return jnp.einsum("btk,btkd->btd", jax.nn.softmax(values), chosen)


def _permuted(x: Array) -> Array:
    return x[..., np.random.default_rng(x.shape[-1]).permutation(x.shape[-1])]


def _table_of_all(x: Array) -> Array:
    table = np.linspace(0.5, 1.5, x.shape[-1], dtype=np.float32)
    return x * table.astype(x.dtype)


def _dropped(x: Array, place: Place) -> Array:
    kept = jax.random.bernoulli(place.new_key(), 0.8, x.shape)
    return jnp.where(kept, x / 0.8, 0).astype(x.dtype)


def _rotated(x: Array) -> Array:
    width = x.shape[-1] // 2 * 2
    turned = lax.complex(
        x[..., 0:width:2].astype(jnp.float32), x[..., 1:width:2].astype(jnp.float32)
    ) * np.exp(1j).astype(np.complex64)
    both = jnp.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], width)
    return jnp.concatenate([both.astype(x.dtype), x[..., width:]], -1)


def _by_literal(x: Array, place: Place) -> Array:
    """A number of each layer's own, which Python computes where it can."""
    number = place.number
    if isinstance(number, int):
        return x * (1 / math.sqrt(number + 1))
    return x * lax.rsqrt(number + jnp.float32(1)).astype(x.dtype)


def _by_even(x: Array, place: Place) -> Array:
    if isinstance(place.number, int):
        return jnp.tanh(x) if place.number % 2 else jnp.sin(x)
    return lax.cond(place.number % 2 == 1, jnp.tanh, jnp.sin, x)


#: By name. Values stay of order one: what follows a layer is normalised or added.
OPS: dict[str, Op] = {
    "abs": lambda x, y, at: jnp.abs(x),
    "add": lambda x, y, at: 0.5 * (x + y),
    "argmax": lambda x, y, at: x + 0.1 * jnp.argmax(y, -1, keepdims=True),
    "associative scan": lambda x, y, at: _associative(x),
    "barrier": lambda x, y, at: sum(lax.optimization_barrier((x, 0.5 * y))),
    "by even layers": lambda x, y, at: _by_even(x, at),
    "by layer, literal": lambda x, y, at: _by_literal(x, at),
    "by layer, rolled": lambda x, y, at: jnp.roll(x, at.number % 3, axis=1),
    "by layer, table": lambda x, y, at: x * at.row("table").astype(x.dtype),
    "cast": lambda x, y, at: jnp.sin(x.astype(jnp.float32)).astype(x.dtype),
    "cast down": lambda x, y, at: jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype),
    "cast of flags": lambda x, y, at: x * (1 + (y > 0).astype(x.dtype)) / 2,
    "checkpoint name": lambda x, y, at: checkpoint_name(jnp.sin(x), "kept") + y / 2,
    "clip": lambda x, y, at: jnp.clip(x, -0.5, 0.75),
    "complex": lambda x, y, at: _rotated(x),
    "concatenate": lambda x, y, at: jnp.concatenate([x[:, :1], y[:, 1:]], axis=1),
    "cond": lambda x, y, at: lax.cond(jnp.mean(y) > 0, jnp.sin, jnp.tanh, x),
    "cond of two": lambda x, y, at: lax.cond(
        jnp.sum(x) > 0, lambda x, y: (x, y), lambda x, y: (y, x), x, y
    )[0],
    "count": lambda x, y, at: x * (1 + 0.01 * at.count_of_tokens()).astype(x.dtype),
    "cumsum": lambda x, y, at: jnp.cumsum(x, axis=1) / x.shape[1],
    "custom_gradient": lambda x, y, at: _reversed_gradient(x),
    "custom_jvp": lambda x, y, at: _own_jvp(x),
    "custom_jvp, fresh": lambda x, y, at: _fresh_jvp(x, at),
    "custom_vjp": lambda x, y, at: _own_vjp(x, 0.9),
    "custom_vjp, fresh": lambda x, y, at: _fresh_vjp(x, at),
    "dropout": lambda x, y, at: _dropped(x, at),
    "dynamic slice": lambda x, y, at: (
        x + lax.dynamic_slice_in_dim(y, jnp.argmax(y[0, :, 0]), 1, axis=1)
    ),
    "einsum": lambda x, y, at: jnp.einsum("btd,bsd,bse->bte", x, y, x) / x.shape[1],
    "encoder": lambda x, y, at: x + at.seen["encoder"].astype(x.dtype),
    "erf": lambda x, y, at: x * lax.erf(y),
    "fft": lambda x, y, at: (
        jnp.fft.fft(x.astype(jnp.float32)).real.astype(x.dtype) / x.shape[-1]
    ),
    "fori": lambda x, y, at: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x) + 0.1 * y, x),
    "full": lambda x, y, at: x + jnp.full_like(y, 0.25),
    "gelu": lambda x, y, at: jax.nn.gelu(x),
    "gelu, exact": lambda x, y, at: jax.nn.gelu(x, approximate=False),
    "inputs": lambda x, y, at: x + at.row("inputs").astype(x.dtype),
    "iota": lambda x, y, at: x * lax.broadcasted_iota(x.dtype, x.shape, 1) / 8,
    "jit": lambda x, y, at: _compiled(x, y),
    "jit, fresh": lambda x, y, at: jax.jit(lambda x: jnp.tanh(x) + y / 2)(x),
    "logsumexp": lambda x, y, at: x - jax.nn.logsumexp(y, -1, keepdims=True),
    "max": lambda x, y, at: jnp.maximum(x, y),
    "mean over time": lambda x, y, at: x - jnp.mean(y, 1, keepdims=True),
    "mul": lambda x, y, at: x * jnp.tanh(y),
    "neg": lambda x, y, at: -x,
    "noise": lambda x, y, at: (
        x + 0.1 * jax.random.normal(at.new_key(), x.shape, x.dtype)
    ),
    "nothing": lambda x, y, at: x,
    "pad": lambda x, y, at: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))),
    "permute": lambda x, y, at: _permuted(x),
    "pow": lambda x, y, at: x**3 / (1 + x * x),
    "relu": lambda x, y, at: jax.nn.relu(x),
    "relu6": lambda x, y, at: jax.nn.relu6(3 * x) / 3,
    "reshape": lambda x, y, at: (
        jax.nn.softmax(x.reshape(x.shape[0], -1)).reshape(x.shape) + y / 2
    ),
    "reverse": lambda x, y, at: jnp.flip(x, 1),
    "rms": lambda x, y, at: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2),
    "round": lambda x, y, at: _rounded(x),
    "scan": lambda x, y, at: _over_time(x),
    "scan, reverse": lambda x, y, at: _over_time(x, reverse=True),
    "scan, unrolled": lambda x, y, at: _over_time(x, unroll=2),
    "scatter": lambda x, y, at: x.at[:, 0].add(0.5 * y[:, -1]),
    "silu": lambda x, y, at: jax.nn.silu(x),
    "softmax": lambda x, y, at: jax.nn.softmax(x, 1) * x.shape[1],
    "sort": lambda x, y, at: jnp.sort(x, -1),
    "sort, taken": lambda x, y, at: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "standardize": lambda x, y, at: jax.nn.standardize(x, epsilon=1e-2),
    "stop gradient": lambda x, y, at: x + 0.5 * lax.stop_gradient(y),
    "sub": lambda x, y, at: x - 0.5 * y,
    "switch": lambda x, y, at: lax.switch(
        jnp.argmax(y[0, 0]) % 3, [jnp.sin, jnp.tanh, lambda x: 0.5 * x], x
    ),
    "table": lambda x, y, at: _table_of_all(x),
    "tanh": lambda x, y, at: jnp.tanh(x),
    "tokens": lambda x, y, at: (
        x + 0.1 * jax.nn.one_hot(at.seen["tokens"] % x.shape[-1], x.shape[-1])
    ),
    "top_k": lambda x, y, at: x + _largest(y),
    "transpose": lambda x, y, at: (
        jnp.swapaxes(jnp.cumsum(jnp.swapaxes(x, 1, 2), 1), 1, 2) / x.shape[-1]
    ),
    "tril": lambda x, y, at: (
        jnp.einsum("ts,bsd->btd", jnp.tril(jnp.ones((x.shape[1],) * 2, x.dtype)), x)
        / x.shape[1]
    ),
    "vmap": lambda x, y, at: jax.vmap(lambda x, y: x @ y.T @ y / y.shape[0])(x, y),
    "where": lambda x, y, at: jnp.where(y > 0, x, 0.1 * x),
    "while": lambda x, y, at: _while(x),
}

#: Those that round to fewer bits, which a last bit of float32 may turn elsewhere.
NARROW = {"cast down"}
