"""Tunix's own trainer, as the example runs it, against itself with plain Optax.

Needs `pip install ".[tunix]"`, which .ci/run does.
"""

import functools
import importlib
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import paged_optax as po
from helpers.reference import assert_equal
from paged_optax.backend.memory import on_host

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix's, and Qwix's
]

#: Batches of an update, by method: Tunix accumulates some of them.
ACCUMULATED = {"full": 2, "lora": 1, "qlora": 2}
#: By reinforcement learning the optimizers are wrapped as Tunix's guides have them.
INJECT = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        jax.devices()  # as many as the suite has, whatever the example asks for
        patch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module("finetune_tunix")
        # Importing a model does this once; conftest.py undoes it.
        importlib.import_module("tunix.utils.env_utils").setup_sharding_environment()
        yield module


@pytest.fixture(scope="module")
def train(program):
    """Runs the example; the same run is not made twice, if it saves nothing."""

    def run(method, optimizer, devices, steps, folder=None):
        flags = f"--method={method} --optimizer={optimizer} --devices={devices}"
        flags += f" --steps={steps} --accumulate={ACCUMULATED.get(method, 2)}"
        flags += " --batch=4 --length=16"
        flags += f" --output-dir={folder}" if folder else ""
        return program.main(flags.split())

    kept = functools.cache(run)
    return lambda *args: (run if len(args) > 4 else kept)(*args)


def moments(trainer):
    """The arrays of `mu` and `nu`, whatever stores them."""
    state = trainer.optimizer.opt_state
    state = getattr(state, "inner_opt_state", state)
    state = getattr(state, "inner_state", state)
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


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("bits", ["", "_8bit"])
def test_reinforcement_learning(program, train, bits, devices, tmp_path, monkeypatch):
    """GRPO, as Tunix's own trainer computes it with the same moments on the device.

    While it samples they are on the host. A resume continues with the same texts.
    """
    plain = functools.partial(po.paged_adamw_8bit, device_budget=None)
    paged = program.OPTIMIZERS["paged_adamw_8bit"]
    if not bits:
        plain = INJECT(optax.adamw)
        paged = lambda rate: INJECT(po.paged_adamw)(rate, min_paged_size="0B")
        if devices > 1:  # around `paged`, a `jax.jit` would forget the mesh
            paged = lambda rate: po.paged(INJECT(optax.adamw)(rate), min_paged_size=0)
    monkeypatch.setitem(program.OPTIMIZERS, f"adamw{bits}", plain)
    monkeypatch.setitem(program.OPTIMIZERS, f"paged_adamw{bits}", paged)
    learners, sampled = [], []
    build, reward = program.new_learner, program.letters

    def learner(*args):
        learners.append(build(*args))
        return learners[-1]

    def letters(prompts, completions, **other):
        trainer = learners[-1].rl_cluster.actor_trainer
        if isinstance(trainer, program.Paged):
            check_places(trainer, devices)
        sampled.append((prompts, completions))
        return reward(prompts, completions, **other)

    monkeypatch.setattr(program, "new_learner", learner)
    monkeypatch.setattr(program, "letters", letters)
    own = train("grpo", f"adamw{bits}", devices, 4)
    assert not any(map(on_host, moments(own)))

    half = train("grpo", f"paged_adamw{bits}", devices, 2, tmp_path)
    assert isinstance(half.optimizer.tx, po.MultiSteps)
    before = jax.device_get(nnx.state(half.optimizer))
    resumed = train("grpo", f"paged_adamw{bits}", devices, 2, tmp_path)
    assert resumed.train_steps == 2 and len(program.losses_of(resumed)) == 0
    check_places(resumed, devices)
    assert_equal(nnx.state(resumed.optimizer), before)
    whole = train("grpo", f"paged_adamw{bits}", devices, 4, tmp_path)
    check_places(whole, devices)

    count = len(sampled) // 2
    assert sampled[:count] == sampled[count:]
    for trainer in (half, whole):
        assert trainer._jit_cache <= own._jit_cache, (
            trainer._jit_cache,
            own._jit_cache,
        )
    losses = np.concatenate([program.losses_of(half), program.losses_of(whole)])
    assert np.abs(losses).max() > 1e-4
    np.testing.assert_allclose(losses, program.losses_of(own), rtol=1e-3, atol=1e-6)
    ours, theirs = (jax.tree.leaves(nnx.state(x.model)) for x in (whole, own))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


