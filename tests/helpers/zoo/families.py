"""Models in the manner of known families, small and of arrays in dicts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.zoo.plain import TOKENS, VOCAB, WIDTH, cross_entropy, normal, rms

MODELS: dict[str, Callable[[], tuple]] = {}
HEADS, FEATURES = 2, WIDTH // 2


def model(function: Callable[[], tuple]) -> Callable[[], tuple]:
    MODELS[function.__name__] = function
    return function


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, FEATURES)


def attended(q, k, v, bias=0.0):
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)) / np.sqrt(FEATURES)
    weights = jax.nn.softmax(scores + bias)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, heads(v))
    return out.reshape(*out.shape[:-2], WIDTH)


def attention(layer, x, seen=None, bias=0.0):
    seen = x if seen is None else seen
    q, k, v = x @ layer["q"], seen @ layer["k"], seen @ layer["v"]
    return attended(q, k, v, bias) @ layer["o"]


def attention_weights(seed: float = 1.0):
    return {name: normal(WIDTH, WIDTH) * (seed + k) for k, name in enumerate("qkvo")}


def causal(length: int):
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def turned(x, base=1e4):
    """Rotary embeddings, computed where they are used."""
    angles = jnp.arange(x.shape[1])[:, None] / base ** (
        jnp.arange(FEATURES // 2) / FEATURES
    )
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(heads(x), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def norm(x, layer):
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)
    return scaled * layer["scale"] + layer["bias"]


def norm_weights():
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH) + 0.01}


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
            "mlp": {"c_fc": normal(WIDTH, 64) * (1 + n), "c_proj": normal(64, WIDTH)},
        }
        for n in range(3)
    }
    params = {"wte": normal(VOCAB, WIDTH), "wpe": normal(16, WIDTH)}
    params |= blocks | {"ln_f": norm_weights()}

    def block(layer, x):
        q, k, v = jnp.split(norm(x, layer["ln_1"]) @ layer["attn"]["c_attn"], 3, -1)
        x = x + attended(q, k, v, causal(x.shape[1])) @ layer["attn"]["c_proj"]
        up = jax.nn.gelu(norm(x, layer["ln_2"]) @ layer["mlp"]["c_fc"])
        return x + up @ layer["mlp"]["c_proj"]

    def loss(params, batch):
        tokens = batch[:, :-1]
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for n in range(3):
            x = block(params[f"h_{n}"], x)
        return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, batch)

    return loss, params, TOKENS


def t5_bias(table, queries: int, keys: int, *, both: bool):
    """Relative positions in buckets, a number for each head."""
    apart = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
    buckets = jnp.clip(jnp.abs(apart), 0, 7) + (8 * (apart > 0) if both else 0)
    return jnp.moveaxis(table[buckets], -1, 0)


def t5_layer(*, cross: bool):
    layer = {
        "norm": jnp.ones(WIDTH),
        "self": attention_weights(),
        "last": jnp.ones(WIDTH),
    }
    if cross:
        layer |= {"between": jnp.ones(WIDTH), "cross": attention_weights(0.5)}
    return layer | {"wi": normal(WIDTH, 32), "wo": normal(32, WIDTH)}


def feed_forward(layer, x):
    return x + jax.nn.relu(rms(x, layer["last"]) @ layer["wi"]) @ layer["wo"]


def t5_parameters(encoders: int, decoders: int):
    return {
        "shared": normal(VOCAB, WIDTH),
        "encoder": {
            "bias": normal(16, HEADS),
            "block": [t5_layer(cross=False) for _ in range(encoders)],
            "norm": jnp.ones(WIDTH),
        },
        "decoder": {
            "bias": normal(8, HEADS),
            "block": [t5_layer(cross=True) for _ in range(decoders)],
            "norm": jnp.ones(WIDTH),
        },
    }


def t5_loss(params, batch):
    """Both stacks share the biases of their first layers."""
    x = params["shared"][batch["inputs"]]
    encoder, decoder = params["encoder"], params["decoder"]
    bias = t5_bias(encoder["bias"], x.shape[1], x.shape[1], both=True)
    for layer in encoder["block"]:
        x = x + attention(layer["self"], rms(x, layer["norm"]), bias=bias)
        x = feed_forward(layer, x)
    seen = rms(x, encoder["norm"])
    x = params["shared"][batch["tokens"][:, :-1]]
    length = x.shape[1]
    bias = t5_bias(decoder["bias"], length, length, both=False) + causal(length)
    for layer in decoder["block"]:
        x = x + attention(layer["self"], rms(x, layer["norm"]), bias=bias)
        x = x + attention(layer["cross"], rms(x, layer["between"]), seen)
        x = feed_forward(layer, x)
    x = rms(x, decoder["norm"]) * WIDTH**-0.5
    return cross_entropy(x @ params["shared"].T, batch["tokens"])


def t5_batch():
    inputs = np.random.default_rng(1).integers(0, VOCAB, (2, 7))
    return {"inputs": inputs, "tokens": TOKENS}


@model
def t5():
    """The decoder is the larger one: its layers are those that are taken apart."""
    return t5_loss, t5_parameters(2, 3), t5_batch()


@model
def t5_of_many_encoders():
    """The encoder is the larger one; the decoder needs it afterwards."""
    return t5_loss, t5_parameters(5, 2), t5_batch()


@model
def whisper():
    """Convolutions over sound in front of the encoder, and a decoder of text."""
    params = t5_parameters(4, 2)
    params["conv"] = [normal(3, 5, WIDTH), normal(3, WIDTH, WIDTH)]
    params["positions"] = normal(16, WIDTH)

    def convolved(x, kernel, stride):
        numbers = ("NWC", "WIO", "NWC")
        pad = [(1, 1)]
        made = jax.lax.conv_general_dilated(
            x, kernel, (stride,), pad, dimension_numbers=numbers
        )
        return jax.nn.gelu(made)

    def loss(params, batch):
        encoder, decoder = params["encoder"], params["decoder"]
        x = convolved(batch["sound"], params["conv"][0], 1)
        x = convolved(x, params["conv"][1], 2) + params["positions"][:8]
        for layer in encoder["block"]:
            x = x + attention(layer["self"], rms(x, layer["norm"]))
            x = feed_forward(layer, x)
        seen = rms(x, encoder["norm"])
        x = params["shared"][batch["tokens"][:, :-1]]
        for layer in decoder["block"]:
            bias = causal(x.shape[1])
            x = x + attention(layer["self"], rms(x, layer["norm"]), bias=bias)
            x = x + attention(layer["cross"], rms(x, layer["between"]), seen)
            x = feed_forward(layer, x)
        logits = rms(x, decoder["norm"]) @ params["shared"].T
        return cross_entropy(logits, batch["tokens"])

    sound = np.random.default_rng(2).standard_normal((2, 16, 5), np.float32)
    return loss, params, {"sound": sound, "tokens": TOKENS}


@model
def vision_transformer():
    """Patches, a token for the class, post-norms of layers, and a head of its own."""
    params = {
        "patches": normal(4, 4, 3, WIDTH),
        "class": normal(1, 1, WIDTH),
        "positions": normal(1, 5, WIDTH),
        "blocks": [
            {
                "first": norm_weights(),
                "attention": attention_weights(),
                "second": norm_weights(),
                "up": normal(WIDTH, 48) * (1 + n),
                "down": normal(48, WIDTH),
                "scales": jnp.full((2, WIDTH), 0.1),
            }
            for n in range(4)
        ],
        "norm": norm_weights(),
        "head": {"w": normal(WIDTH, 10), "b": jnp.zeros(10)},
    }

    def loss(params, batch):
        images = batch["images"]
        x = jax.lax.conv_general_dilated(
            images,
            params["patches"],
            (4, 4),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ).reshape(len(images), 4, WIDTH)
        first = jnp.broadcast_to(params["class"], (len(images), 1, WIDTH))
        x = jnp.concatenate([first, x], 1) + params["positions"]
        for layer in params["blocks"]:
            y = attention(layer["attention"], norm(x, layer["first"]))
            x = x + layer["scales"][0] * y
            y = jax.nn.gelu(norm(x, layer["second"]) @ layer["up"]) @ layer["down"]
            x = x + layer["scales"][1] * y
        x = norm(x, params["norm"])[:, 0]
        logits = x @ params["head"]["w"] + params["head"]["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return losses.mean(), {
            "accuracy": (logits.argmax(-1) == batch["labels"]).mean()
        }

    images = np.random.default_rng(3).standard_normal((3, 8, 8, 3), np.float32)
    return loss, params, {"images": images, "labels": np.array([1, 4, 9])}


def llama_layer(n: int = 0):
    return {
        "input_norm": jnp.ones(WIDTH) + 0.1 * n,
        "attention": attention_weights(1 + 0.3 * n),
        "post_norm": jnp.ones(WIDTH),
    }


def llama_attention(layer, x, bias, base=1e4):
    y = rms(x, layer["input_norm"])
    own = layer["attention"]
    q, k = (turned(y @ own[name], base) for name in "qk")
    return x + attended(q, k, y @ own["v"], bias) @ own["o"]


@model
def dense_first_then_experts():
    """As DeepSeek: the first layer is dense, the others' experts are chosen."""
    experts = lambda: {
        "router": normal(WIDTH, 4),
        "up": normal(4, WIDTH, 32),
        "down": normal(4, 32, WIDTH),
        "shared": {"up": normal(WIDTH, 16), "down": normal(16, WIDTH)},
    }
    dense = {"up": normal(WIDTH, 64), "down": normal(64, WIDTH)}
    params = {
        "embed": normal(VOCAB, WIDTH),
        "layers": [
            llama_layer(n) | {"mlp": experts() if n else dense} for n in range(4)
        ],
        "norm": jnp.ones(WIDTH),
    }

    def gated(layer, x):
        return jax.nn.silu(x @ layer["up"]) @ layer["down"]

    def routed(layer, x):
        """Each token's two experts, by a product with what is chosen."""
        scores = jax.nn.softmax(x @ layer["router"])
        weights, chosen = jax.lax.top_k(scores, 2)
        weights = weights / weights.sum(-1, keepdims=True)
        combine = (jax.nn.one_hot(chosen, 4) * weights[..., None]).sum(-2)
        up = jax.nn.silu(jnp.einsum("btd,edf->btef", x, layer["up"]))
        out = jnp.einsum("btef,efd,bte->btd", up, layer["down"], combine)
        load = jax.nn.one_hot(chosen, 4).mean((0, 1, 2))
        balance = 4 * jnp.sum(load * scores.mean((0, 1)))
        return out + gated(layer["shared"], x), balance

    def loss(params, batch):
        tokens = batch[:, :-1]
        x, bias, losses = params["embed"][tokens], causal(tokens.shape[1]), []
        for layer in params["layers"]:
            x = llama_attention(layer, x, bias)
            y = rms(x, layer["post_norm"])
            if "router" in layer["mlp"]:
                y, balance = routed(layer["mlp"], y)
                losses.append(balance)
            else:
                y = gated(layer["mlp"], y)
            x = x + y
        total = cross_entropy(rms(x, params["norm"]) @ params["embed"].T, batch)
        return total + 0.01 * jnp.mean(jnp.array(losses)), {"balance": losses}

    return loss, params, TOKENS


