"""Runs of `examples/finetune_hf` on models of real sizes, of which only shapes are.

The example's own packages are optional: only slow tests import this.
"""

import pathlib
from typing import Any

import jax
import numpy as np
from finetune_hf.folder import Folder
from finetune_hf.run import Run
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import aot, hf_folders
from paged_optax.backend.memory import PINNED_HOST

BATCH, LENGTH = 4, 2048
SCALED = hf_folders.SCALED | {"original_max_position_embeddings": 8192}
del SCALED["rope_theta"]
#: What the models' `config.json` say, as far as shapes and programs depend on it.
_NAMES = "vocab_size hidden_size intermediate_size num_hidden_layers"
_NAMES += " num_attention_heads num_key_value_heads"
_sizes = lambda *numbers: dict(zip(_NAMES.split(), numbers, strict=True))
CONFIGS = {
    "Qwen3-4B": {
        **_sizes(151_936, 2560, 9728, 36, 32, 8),
        "head_dim": 128,
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
        "architectures": ["Qwen3ForCausalLM"],
    },
    "Llama-3.1-8B": {
        **_sizes(128_256, 4096, 14_336, 32, 32, 8),
        **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False},
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": SCALED,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            **_sizes(262_208, 2560, 10_240, 34, 8, 4),
            "head_dim": 256,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
}


class Shapes(Folder):
    """A folder of which there is only the configuration."""

    dtype = np.dtype(jax.numpy.bfloat16)


def run_of(name: str, method: str, devices: int = 1) -> Run:
    """A run with the command's defaults, that reads nothing."""
    config = CONFIGS[name]
    names = {"language_model.model.": None} if "text_config" in config else {}
    folder = Shapes(pathlib.Path(name), config, names, {})  # pyright: ignore
    batch = BATCH if devices == 1 else devices
    sizes = "--batch", str(batch), "--devices", str(devices), "--length", str(LENGTH)
    return hf_folders.run_of(folder, LENGTH, "--method", method, *sizes)


def compiled(run: Run, card: str) -> Any:
    """What XLA makes of the run's step for a card, by its way."""

    def build(mesh):
        mesh = run.mesh or mesh

        def placed(x):
            there = getattr(x, "sharding", None)
            kind = getattr(there, "memory_kind", None)
            kind = kind if kind == PINNED_HOST else "device"
            place = NamedSharding(
                mesh, getattr(there, "spec", PartitionSpec()), memory_kind=kind
            )
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        carry = jax.tree.map(placed, tuple(run.target()))
        given = next(run.batches()), *run.frozen_shapes()
        step = po.layerwise_step(run.split, run.tx, max_norm=1.0, accumulate=True)
        places = *jax.tree.map(lambda x: x.sharding, carry), aot.placements(mesh)[0]
        jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=places)
        return jitted, (*carry, *jax.tree.map(placed, given))

    return aot.h200(build, run.args.devices, card)
