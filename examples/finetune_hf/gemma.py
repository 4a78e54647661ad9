"""Gemma 3's decoder, of `eqx-zoo`'s attention.

It computes what transformers computes for text; pictures are not trained on.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from eqx_zoo.layers import Attention, RMSNorm, SwiGLU
from jax.typing import DTypeLike

from .folder import FolderError

#: Every so many layers one sees all tokens before it, where `layer_types` says nothing.
PATTERN = 6
#: What transformers takes if a configuration does not say: `Gemma3TextConfig`'s.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
ATTENTION = ("full_attention", "sliding_attention")
THETA = {"full_attention": 1e6, "sliding_attention": 1e4}


def rope_of(config: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Returns the base of rotary positions in layers of one kind, and their divisor.

    They stand in `rope_parameters` by kind (transformers 5), or in three fields.
    """
    is_full = kind == "full_attention"
    said = (config.get("rope_parameters") or {}).get(kind)
    said = said or (is_full and config.get("rope_scaling")) or {}
    field = "rope_theta" if is_full else "rope_local_base_freq"
    how = said.get("rope_type", said.get("type", "default"))
    if how not in ("default", "linear"):
        raise FolderError(f"config.json: rope_type={how!r} is not computed.")
    theta = said.get("rope_theta", config.get(field, THETA[kind]))
    return theta, said.get("factor", 1.0) if how == "linear" else 1.0


class Norm(RMSNorm):
    """Its weight is what is added to one; all of it is computed in float32."""

    after: float = eqx.field(static=True)

    def __init__(self, *args: Any, after: float = 1.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.after = after

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide**2, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean + self.eps)
        return (self.after * wide * (1.0 + self.weight.astype(jnp.float32))).astype(
            x.dtype
        )


class MLP(SwiGLU):
    """With GELU, approximated by tanh."""

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.gelu(self.gate_proj(x), approximate=True)
        return self.down_proj(gate * self.up_proj(x))


class Layer(eqx.Module):
    """Attention, of a window or of all before, and the MLP; a norm on each side."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    mlp: MLP
    post_feedforward_layernorm: Norm
    window: int | None = eqx.field(static=True)
    factor: float = eqx.field(static=True)

    def __init__(
        self, config: Mapping[str, Any], kind: str, *, key: jax.Array, dtype: DTypeLike
    ) -> None:
        width, head = config["hidden_size"], config["head_dim"]
        (theta, self.factor), eps = rope_of(config, kind), config["rms_norm_eps"]
        norm = lambda: Norm(width, eps=eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
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
        norms = (
            Norm(head, eps=eps, dtype=dtype, after=after),
            Norm(head, eps=eps, dtype=dtype),
        )
        where, is_none = lambda x: (x.q_norm, x.k_norm), lambda x: x is None
        self.self_attn = eqx.tree_at(where, attention, norms, is_leaf=is_none)
        self.mlp = MLP(width, config["intermediate_size"], key=key, dtype=dtype)
        is_local = kind == "sliding_attention"
        self.window = config["sliding_window"] if is_local else None

    def __call__(
        self, x: jax.Array, positions: jax.Array, mask: jax.Array
    ) -> jax.Array:
        if self.window is not None:
            place = jnp.arange(len(x))
            mask &= place[:, None] - place[None, :] < self.window
        there = positions.astype(jnp.float32) / self.factor
        found, _ = self.self_attn(self.input_layernorm(x), there, mask)
        x = x + self.post_attention_layernorm(found)
        found = jax.vmap(self.mlp)(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(found)


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
        # The factor is rounded as the table's numbers are, as in transformers.
        x = table[tokens]
        # As torch's `padding_idx`: this token's embedding learns as an output alone.
        x = jnp.where((tokens == self.pad)[:, None], jax.lax.stop_gradient(x), x)
        x = x * jnp.asarray(table.shape[1] ** 0.5, table.dtype)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x), None


class Gemma(eqx.Module):
    """The decoder, whose head is its embedding."""

    model: Model
    lm_head: None

    def __init__(
        self, config: Mapping[str, Any], *, key: jax.Array, dtype: DTypeLike
    ) -> None:
        count, width = config["num_hidden_layers"], config["hidden_size"]
        self.model = Model(
            eqx.nn.Embedding(config["vocab_size"], width, key=key, dtype=dtype),
            [Layer(config, x, key=key, dtype=dtype) for x in kinds(config, count)],
            Norm(width, eps=config["rms_norm_eps"], dtype=dtype),
            config.get("pad_token_id", 0),
        )
        self.lm_head = None


def kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """What each layer's attention sees."""
    every = config.get("sliding_window_pattern", PATTERN)
    local = [bool((n + 1) % every) for n in range(count)]
    said = config.get("layer_types") or [ATTENTION[x] for x in local]
    if len(said) != count or not set(said) <= {*ATTENTION}:
        raise FolderError(
            f"config.json: layer_types={said} is not {count} of"
            f" {' or '.join(ATTENTION)}."
        )
    return said
