"""Tunix's models, small and none of them changed, and the losses of their logits."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 13))
SIZES = {
    "num_layers": 4,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
}
QWEN = {"vocab_size": 64, "rope_theta": 10_000, "norm_eps": 1e-6}
FLOAT32 = {"param_dtype": jnp.float32}
LOCAL = {"num_embed": 64, "sliding_window_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GEMMA2 = {
    "final_logit_softcap": 30.0,
    "attn_logits_soft_cap": 50.0,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
}


def module_of(package):
    module = importlib.import_module(f"tunix.models.{package}.model")
    # Its import does this once; conftest.py undoes it.
    importlib.import_module("tunix.utils.env_utils").setup_sharding_environment()
    return module


def made(package, name, remat="NONE", **sizes):
    """A model, every parameter of which counts for something."""
    module = module_of(package)
    fields = {x.name for x in dataclasses.fields(module.ModelConfig)}
    sizes = {k: v for k, v in (SIZES | sizes).items() if k in fields}
    remat = module.RematConfig[remat]
    config = module.ModelConfig(**sizes, remat_config=remat)
    model = getattr(module, name)(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    noise = np.random.default_rng(1).standard_normal
    shift = lambda x: x + 0.05 * noise(x.shape).astype(x.dtype)
    nnx.update(model, jax.tree.map(shift, state))
    return model


def loss_of(model, batch):
    """The ordinary loss of the next token."""
    length = batch.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(length), (len(batch), length))
    mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(batch), length, length))
    logits, _ = model(batch[:, :-1], positions, None, mask)
    labels = batch[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def whole(*args, **sizes):
    """All parameters are trained."""
    graphdef, params, others = nnx.split(made(*args, **sizes), nnx.Param, ...)

    def loss(params, batch):
        return loss_of(nnx.merge(graphdef, params, others), batch)

    return loss, params, TOKENS


def qwen3_4b():
    """The loss of Qwen3-4B in bfloat16, and its parameters' shapes."""
    module, narrow = module_of("qwen3"), jnp.bfloat16
    config = module.ModelConfig.qwen3_4b()
    config = dataclasses.replace(config, dtype=narrow, param_dtype=narrow)
    model = nnx.eval_shape(lambda: module.Qwen3(config, rngs=nnx.Rngs(0)))
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        return loss_of(nnx.merge(graphdef, params, others), batch)

    return loss, params


def adapters(*args, qtype=None, **sizes):
    """LoRA, or QLoRA: the base is frozen."""
    # Stacks of 4096 values a layer go to the host.
    model = made(*args, **sizes, embed_dim=64, hidden_dim=96)
    provider = qwix.LoraProvider(
        module_path=".*(q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj)",
        rank=4,
        alpha=8,
        **({"weight_qtype": qtype, "tile_size": 16} if qtype else {}),
    )
    given = model.get_model_input()
    model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(2), **given)
    graphdef, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
    noise = np.random.default_rng(3).standard_normal
    params = jax.tree.map(lambda x: x + 0.05 * noise(x.shape).astype(x.dtype), params)

    def loss(params, frozen, batch):
        return loss_of(nnx.merge(graphdef, params, frozen), batch)

    return loss, params, TOKENS, frozen


def gemma2(remat="NONE"):
    types = module_of("gemma").AttentionType
    turns = (types.LOCAL_SLIDING, types.GLOBAL) * 2
    return whole("gemma", "Gemma", remat, **LOCAL, **GEMMA2, attention_types=turns)


def gemma4(**more):
    types = module_of("gemma4").AttentionType
    turns = (types.LOCAL_SLIDING, types.GLOBAL)
    sizes = {"global_key_size": 8, "attention_pattern": turns}
    return whole("gemma4", "Gemma4", **LOCAL, **sizes, **more)


QWEN3, GEMMA3 = ("qwen3", "Qwen3"), ("gemma3", "Gemma3")
LLAMA3, QWEN2 = ("llama3", "Llama3"), ("qwen2", "Qwen2")
whole_ = functools.partial(functools.partial, whole)
MODELS = {
    "qwen3": whole_(*QWEN3, **QWEN),
    "qwen3_tied": whole_(*QWEN3, **QWEN, use_tied_embedding=True),
    "qwen3_experts": whole_(*QWEN3, **QWEN, **EXPERTS),
    "gemma3": whole_(*GEMMA3, **LOCAL, **FLOAT32, num_layers=7),
    "llama3": whole_(*LLAMA3, **QWEN),
    "llama3_tied": whole_(*LLAMA3, **QWEN, weight_tying=True),
    "qwen2": whole_(*QWEN2, **QWEN),
    "gemma2": gemma2,
    "gemma4": gemma4,
    "gemma4_layer_inputs": functools.partial(gemma4, per_layer_input_dim=8),
    "gemma4_experts": functools.partial(
        gemma4, enable_moe=True, expert_dim=16, moe_dense_hidden_dim=16, **EXPERTS
    ),
    "qwen3_block_remat": whole_(*QWEN3, "BLOCK", **QWEN),
    "qwen3_experts_decoder_remat": whole_(*QWEN3, "DECODER", **QWEN, **EXPERTS),
    "gemma3_block_remat": whole_(*GEMMA3, "BLOCK", **LOCAL, **FLOAT32, num_layers=7),
    "gemma3_decoder_remat": whole_(
        *GEMMA3, "DECODER", **LOCAL, **FLOAT32, num_layers=7
    ),
    "llama3_decoder_remat": whole_(*LLAMA3, "DECODER", **QWEN),
    "qwen2_block_remat": whole_(*QWEN2, "BLOCK", **QWEN),
    "llama3_lora": functools.partial(adapters, *LLAMA3, **QWEN),
    "llama3_qlora_nf4": functools.partial(adapters, *LLAMA3, qtype="nf4", **QWEN),
    "llama3_qlora_int8": functools.partial(adapters, *LLAMA3, qtype="int8", **QWEN),
    "qwen3_lora": functools.partial(adapters, *QWEN3, **QWEN),
    # By `jax.grad` too, Qwix 0.1.8 fails on its remat, and on Qwen3 in eight bits.
}
