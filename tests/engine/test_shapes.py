"""Shapes of named models, of modules and of checkpoints."""

import json
import math
import pathlib
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import linen, nnx

import paged_optax as po
from paged_optax.planning import checkpoint
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.models import DECODERS, module_shapes, of_size


def count(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        # Less 256 a layer, of norms within the heads.
        ("qwen3-0.6b", 596_049_920 - 28 * 256),
        ("qwen3-4b", 4_022_468_096 - 36 * 256),
        ("qwen3-8b", 8_190_735_360 - 36 * 256),
        ("qwen3-32b", 32_762_123_264 - 64 * 256),
    ],
)
def test_named_models_have_their_published_size(name, parameters):
    assert count(po.model_shapes(name)) == parameters


@pytest.mark.parametrize("size", [5e7, 3.5e8, 1e9, 1.3e10, 7e10, 4e11])
def test_a_size_is_met(size):
    assert of_size(size).size == pytest.approx(size, rel=0.02)


def test_eight_billion_parameters_are_llama_3():
    assert of_size(8e9) == DECODERS["llama3-8b"]


def test_dtype():
    shapes = po.model_shapes("350M", dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama-3-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("LLAMA 3.2 1b", "llama3.2-1b"),
        ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("1e9", "1B"),
        ("8030261248", "llama3-8b"),
        (" 0.5t", "500B"),
    ],
)
def test_ways_to_write_a_name(written, name):
    assert po.model_shapes(written) == po.model_shapes(name)


@pytest.mark.parametrize("name", ["llama9", "llama-38b", "8", "8GB", "", "1M", "9e99"])
def test_no_such_model(name):
    with pytest.raises(ValueError, match="8B.*llama3-8b|fewer|more than|mean 8B"):
        po.model_shapes(name)


def nnx_model():
    return nnx.Linear(64, 32, rngs=nnx.Rngs(0))


def linen_model():
    return linen.Dense(32), jnp.ones((1, 64))


def own_shapes():
    return {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}


def huge_model():
    return nnx.Linear(2**20, 2**20, rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "models_of_mine", sys.modules[__name__])


@pytest.mark.parametrize("name", ["nnx_model", "linen_model"])
def test_flax_modules(name):
    found = module_shapes(f"models_of_mine:{name}")
    assert {k: x.shape for k, x in found.items()} == {"kernel": (64, 32), "bias": (32,)}


def test_other_functions():
    assert module_shapes("models_of_mine:own_shapes") == own_shapes()


def test_nothing_is_allocated():
    assert count(module_shapes("models_of_mine:huge_model")) > 2**40


@pytest.mark.parametrize(
    "name", ["models_of_mine", "models_of_mine:missing", "no_such_module:make"]
)
def test_no_such_module(name):
    with pytest.raises(ValueError, match=f"'{name}': --module .*package.module:"):
        module_shapes(name)


ARRAYS = {
    "model.embed.weight": np.ones((16, 8), np.float16),
    "model.layers.0.weight": np.ones((8, 8), np.float32),
    "position_ids": np.arange(4),
}


@pytest.fixture
def file(tmp_path):
    safetensors.numpy.save_file(
        ARRAYS, tmp_path / "model.safetensors", {"format": "pt"}
    )
    return tmp_path / "model.safetensors"


def test_safetensors(file):
    found = checkpoint_shapes(file)
    assert checkpoint_shapes(file.parent) == found
    wanted = {k: (x.shape, x.dtype) for k, x in ARRAYS.items() if x.dtype.kind == "f"}
    assert {k: (x.shape, x.dtype) for k, x in found.items()} == wanted


def test_safetensors_in_several_files(file):
    safetensors.numpy.save_file(
        {"head": np.ones((8, 16), np.float32)}, file.with_name("model-2.safetensors")
    )
    assert len(checkpoint_shapes(file.parent)) == 3


