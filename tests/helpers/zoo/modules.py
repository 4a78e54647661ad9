"""Modules of Flax, and GPT-2 with the names of its checkpoints."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from helpers.zoo.plain import TOKENS, VOCAB, WIDTH, cross_entropy, model, normal


def norm(x, layer):
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)
    return scaled * layer["scale"] + layer["bias"]


def norm_weights():
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH) + 0.01}


def attention(x, layer):
    q, k, v = jnp.split(x @ layer["c_attn"], 3, -1)
    heads = (y.reshape(*y.shape[:2], 2, WIDTH // 2) for y in (q, k, v))
    made = jax.nn.dot_product_attention(*heads, is_causal=True)
    return made.reshape(x.shape) @ layer["c_proj"]


@model
def gpt_2():
    """`h_0` and so on, learned positions, and a tied head."""
    blocks = {
        f"h_{n}": {
            "ln_1": norm_weights(),
            "attn": {
                "c_attn": normal(WIDTH, 3 * WIDTH),
                "c_proj": normal(WIDTH, WIDTH),
            },
            "ln_2": norm_weights(),
            "mlp": {"c_fc": normal(WIDTH, 192) * (1 + n), "c_proj": normal(192, WIDTH)},
        }
        for n in range(3)
    }
    params = {"wte": normal(VOCAB, WIDTH), "wpe": normal(16, WIDTH)}
    params |= blocks | {"ln_f": norm_weights()}

    def block(layer, x):
        x = x + attention(norm(x, layer["ln_1"]), layer["attn"])
        up = jax.nn.gelu(norm(x, layer["ln_2"]) @ layer["mlp"]["c_fc"])
        return x + up @ layer["mlp"]["c_proj"]

    def loss(params, batch):
        tokens = batch[:, :-1]
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for n in range(3):
            x = block(params[f"h_{n}"], x)
        return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, batch)

    return loss, params, TOKENS


class Block(nnx.Module):
    """Attention with a causal mask, and two linear layers.

    A bias of keys would have no gradient but rounding, which Adam makes steps of.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """A list of blocks between embeddings and an output of its own."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@model
def nnx_list():
    graph, params = nnx.split(Decoder(rngs=nnx.Rngs(0)))

    def loss(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return loss, params, TOKENS


class LinenBlock(nn.Module):
    """Two linear layers, called with a carry as `nn.scan` wants them."""

    @nn.compact
    def __call__(self, x, _=None):
        up = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.silu(up)), None


class Linen(nn.Module):
    """Blocks that are scanned over."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        axes, split = {"params": 0}, {"params": True}
        x, _ = nn.scan(LinenBlock, axes, split_rngs=split, length=3)()(x, None)
        return nn.Dense(VOCAB)(x)


@model
def linen_scan():
    module = Linen()
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))

    def loss(params, batch):
        return cross_entropy(module.apply(params, batch[:, :-1]), batch)

    return loss, params, TOKENS


class SownBlock(nn.Module):
    """Four experts that all compute, weighed by a router that sows its losses."""

    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm()(x)
        gates = nn.softmax(nn.Dense(4, use_bias=False, name="router")(y))
        self.sow("intermediates", "balance", 4 * jnp.mean(gates**2))
        init = nn.initializers.normal(0.1)
        up = self.param("up", init, (4, WIDTH, 2 * WIDTH))
        down = self.param("down", init, (4, 2 * WIDTH, WIDTH))
        each = jnp.einsum("ebtf,efd->ebtd", jax.nn.silu(y @ up[:, None]), down)
        return x + jnp.einsum("ebtd,bte->btd", each, gates)


class Sown(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        for n in range(4):
            x = nn.remat(SownBlock)(name=f"layers_{n}")(x)
        return nn.Dense(VOCAB)(nn.RMSNorm()(x))


@model
def linen_sow():
    """Losses that each layer sows are found at the end, and returned as metrics."""
    module = Sown()
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))["params"]

    def loss(params, batch):
        logits, sown = module.apply(
            {"params": params}, batch[:, :-1], mutable=["intermediates"]
        )
        balance = jnp.stack(jax.tree.leaves(sown))
        total = cross_entropy(logits, batch) + 0.01 * balance.sum()
        return total, {"balance": balance, "tokens": batch[:, 1:].size}

    return loss, params, TOKENS


class LinenLayer(nn.Module):
    """Attention and a gated product, as MaxText calls them: the mask is broadcast."""

    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.RMSNorm(name="pre_attention_norm")(x)
        x = x + nn.MultiHeadAttention(2, use_bias=False, name="attention")(y, mask=mask)
        y = nn.RMSNorm(name="pre_mlp_norm")(x)
        gate, up = (nn.Dense(32, use_bias=False, name=f"wi_{n}")(y) for n in (0, 1))
        y = nn.Dense(WIDTH, use_bias=False, name="wo")(nn.silu(gate) * up)
        return x + nn.Dropout(0.1, broadcast_dims=(-2,))(y, deterministic), None


class MaxTextLike(nn.Module):
    """A scanned decoder whose stacks have their layers on axis 1, computed again."""

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        embed = nn.Embed(VOCAB, WIDTH, name="token_embedder")
        layers = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False, static_argnums=(3,)),
            variable_axes={"params": 1},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=4,
        )(name="layers")
        x, _ = layers(embed(tokens), nn.make_causal_mask(tokens), deterministic)
        return embed.attend(nn.RMSNorm(name="decoder_norm")(x))


@model
def maxtext_dropout():
    module = MaxTextLike()
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS[:, :-1]))
    batch = {"tokens": TOKENS, "key": jax.random.key(1)}

    def loss(params, batch):
        rngs, tokens = {"dropout": batch["key"]}, batch["tokens"]
        logits = module.apply(params, tokens[:, :-1], deterministic=False, rngs=rngs)
        return cross_entropy(logits, tokens)

    return loss, params, batch