@model
def gemma_3_pattern():
    """Two local layers, then a global one: two windows, and two rotary bases."""
    params = {
        "embed": normal(VOCAB, WIDTH),
        "layers": [
            llama_layer(n) | {"up": normal(WIDTH, 32), "down": normal(32, WIDTH)}
            for n in range(6)
        ],
        "norm": jnp.ones(WIDTH),
    }

    def loss(params, batch):
        tokens = batch[:, :-1]
        length = tokens.shape[1]
        x = params["embed"][tokens] * np.sqrt(WIDTH)
        bias = causal(length)
        near = jnp.where(jnp.triu(jnp.ones((length, length), bool), -2), bias, -1e9)
        for n, layer in enumerate(params["layers"]):
            local = (n + 1) % 3 != 0
            x = llama_attention(
                layer, x, near if local else bias, 1e4 if local else 1e6
            )
            y = jax.nn.gelu(rms(x, layer["post_norm"]) @ layer["up"])
            x = x + y @ layer["down"]
        logits = rms(x, params["norm"]) @ params["embed"].T
        return cross_entropy(30.0 * jnp.tanh(logits / 30.0), batch)

    return loss, params, TOKENS


@model
def gemma_3n_inputs():
    """Embeddings of each layer from one large table, projected and gated in it."""
    count, small = 4, 8
    params = {
        "embed": normal(VOCAB, WIDTH),
        "embed_per_layer": normal(VOCAB, count * small),
        "projection": normal(WIDTH, count * small),
        "layers": [
            llama_layer(n)
            | {"gate": normal(WIDTH, small), "out": normal(small, WIDTH)}
            | {"up": normal(WIDTH, 32), "down": normal(32, WIDTH)}
            for n in range(count)
        ],
        "norm": jnp.ones(WIDTH),
    }

    def loss(params, batch):
        tokens = batch[:, :-1]
        x, bias = params["embed"][tokens], causal(tokens.shape[1])
        inputs = params["embed_per_layer"][tokens] + x @ params["projection"]
        inputs = inputs.reshape(*tokens.shape, count, small) * 2**-0.5
        for n, layer in enumerate(params["layers"]):
            x = llama_attention(layer, x, bias)
            y = jax.nn.gelu(rms(x, layer["post_norm"]) @ layer["up"])
            x = x + y @ layer["down"]
            gate = jax.nn.gelu(x @ layer["gate"])
            x = x + (gate * inputs[:, :, n]) @ layer["out"]
        return cross_entropy(rms(x, params["norm"]) @ params["embed"].T, batch)

    return loss, params, TOKENS