#: Of these sizes a `config.json` is all but what its `model_type` needs.
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
#: What Tunix computes, and the last four of the logits for `TOKENS` that transformers
#: 5.12 computes of the weights that are written below.
COMPUTED = {
    "llama": ({"rms_norm_eps": 1e-2}, [-1.94605, -0.55142, 1.40138, -0.71232]),
    "llama, tied": (
        {"model_type": "llama", "tie_word_embeddings": True},
        [-1.79284, -1.01, 0.29007, 0.57198],
    ),
    "mistral": (
        {"sliding_window": None, "num_key_value_heads": 1},
        [-1.34275, -0.41115, 1.15898, 1.80859],
    ),
    "qwen2": (
        {"rope_theta": 12345.0, "sliding_window": 8},
        [-0.87907, 1.79376, 1.01143, -0.09134],
    ),
    "qwen3": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        [-0.65692, 1.53332, 0.94027, -0.39455],
    ),
}
SCALED = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
#: What it does not: the `model_type`, its field, and the value.
NOT_COMPUTED = [
    ("llama", "rope_theta", 500000.0),  # Llama 3's
    ("llama", "rope_theta", 10000.0),  # what it is where it is absent
    ("qwen3", "rope_theta", 5000000),  # Qwen3-4B-Instruct-2507's
    ("llama", "rope_scaling", SCALED),
    ("llama", "rope_parameters", {"rope_theta": 1e6} | SCALED),
    ("qwen2", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("qwen2", "hidden_act", "gelu"),
    ("llama", "attention_bias", True),
    ("qwen3", "attention_bias", True),
    ("llama", "mlp_bias", True),
    ("llama", "attention_dropout", 0.1),
    ("mistral", "sliding_window", 4096),
    ("llama", "num_local_experts", 8),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("llama", "dtype", "float64"),
    ("llama", "architectures", ["LlamaForSequenceClassification"]),
    ("gemma", "model_type", "gemma"),
    ("llama3", "model_type", "llama3"),
    (None, "model_type", None),
]
TOKENS = np.arange(48, dtype=np.int32)[None] * 89 % 256


def leaf_shapes(config):
    """Of the tensors that Hugging Face stores for a `config.json`, by name."""
    width, head, inner = (
        config[x] for x in ("hidden_size", "head_dim", "intermediate_size")
    )
    heads = config["num_attention_heads"] * head
    pairs = config["num_key_value_heads"] * head
    vocabulary = (config["vocab_size"], width)
    layer = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (pairs, width),
        "self_attn.v_proj.weight": (pairs, width),
        "self_attn.o_proj.weight": (width, heads),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if config["model_type"] == "qwen2":
        layer |= {"self_attn.q_proj.bias": (heads,)}
        layer |= {f"self_attn.{x}_proj.bias": (pairs,) for x in "kv"}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (head,) for x in "qk"}
    shapes = {"model.norm.weight": (width,), "model.embed_tokens.weight": vocabulary}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocabulary
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def write_checkpoint(folder, **config):
    """A model as Hugging Face stores it, of random weights, whose tokens are bytes."""
    draw = np.random.default_rng(0).standard_normal
    config = SIZES | config
    weights = {
        name: 0.25 * draw(shape, np.float32) + name.endswith("norm.weight")
        for name, shape in leaf_shapes(config).items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def write_tokenizer(folder):
    tokenizers = importlib.import_module("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_checkpoint(program, kind, tmp_path):
    """Its weights and its tokens are what is trained on."""
    weights = write_checkpoint(tmp_path, model_type=kind)
    write_tokenizer(tmp_path)
    flags = f"--checkpoint={tmp_path} --batch=4 --length=16 --steps=1 --rank=256"
    trainer = program.main(flags.split())
    check_places(trainer, 1)
    embedding = trainer.model.embedder.input_embedding.get_value()
    np.testing.assert_array_equal(embedding, weights["model.embed_tokens.weight"])
    args = program.parse_arguments(flags.split())
    (batch,) = program.batches(args)
    assert batch.input_tokens.max() < 256
    assert not np.array_equal(batch.input_tokens, tokens_without(program, args))


def logits_of_tunix(program, folder):
    model, mask = program.load(folder, None, None), np.ones_like(TOKENS, bool)
    batch = program.TrainingInput(input_tokens=TOKENS, input_mask=mask)
    given = program.model_input(batch)
    tokens, positions = given["input_tokens"], given["positions"]
    return np.asarray(model(tokens, positions, None, given["attention_mask"])[0])


@pytest.mark.parametrize("name", COMPUTED)
def test_a_checkpoint_is_the_model_of_transformers(program, name, tmp_path):
    fields, last = COMPUTED[name]
    write_checkpoint(tmp_path, **{"model_type": name} | fields)
    logits = logits_of_tunix(program, tmp_path)
    np.testing.assert_allclose(logits[0, -1, -4:], last, atol=1e-4)
    torch = pytest.importorskip(
        "torch", reason="pip install '.[oracle]' for all logits"
    )
    auto = program.transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path)(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "field", "value"), NOT_COMPUTED, ids=lambda x: str(x)[:20]
)
def test_another_model_s_checkpoint_is_refused(program, kind, field, value, tmp_path):
    config = SIZES | {"sliding_window": None, "model_type": kind, field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = "{" if isinstance(value, dict) else f"{value!r}, not"
    with pytest.raises(ValueError, match=re.escape(f" {field} is {shown}")):
        program.main([f"--checkpoint={tmp_path}", "--steps=1"])


CHECKPOINT_MISTAKES = {
    "no config.json": "config.json' is no file",
    "another family": "--model 'qwen3-0.6b' is no llama",
    "fewer layers": "stores [0-9]+ values, and the model .* has [0-9]+",
    "biases": "stores [0-9]+ values, and the model .* has [0-9]+",
    "two dtypes": "holds tensors of float16, float32",
}


@pytest.mark.parametrize("mistake", CHECKPOINT_MISTAKES)
def test_a_checkpoint_that_does_not_fit(program, mistake, tmp_path):
    weights = write_checkpoint(tmp_path, model_type="llama")
    config = tmp_path / "config.json"
    if mistake == "no config.json":
        config.unlink()
    elif mistake == "fewer layers":
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1})
        )
    elif mistake == "biases":
        weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    elif mistake == "two dtypes":
        weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float16)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    name = "qwen3-0.6b" if mistake == "another family" else "llama-3.2-1b"
    with pytest.raises(ValueError, match=CHECKPOINT_MISTAKES[mistake]):
        program.main([f"--checkpoint={tmp_path}", f"--model={name}", "--steps=1"])


def test_a_checkpoint_has_the_dtype_of_its_config(program, tmp_path):
    write_checkpoint(tmp_path, model_type="qwen3", torch_dtype="bfloat16")
    model = program.load(tmp_path, None, None)
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}


def test_a_checkpoint_of_qwen_has_no_weights_in_four_bits(program, tmp_path):
    write_checkpoint(tmp_path, model_type="qwen3")
    with pytest.raises(ValueError, match="--method qlora: Tunix's Qwen3 casts"):
        program.main([f"--checkpoint={tmp_path}", "--method=qlora", "--steps=1"])


def tokens_without(program, args):
    args.checkpoint = None
    (batch,) = program.batches(args)
    return batch.input_tokens
