"""Tunix's own trainer, as the example runs it, against itself with plain Optax.

Needs `pip install ".[tunix]"`, which .ci/run does.
"""

import functools
import importlib
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import paged_optax as po
from helpers.reference import assert_equal
from paged_optax.backend.memory import on_host

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix's, and Qwix's
]

#: Batches of an update, by method: Tunix accumulates some of them.
ACCUMULATED = {"full": 2, "lora": 1, "qlora": 2}


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        jax.devices()  # as many as the suite has, whatever the example asks for
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("finetune_tunix")


@pytest.fixture(scope="module")
def train(program):
    """Runs the example; the same run is not made twice, if it saves nothing."""

    def run(method, optimizer, devices, steps, folder=None):
        flags = f"--method={method} --optimizer={optimizer} --devices={devices}"
        flags += f" --steps={steps} --accumulate={ACCUMULATED[method]}"
        flags += " --batch=4 --length=16"
        flags += f" --output-dir={folder}" if folder else ""
        return program.main(flags.split())

    kept = functools.cache(run)
    return lambda *args: (run if len(args) > 4 else kept)(*args)


def moments(trainer):
    """The arrays of `mu` and `nu`, whatever stores them."""
    state = trainer.optimizer.opt_state
    state = getattr(state, "inner_opt_state", state)
    return jax.tree.leaves((state[0].mu, state[0].nu))


def check_places(trainer, devices):
    """Moments on the host and typed so, divided as their parameters; the rest not."""
    assert moments(trainer)
    for x in moments(trainer):
        assert on_host(x) and x.sharding.memory_kind == "pinned_host"
        assert len(x.sharding.device_set) == devices
    assert devices == 1 or any(not x.is_fully_replicated for x in moments(trainer))
    parameters = jax.tree.leaves(nnx.state(trainer.model))
    assert not any(map(on_host, parameters))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("optimizer", ["paged_adamw", "paged_adamw_8bit"])
@pytest.mark.parametrize("method", ACCUMULATED)
def test_as_with_plain_optax(program, train, method, optimizer, devices, tmp_path):
    """Half of the steps, a resume by Tunix, and the other half."""
    plain = train(method, "adamw", devices, 4)
    half = train(method, optimizer, devices, 2, tmp_path)
    # Optax's own would copy moments on a GPU, and give the same numbers here.
    assert isinstance(half.optimizer.tx, po.MultiSteps) == (ACCUMULATED[method] > 1)
    before = jax.device_get(nnx.state(half.optimizer))
    check_places(half, devices)

    resumed = train(method, optimizer, devices, 2, tmp_path)  # and makes no step
    assert resumed.train_steps == 2 and len(program.losses_of(resumed)) == 0
    check_places(resumed, devices)
    assert_equal(nnx.state(resumed.optimizer), before)

    whole = train(method, optimizer, devices, 4, tmp_path)
    assert whole.train_steps == 4
    check_places(whole, devices)
    losses = np.concatenate([program.losses_of(half), program.losses_of(whole)])
    eight_bits = optimizer.endswith("8bit")
    tolerance = 1e-2 if eight_bits else 1e-6
    np.testing.assert_allclose(losses, program.losses_of(plain), rtol=tolerance)
    if eight_bits:
        stored = sum(x.nbytes for x in moments(whole))
        # Adapters of fewer than 4096 values, of keys and values, stay in float32.
        assert stored < 0.35 * sum(x.nbytes for x in moments(plain))
    else:
        for x, y in zip(moments(whole), moments(plain), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * np.abs(y).max())
            assert x.sharding.is_equivalent_to(
                y.sharding.with_memory_kind("pinned_host"), x.ndim
            )
    assert po.host_bytes(nnx.state(plain.optimizer)) == 0


def write_checkpoint(folder, config):
    """A Llama as Hugging Face stores it, of random weights, whose tokens are bytes."""
    draw = np.random.default_rng(0).standard_normal
    width, head = config.embed_dim, config.head_dim
    heads, pairs = config.num_heads * head, config.num_kv_heads * head
    shapes = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (pairs, width),
        "self_attn.v_proj": (pairs, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (config.hidden_dim, width),
        "mlp.up_proj": (config.hidden_dim, width),
        "mlp.down_proj": (width, config.hidden_dim),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"model.norm": (width,), "lm_head": (config.vocab_size, width)}
    shapes |= {"model.embed_tokens": (config.vocab_size, width)}
    weights = {
        f"{name}.weight": 0.1 * draw(shape, np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    tokenizers = importlib.import_module("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return weights


def test_a_checkpoint(program, monkeypatch, tmp_path):
    """Its weights and its tokens are what is trained on."""
    weights = write_checkpoint(tmp_path, program.TINY)
    make = classmethod(lambda kind: program.TINY)
    monkeypatch.setattr(program.ModelConfig, "llama3p2_1b", make)
    flags = f"--checkpoint={tmp_path} --batch=4 --length=16 --steps=1"
    trainer = program.main(flags.split())
    check_places(trainer, 1)
    embedding = trainer.model.embedder.input_embedding.get_value()
    np.testing.assert_array_equal(embedding, weights["model.embed_tokens.weight"])
    args = program.parse_arguments(flags.split())
    (batch,) = program.batches(args)
    assert batch.input_tokens.max() < 256
    assert not np.array_equal(batch.input_tokens, tokens_without(program, args))


def tokens_without(program, args):
    args.checkpoint = None
    (batch,) = program.batches(args)
    return batch.input_tokens
