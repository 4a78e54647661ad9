"""A decoder as people write it: a loss over a list or a scan, and three functions."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import paged_optax as po
from examples.attention import attention as attend
from helpers import aot
from helpers.programs import layerwise, placed


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder with grouped queries, SwiGLU, RMS norms and rotations."""

    width: int  # of the residual stream
    inner: int  # of the hidden layer of the feed-forward part
    heads: int  # of queries
    grouped: int  # of keys and values
    layers: int  # how many
    vocabulary: int  # how many tokens there are
    head: int = 128  # of one head
    tied: bool = True  # whether the output matrix is the embedding
    normed: bool = True  # whether queries and keys are normalised, as Qwen 3 does
    fused: bool = False  # whether the head is `po.linear_cross_entropy`
    #: Of its vocabulary; with the whole of it the backward pass reads the logits of the
    #: forward pass.
    chunk: int | None = None
    #: Whether attention is the examples', which holds no scores on a GPU.
    flash: bool = False
    remat: bool = False  # whether each layer is a `jax.checkpoint`
    #: Of how many blocks of queries the scores are computed one after the other, and
    #: again in the backward pass.
    blocks: int = 1
    dtype: type = jnp.bfloat16  # of the parameters

    @classmethod
    def of(cls, sizes, **others):
        """One with the sizes of a `decoder.Decoder`."""
        return cls(
            width=sizes.hidden,
            inner=sizes.inner,
            heads=sizes.query // sizes.head,
            grouped=sizes.key // sizes.head,
            head=sizes.head,
            layers=sizes.layers,
            vocabulary=sizes.vocabulary,
            tied=sizes.tied,
            **others,
        )

    def layer_shapes(self):
        """One layer's parameters."""
        d, q, k = self.width, self.heads * self.head, self.grouped * self.head
        norms = {"q": (self.head,), "k": (self.head,)} if self.normed else {}
        return {
            "attention": {"q": (d, q), "k": (d, k), "v": (d, k), "o": (q, d)},
            "mlp": {"gate": (d, self.inner), "up": (d, self.inner)}
            | {"down": (self.inner, d)},
            "norms": norms | {"attention": (d,), "mlp": (d,)},
        }

    def feed_forward(self, weights, y):
        """What a layer adds after attention."""
        hidden = jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])
        hidden = checkpoint_name(hidden, "hidden")
        return hidden @ weights["down"]

    def params(self, *, stacked=False):
        """Shapes of all parameters."""
        one = self.layer_shapes()
        is_shape = lambda x: isinstance(x, tuple)
        shape = lambda x: jax.ShapeDtypeStruct(x, self.dtype)
        if stacked:
            stack = lambda x: shape((self.layers, *x))
            layers = jax.tree.map(stack, one, is_leaf=is_shape)
        else:
            layers = [jax.tree.map(shape, one, is_leaf=is_shape)] * self.layers
        rest = {"embed": shape((self.vocabulary, self.width))}
        rest["norm"] = shape((self.width,))
        if not self.tied:
            rest["head"] = shape((self.width, self.vocabulary))
        return rest | {"layers": layers}


