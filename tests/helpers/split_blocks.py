"""Equations of random layers that have weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helpers.split_ops import Place, Sizes

Shapes = dict[str, tuple[int, ...]]

HEADS, HEAD, EXPERTS, RANK = 2, 2, 3, 2


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of one part of a layer."""

    #: By name, `prefix` before each; also those of frozen matrices' adapters.
    values: Mapping[str, Any]
    prefix: str = ""  # the part's
    dtype: Any = None  # what they are computed in; None: their own

    def __getitem__(self, name: str) -> Array:
        name = self.prefix + name
        x = self.values[name]
        if name + "_scale" in self.values:
            x = x.astype(jnp.float32) * self.values[name + "_scale"]
        if name + "_a" in self.values and x.ndim > 2:
            x = x + self.values[name + "_a"] @ self.values[name + "_b"]
        return x if self.dtype is None else x.astype(self.dtype)

    def product(self, x: Array, name: str) -> Array:
        """With a matrix, and with what adapts it."""
        made = x @ self[name].astype(x.dtype)
        name = self.prefix + name
        if name + "_a" in self.values:
            a, b = (self.values[name + end].astype(x.dtype) for end in ("_a", "_b"))
            made += (x @ a) @ b
        return made

    def of(self, prefix: str) -> "Weights":
        """Those of a part of this part."""
        return dataclasses.replace(self, prefix=self.prefix + prefix)


Apply = Callable[[Weights, Array, Array, Place], Array]


class Block(NamedTuple):
    """An equation with weights."""

    weights: str  # their names and shapes, whose axes `shapes` has by letter
    #: Computes it of weights, the latest value, one made before, and its place.
    apply: Apply

    def shapes(self, s: Sizes) -> Shapes:
        """Of its weights, by name."""
        size = {"d": s.width, "f": s.hidden, "t": s.time, "v": s.words, "e": EXPERTS}
        size |= {"h": HEADS * HEAD, "3": 3}
        named = (x.split(":") for x in self.weights.split())
        return {name: tuple(size[axis] for axis in axes) for name, axes in named}


_SQUARE, _WITH_BIAS, _MLP = "w:dd", "w:dd bias:d", "up:df down:fd"
_GATED = f"gate:df {_MLP}"
_ATTENTION = "q:dh k:dh v:dh o:hd"
_EXPERTS = "router:de experts:edd"


def _hidden_act(act: Callable[[Array], Array]) -> Apply:
    return lambda w, x, y, at: w.product(act(w.product(x, "up")), "down")


def _gated_by(act: Callable[[Array], Array]) -> Apply:
    return lambda w, x, y, at: w.product(
        act(w.product(x, "gate")) * w.product(x, "up"), "down"
    )


