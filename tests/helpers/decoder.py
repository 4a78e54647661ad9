"""A decoder of real models' shapes, for the accelerator compilers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax

import paged_optax as po
from helpers import aot, programs
from helpers.programs import ordinary_step, placed, shardings, state_on
from paged_optax.planning import models


@dataclasses.dataclass(frozen=True)
class Decoder(models.Decoder):
    """One that computes; without a vocabulary it is its layers alone."""

    head: int = 128
    dtype: type = jnp.float32

    def prologue(self, rest, batch):
        if not self.vocabulary:
            return batch["x"], None
        return rest["embed"][batch["tokens"]], None

    def layer(self, weights, x, context, i):
        batch, length, _ = x.shape
        heads = lambda y: y.reshape(batch, length, -1, self.head)
        y = _normalised(x, weights["norm1"])
        q, k, v = (heads(y @ weights[name]) for name in "qkv")
        times = -(-q.shape[2] // k.shape[2])
        k, v = (jnp.repeat(y, times, 2)[:, :, : q.shape[2]] for y in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.head)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weighted = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
        y = jnp.einsum("bhts,bshd->bthd", weighted, v).reshape(batch, length, -1)
        x = x + y @ weights["o"]
        y = _normalised(x, weights["norm2"])
        return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights[
            "down"
        ], None

    def epilogue(self, rest, x, kept, batch):
        if not self.vocabulary:
            return jnp.mean((x - batch["y"]) ** 2)
        head = rest["embed"].T if self.tied else rest["head"]
        logits = _normalised(x, rest["norm"]) @ head
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        ).mean()

    def loss(self, params, batch):
        """The same as one function of all parameters, each layer computed again."""
        rest = {name: x for name, x in params.items() if name != "layers"}
        layer = jax.checkpoint(lambda x, w: self.layer(w, x, None, 0))
        x, _ = jax.lax.scan(layer, self.prologue(rest, batch)[0], params["layers"])
        return self.epilogue(rest, x, None, batch)

    def batch(self, sharding, size=(1, 512)):
        make = lambda shape, dtype: jax.ShapeDtypeStruct(
            shape, dtype, sharding=sharding
        )
        if self.vocabulary:
            return {name: make(size, jnp.int32) for name in ("tokens", "targets")}
        return {name: make((*size, self.hidden), self.dtype) for name in "xy"}


def _normalised(x, scale):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def layerwise(
    model,
    tx,
    *,
    weights_on_host=False,
    rest_on_host=False,
    host_dtype=None,
    device_dtype=None,
    deferred=False,
    size=None,
    **settings,
):
    """What `aot` compiles: the layerwise step, everything donated."""
    layers = po.LayerwiseModel(model.prologue, model.layer, model.epilogue)
    step = po.layerwise_step(layers, tx, **settings)
    room = {"host_dtype": host_dtype, "device_dtype": device_dtype}

    def build(mesh):
        device, host = aot.placements(mesh)
        params = placed(model.shapes(), device)
        on_host = lambda tree, rank: {
            name: placed(x, host) if len(x.shape) == rank else x
            for name, x in tree.items()
            if name != "layers"
        }
        if weights_on_host:
            params["layers"] = on_host(params["layers"], 3)
        if rest_on_host:
            params |= on_host(params, 2)
        batch = model.batch(device, *([] if size is None else [size]))
        rest = True if deferred else None
        return programs.layerwise(
            mesh, step, layers, tx, params, batch, rest=rest, **room
        )

    return build


def ordinary(model, tx):
    """What a compiler compiles: the ordinary step."""
    step = ordinary_step(model.loss, tx)

    def build(mesh):
        device, _ = aot.placements(mesh)
        params = placed(model.shapes(), device)
        state = state_on(mesh, tx, model.shapes())
        places = shardings((params, state))
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, device))
        return jitted, (params, state, model.batch(device))

    return build


QWEN = functools.partial(Decoder, hidden=2560, key=1024, inner=9728, layers=36)
#: The shapes of the reference implementation: layers alone, a narrower attention.
REFERENCE = QWEN(query=2560)
QWEN3_4B = QWEN(query=4096, vocabulary=151936, dtype=jnp.bfloat16)
#: Of four layers, with an output matrix of its own, to run.
_SIZES = {"hidden": 128, "query": 128, "key": 64, "inner": 256, "layers": 4}
SMALL = Decoder(**_SIZES, vocabulary=512, tied=False, head=32)
_LLAMA3 = functools.partial(
    Decoder, key=1024, vocabulary=128256, tied=False, dtype=jnp.bfloat16
)
LLAMA3_70B = _LLAMA3(hidden=8192, query=8192, inner=28672, layers=80)
LLAMA3_8B = _LLAMA3(hidden=4096, query=4096, inner=14336, layers=32)