def test_bfloat16(tmp_path):
    header = {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    assert checkpoint_shapes(path)["w"].dtype == jnp.bfloat16


#: From the repositories of these models.
CONFIGS = {
    "llama3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
}


def written(path, **fields):
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_hugging_face(name, tmp_path):
    path = written(tmp_path / "config.json", **CONFIGS[name])
    assert checkpoint_shapes(path) == po.model_shapes(name)
    assert checkpoint_shapes(tmp_path) == po.model_shapes(name)


def index(folder, file, **metadata):
    """An index of one tensor, as Hugging Face writes them."""
    path = folder / "model.safetensors.index.json"
    return written(path, metadata=metadata, weight_map={"model.norm.weight": file})


def test_index_with_its_weights(file):
    """Other files of the folder are not the model's."""
    safetensors.numpy.save_file(
        {"again": np.ones((8, 16), np.float32)},
        file.with_name("consolidated.safetensors"),
    )
    path = index(file.parent, file.name)
    assert checkpoint_shapes(path) == checkpoint_shapes(file)
    assert checkpoint_shapes(file.parent) == checkpoint_shapes(file)


def test_index_without_its_weights(tmp_path):
    """Llama-3-8B's own says 16,060,522,496 bytes."""
    path = index(tmp_path, "model-1.safetensors", total_size=16_060_522_496)
    with pytest.raises(ValueError, match="put config.json beside it"):
        checkpoint_shapes(path)
    written(tmp_path / "config.json", **CONFIGS["llama3-8b"])
    assert checkpoint_shapes(path) == po.model_shapes("llama3-8b")
    for size in (8_030_261_248, float("nan"), 10**400, "all"):
        index(tmp_path, "model-1.safetensors", total_size=size)
        with pytest.raises(ValueError, match="index.json.*'metadata.total_size'.*conf"):
            checkpoint_shapes(path)


def test_a_header_is_enough(file):
    content = file.read_bytes()
    whole = checkpoint_shapes(file)
    file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    assert checkpoint_shapes(file) == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("model_type", ["llama"]),
        ("hidden_size", -4096),
        ("hidden_size", "4096"),
        ("hidden_size", True),
        ("intermediate_size", 1e4),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 1 << 40),
        ("num_attention_heads", 0),
        ("head_dim", {}),
        ("vocab_size", float("nan")),
        ("tie_word_embeddings", "no"),
        ("torch_dtype", "int4"),
    ],
    ids=str,
)
def test_a_config_that_is_not_usable(field, value, tmp_path):
    path = written(tmp_path / "config.json", **CONFIGS["llama3-8b"] | {field: value})
    with pytest.raises(ValueError, match=f"config.json': field '{field}' is"):
        checkpoint_shapes(path)


def test_a_config_of_too_large_a_model(tmp_path):
    large = {"hidden_size": 1 << 31, "num_hidden_layers": 1 << 31}
    path = written(tmp_path / "config.json", **CONFIGS["llama3-8b"] | large)
    with pytest.raises(ValueError, match="config.json' describes .* parameters"):
        checkpoint_shapes(path)


def headed(path, text, length=None):
    """A safetensors file of that header, and nothing more."""
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text)
    return path


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": [1]}, "field 'w' is"),
        ({"w": {"shape": [2]}}, "field 'w' is .*, not dtype, shape and"),
        ({"w": {"dtype": "F32"}}, "field 'w' is .*, not dtype, shape and"),
        ({"w": TENSOR | {"shape": [-1]}}, "field 'w' is"),
        ({"w": TENSOR | {"shape": [1.5]}}, "field 'w' is"),
        ({"w": TENSOR | {"shape": [1 << 40] * 4}}, "field 'w' is"),
        ({"w": TENSOR | {"shape": [1] * 99}}, "field 'w' is"),
        ({"w": TENSOR | {"dtype": "F33"}}, "field 'w' is"),
        ({"w": {"dtype": "I64", "shape": [2]}}, "field 'w' is"),
        (
            {"w": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}},
            "no floating point arrays",
        ),
        ([], "no object with fields"),
        (b"{" * 9, "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b"\xff\xfe", "holds no JSON"),
        (b"9" * 5000, "holds no JSON"),
        (b"", "holds no JSON"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_header_that_is_not_usable(header, words, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        checkpoint_shapes(headed(tmp_path / "w.safetensors", header))
    assert "w.safetensors" in str(error.value) and len(str(error.value)) < 400


def test_no_file_is_read_beyond_its_bounds(tmp_path, monkeypatch):
    """Sparse files: they claim gigabytes, and have none."""
    path = headed(tmp_path / "w.safetensors", b"{}", length=1 << 33)
    config = written(tmp_path / "config.json")
    for large in (path, config):
        with large.open("r+b") as file:
            file.truncate(1 << 34)
    tracemalloc.start()
    with pytest.raises(ValueError, match="header would have 8589934592 bytes"):
        checkpoint_shapes(path)
    with pytest.raises(ValueError, match="more than 16777216 bytes"):
        checkpoint_shapes(config)
    assert tracemalloc.get_traced_memory()[1] < 1 << 27
    tracemalloc.stop()


def test_only_as_many_tensors_as_models_have(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 3)
    place = lambda i: {"data_offsets": [8 * i, 8 * i + 8]}
    header = {str(i): {"dtype": "F32", "shape": [2]} | place(i) for i in range(4)}
    with pytest.raises(ValueError, match="more than 3 tensors"):
        checkpoint_shapes(headed(tmp_path / "w.safetensors", header))


@pytest.mark.parametrize("inside", [True, False], ids=["params", "bare"])
def test_orbax(tmp_path, inside):
    params = {"kernel": jnp.ones((8, 4), jnp.bfloat16), "count": jnp.zeros((), int)}
    saved = {"params": params, "opt_state": {"mu": jnp.ones(3)}} if inside else params
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
    (found,) = jax.tree.leaves(checkpoint_shapes(tmp_path / "saved"))
    assert (found.shape, found.dtype) == ((8, 4), jnp.bfloat16)


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint_shapes(tmp_path / "missing")
    with pytest.raises(ValueError, match="no Orbax checkpoint"):
        checkpoint_shapes(tmp_path)
    path = pathlib.Path(tmp_path / "text.safetensors")
    path.write_text("no header at all, but text")
    with pytest.raises(ValueError, match="is no safetensors file"):
        checkpoint_shapes(path)