def _turn(x: Array, tables: tuple[Array, Array] | None) -> Array:
    if tables is None:
        return x
    cos, sin = (t[:, None].astype(x.dtype) for t in tables)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attend(
    w: Weights, x: Array, y: Array, at: Place, local: bool = False, soft: bool = False
) -> Array:
    heads = lambda x: x.reshape(*x.shape[:2], HEADS, HEAD)
    q, k = (_turn(heads(w.product(x, name)), at.tables()) for name in "qk")
    v = heads(w.product(y, "v"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
    scores = 5 * jnp.tanh(scores / 5) if soft else scores
    scores = jnp.where(at.allowed(local)[:, None], scores, -1e9)
    chances = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    made = jnp.einsum("bhqk,bkhd->bqhd", chances, v)
    return w.product(made.reshape(*x.shape[:2], -1), "o")


def _routed(w: Weights, x: Array, y: Array, at: Place) -> Array:
    """Each token by two of the experts, gathered."""
    chances = jax.nn.softmax(w.product(x, "router"))
    values, chosen = lax.top_k(chances, 2)
    one = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
    gates = jnp.einsum("btk,btke->bte", values / values.sum(-1, keepdims=True), one)
    made = jnp.einsum("btd,edf->btef", x, w["experts"].astype(x.dtype))
    return jnp.einsum("btef,bte->btf", made, gates)


def _dispatched(w: Weights, x: Array, y: Array, at: Place) -> Array:
    """Tokens sorted by their expert, multiplied, and put back."""
    flat = x.reshape(-1, x.shape[-1])
    logits = w.product(flat, "router")
    expert = jnp.argmax(logits, -1)
    order = jnp.argsort(expert)
    matrices = w["experts"].astype(x.dtype)[expert[order]]
    made = jnp.einsum("nd,ndf->nf", flat[order], matrices)
    back = jnp.zeros_like(made).at[order].set(made)
    chance = jnp.take_along_axis(jax.nn.softmax(logits), expert[:, None], 1)
    return (back * chance).reshape(x.shape)


def _convolved(w: Weights, x: Array, y: Array, at: Place) -> Array:
    kernel = w["kernel"].astype(x.dtype)
    before = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return sum(before[:, n : n + x.shape[1]] * kernel[n] for n in range(3))


def _lax_convolved(w: Weights, x: Array, y: Array, at: Place) -> Array:
    kernel = w["taps"].astype(x.dtype)[:, None]
    axes, groups = ("NWC", "WIO", "NWC"), x.shape[-1]
    return lax.conv_general_dilated(
        *(x, kernel, (1,), "SAME"), dimension_numbers=axes, feature_group_count=groups
    )


def _remembered(w: Weights, x: Array, y: Array, at: Place) -> Array:
    """A recurrence over time whose decay is learned."""
    decay = jax.nn.sigmoid(w["scale"]).astype(x.dtype)

    def body(h, now):
        h = decay * h + (1 - decay) * now
        return h, h

    _, made = lax.scan(body, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(made, 0, 1)


@jax.custom_vjp
def _own_product(x: Array, w: Array) -> Array:
    return x @ w


def _own_product_back(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    return 0.5 * g @ w.T, jnp.einsum("btd,bte->de", x, g)


_own_product.defvjp(lambda x, w: (x @ w, (x, w)), _own_product_back)


def _solved(w: Weights, x: Array, y: Array, at: Place) -> Array:
    matrix = jnp.eye(x.shape[-1]) + 0.1 * jnp.tanh(w["w"].astype(jnp.float32))
    lower = jnp.tril(matrix)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    made = jax.scipy.linalg.solve_triangular(lower, rows.T, lower=True)
    return made.T.reshape(x.shape).astype(x.dtype)


def _layer_norm(w: Weights, x: Array, y: Array, at: Place) -> Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    made = (wide - mean) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-2)
    return (made * (1 + w["scale"]) + w["bias"]).astype(x.dtype)


def _rms_norm(w: Weights, x: Array, y: Array, at: Place) -> Array:
    wide = x.astype(jnp.float32)
    made = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-2)
    return (made * (1 + w["scale"])).astype(x.dtype)


def _looked_up(w: Weights, x: Array, y: Array, at: Place) -> Array:
    return x + w["table"].astype(x.dtype)[at.seen["tokens"]]


def _mixed(w: Weights, x: Array, y: Array, at: Place) -> Array:
    return jnp.einsum("ts,bsd->btd", w["mix"].astype(x.dtype), jax.nn.relu(x))


def _shared(w: Weights, x: Array, y: Array, at: Place) -> Array:
    """By a matrix that all layers share, and one of the layer's own."""
    return w.product(x, "w") + jnp.tanh(x @ at.seen["shared"].astype(x.dtype))


def _cross(w: Weights, x: Array, y: Array, at: Place) -> Array:
    other = at.seen["encoder"].astype(x.dtype)
    return _attend(w, x, other, dataclasses.replace(at, rotary=None))


def _checkpointed(w: Weights, x: Array, y: Array, at: Place, **how: Any) -> Array:
    return jax.checkpoint(lambda x: _hidden_act(jax.nn.gelu)(w, x, y, at), **how)(x)


def _looped(w: Weights, x: Array, y: Array, at: Place) -> Array:
    """One matrix, several times over: a layer may use its own as often as it likes."""
    body = lambda _, x: jnp.tanh(w.product(x, "w"))
    return lax.fori_loop(0, 3, body, x)


def _either(w: Weights, x: Array, y: Array, at: Place) -> Array:
    up = lambda x: w.product(jnp.sin(w.product(x, "up")), "down")
    return lax.cond(jnp.mean(y) > 0, up, jnp.zeros_like, x)


_dots = functools.partial(
    _checkpointed, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)

#: By name. Those of the same weights may stand for one another.
BLOCKS: dict[str, Block] = {
    "attention": Block(_ATTENTION, _attend),
    "attention, capped": Block(_ATTENTION, functools.partial(_attend, soft=True)),
    "attention, local": Block(_ATTENTION, functools.partial(_attend, local=True)),
    "attention, of encoder": Block(_ATTENTION, _cross),
    "bias": Block(_WITH_BIAS, lambda w, x, y, at: w.product(x, "w") + w["bias"]),
    "bias, silu": Block(
        _WITH_BIAS, lambda w, x, y, at: jax.nn.silu(w.product(x, "w") + w["bias"])
    ),
    "bilinear": Block(_SQUARE, lambda w, x, y, at: jnp.tanh(y) * w.product(x, "w")),
    "convolution": Block("kernel:3d", _convolved),
    "convolution, lax": Block("taps:3d", _lax_convolved),
    "experts": Block(_EXPERTS, _routed),
    "experts, sorted": Block(_EXPERTS, _dispatched),
    "gated": Block(_GATED, _gated_by(jax.nn.silu)),
    "gated, gelu": Block(_GATED, _gated_by(jax.nn.gelu)),
    "layer norm": Block("scale:d bias:d", _layer_norm),
    "listed": Block(
        "part/0/w:dd part/1/w:dd",
        lambda w, x, y, at: jnp.tanh(w.product(x, "part/0/w")) @ w["part/1/w"],
    ),
    "lookup": Block("table:vd", _looked_up),
    "looped": Block(_SQUARE, _looped),
    "mlp": Block(_MLP, _hidden_act(jax.nn.gelu)),
    "mlp, checkpoint": Block(_MLP, _checkpointed),
    "mlp, checkpoint of dots": Block(_MLP, _dots),
    "mlp, cond": Block(_MLP, _either),
    "mlp, relu": Block(_MLP, _hidden_act(jax.nn.relu)),
    "mlp, squared": Block(_MLP, _hidden_act(lambda x: jnp.square(jax.nn.relu(x)))),
    "mix over time": Block("mix:tt", _mixed),
    "product": Block(_SQUARE, lambda w, x, y, at: w.product(x, "w")),
    "product, custom_vjp": Block(
        _SQUARE, lambda w, x, y, at: _own_product(x, w["w"].astype(x.dtype))
    ),
    "recurrence": Block("scale:d", _remembered),
    "rms norm": Block("scale:d", _rms_norm),
    "scale": Block("scale:d", lambda w, x, y, at: x * (1 + w["scale"]).astype(x.dtype)),
    "shared": Block(_SQUARE, _shared),
    "solve": Block(_SQUARE, _solved),
    "twice": Block(_SQUARE, lambda w, x, y, at: jnp.sin(w.product(x, "w")) @ w["w"].T),
}

#: Those whose weights are matrices that adapters can be put beside.
MATRICES = [name for name, block in BLOCKS.items() if block.weights in (_MLP, _GATED)]
