"""Gemma 3's decoder, of `eqx-zoo`'s attention; pictures are not trained on."""

import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from eqx_zoo.layers import Attention, RMSNorm, SwiGLU
from jax.typing import DTypeLike

from .folder import FolderError


def rope_of(config: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Returns the base of rotary positions in layers of one kind, and their divisor."""
    rope = config["rope_parameters"][kind]
    if (how := rope["rope_type"]) not in ("default", "linear"):
        raise FolderError(f"config.json: rope_type={how!r} is not computed.")
    return rope["rope_theta"], rope["factor"] if how == "linear" else 1.0


class Norm(RMSNorm):
    """A norm in float32, of a weight to which one is added, times `after`."""

    after: float = eqx.field(static=True)

    def __init__(self, *args: Any, after: float = 1.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.after = after

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide**2, axis=-1, keepdims=True)
        wide = self.after * (wide * jax.lax.rsqrt(mean + self.eps))
        return (wide * (1.0 + self.weight.astype(jnp.float32))).astype(x.dtype)


class MLP(SwiGLU):
    """A feed-forward layer with GELU, approximated by tanh."""

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.gelu(self.gate_proj(x), approximate=True)
        return self.down_proj(gate * self.up_proj(x))


class Layer(eqx.Module):
    """Attention in a window, or without one, and the MLP; a norm on each side."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    mlp: MLP
    post_feedforward_layernorm: Norm
    window: int | None = eqx.field(static=True)
    factor: float = eqx.field(static=True)

    def __call__(
        self, x: jax.Array, positions: jax.Array, mask: jax.Array
    ) -> jax.Array:
        if self.window is not None:
            place = jnp.arange(len(x))
            mask &= place[:, None] - place[None, :] < self.window
        there = positions.astype(jnp.float32) / self.factor
        y, _ = self.self_attn(self.input_layernorm(x), there, mask)
        x = x + self.post_attention_layernorm(y)
        y = jax.vmap(self.mlp)(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Model(eqx.Module):
    """Embedding, layers and the last norm."""

    embed_tokens: eqx.nn.Embedding
    layers: list[Layer]
    norm: Norm
    pad: int | None = eqx.field(static=True)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, None]:
        table = self.embed_tokens.weight
        x = table[tokens]
        # As torch's `padding_idx`: this token's embedding learns as an output alone.
        x = jnp.where((tokens == self.pad)[:, None], jax.lax.stop_gradient(x), x)
        # The factor is rounded as the table's numbers are, as in transformers.
        x = x * jnp.asarray(table.shape[1] ** 0.5, table.dtype)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x), None


class Gemma(eqx.Module):
    """The decoder, whose head is its embedding."""

    model: Model
    lm_head: None = None


def gemma(config: Mapping[str, Any], *, key: jax.Array, dtype: DTypeLike) -> Gemma:
    """Builds the decoder of a configuration."""
    width, how = config["hidden_size"], {"key": key, "dtype": dtype}
    table = eqx.nn.Embedding(config["vocab_size"], width, **how)
    layers = [layer(config, kind, **how) for kind in config["layer_types"]]
    norm = Norm(width, eps=config["rms_norm_eps"], dtype=dtype)
    return Gemma(Model(table, layers, norm, config.get("pad_token_id")))


def layer(
    config: Mapping[str, Any], kind: str, *, key: jax.Array, dtype: DTypeLike
) -> Layer:
    width, head = config["hidden_size"], config["head_dim"]
    norm = functools.partial(Norm, eps=config["rms_norm_eps"], dtype=dtype)
    theta, factor = rope_of(config, kind)
    attention = Attention(
        width,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head,
        rope_theta=theta,
        key=key,
        dtype=dtype,
    )
    # Scores are divided by the root of this number, and not of the head's size.
    after = (head / config["query_pre_attn_scalar"]) ** 0.5
    where, is_none = lambda x: (x.q_norm, x.k_norm), lambda x: x is None
    norms = norm(head, after=after), norm(head)
    attention = eqx.tree_at(where, attention, norms, is_leaf=is_none)
    mlp = MLP(width, config["intermediate_size"], key=key, dtype=dtype)
    window = config["sliding_window"] if kind == "sliding_attention" else None
    outer = norm(width), norm(width)
    return Layer(norm(width), attention, *outer, mlp, norm(width), window, factor)