@jax.named_scope("norm")
def rms(x, scale):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def rotary(tokens, head):
    """Cosines and sines of the tokens' positions."""
    positions = jnp.arange(tokens.shape[-1], dtype=jnp.float32)
    rates = 1e6 ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angles = positions[:, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("attention")
def rotated(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def attention(config, weights, norms, x, cos, sin, mask):
    batch, length, _ = x.shape
    heads = lambda y, n: y.reshape(batch, length, n, config.head)
    q = heads(x @ weights["q"], config.heads)
    k = heads(x @ weights["k"], config.grouped)
    v = heads(x @ weights["v"], config.grouped)
    if config.normed:
        q, k = rms(q, norms["q"]), rms(k, norms["k"])
    q, k = (checkpoint_name(rotated(x, cos, sin), "rotated") for x in (q, k))
    if config.flash:
        return attend(q, k, v).reshape(batch, length, -1) @ weights["o"]
    grouped = config.grouped, q.shape[2] // config.grouped, config.head
    q = q.reshape(batch, config.blocks, -1, *grouped)
    mask = mask.reshape(config.blocks, -1, length)

    @jax.checkpoint
    def mixed(given):
        q, mask = given
        scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(jnp.float32)
        scores = jnp.where(mask, scores * config.head**-0.5, -1e30)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return jnp.einsum("bghts,bsgd->btghd", shares, v)

    made = jax.lax.map(mixed, (jnp.moveaxis(q, 1, 0), mask))
    return jnp.moveaxis(made, 0, 1).reshape(batch, length, -1) @ weights["o"]


#: What `saved` saves beside products: what they are computed from.
SAVED = ("rotated", "residual", "hidden")


def saved(primitive, *args, **settings):
    """A policy of `jax.checkpoint`: norms alone are computed again."""
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return _PRODUCTS(primitive, *args, **settings)


_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(*SAVED),
)


def block(config, weights, x, cos, sin, mask):
    norms = weights["norms"]
    y = rms(x, norms["attention"])
    x = x + attention(config, weights["attention"], norms, y, cos, sin, mask)
    x = checkpoint_name(x, "residual")
    return x + config.feed_forward(weights["mlp"], rms(x, norms["mlp"]))


def before(config, rest, batch):
    tokens = batch["tokens"]
    length = tokens.shape[-1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    return rest["embed"][tokens], (*rotary(tokens, config.head), mask)


@jax.named_scope("head")
def after(config, rest, x, batch):
    x = rms(x, rest["norm"])
    if config.fused:
        head, axis = (rest["embed"], 0) if config.tied else (rest["head"], 1)
        labels = batch["targets"]
        settings = {"vocab_axis": axis, "chunk": config.chunk}
        return po.linear_cross_entropy(x, head, labels, **settings).mean()
    head = rest["embed"].T if config.tied else rest["head"]
    logits = (x @ head).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["targets"]
    ).mean()


def listed(config):
    """The loss over a list of layers."""

    def run(weights, x, *seen):
        return block(config, weights, x, *seen)

    run = jax.checkpoint(run) if config.remat else run

    def loss(params, batch):
        x, seen = before(config, params, batch)
        for weights in params["layers"]:
            x = run(weights, x, *seen)
        return after(config, params, x, batch)

    return loss


def scanned(config):
    """The loss over a scan of stacked parameters."""

    def loss(params, batch):
        x, seen = before(config, params, batch)
        turn = lambda x, weights: (block(config, weights, x, *seen), None)
        turn = jax.checkpoint(turn) if config.remat else turn
        x, _ = jax.lax.scan(turn, x, params["layers"])
        return after(config, params, x, batch)

    return loss


def by_hand(config):
    """The three functions."""
    return po.LayerwiseModel(
        lambda rest, batch: before(config, rest["rest"], batch),
        lambda weights, x, seen, i: (block(config, weights, x, *seen), None),
        lambda rest, x, kept, batch: after(config, rest["rest"], x, batch),
    )


def batch_of(size):
    tokens = jax.ShapeDtypeStruct(size, jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def split(config, size, *, scan=False):
    """The loss taken apart."""
    loss = scanned(config) if scan else listed(config)
    return po.split_layers(loss, config.params(stacked=scan), batch_of(size))


def stacked_shapes(config):
    """What `stack` gives."""
    params = config.params(stacked=True)
    return {"layers": params.pop("layers"), "rest": params}


def step(
    config,
    model,
    tx,
    size,
    *,
    on_host=False,
    rest_on_host=False,
    micro=None,
    room=None,
    **settings,
):
    """What `aot` compiles: the layerwise step, everything donated."""
    run = po.layerwise_step(model, tx, accumulate=micro is not None, **settings)

    def build(mesh):
        device, host = aot.placements(mesh)
        shapes = stacked_shapes(config)
        params = placed(shapes, device)
        hosted = lambda tree, is_hosted: jax.tree.map(
            lambda x: placed(x, host if is_hosted(len(x.shape)) else device), tree
        )
        if on_host:
            params["layers"] = hosted(shapes["layers"], lambda rank: rank > 2)
        if rest_on_host:
            params["rest"] = hosted(shapes["rest"], lambda rank: rank == 2)
        shape = size if micro is None else (micro, *size)
        return layerwise(mesh, run, model, tx, params, batch_of(shape), **(room or {}))

    return build
