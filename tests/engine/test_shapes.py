"""Shapes of named models, of modules and of checkpoints."""

import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import linen, nnx

import paged_optax as po
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.models import DECODERS, module_shapes, of_size


def count(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


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


LLAMA3 = json.loads(
    (pathlib.Path(__file__).parents[1] / "data/configs.json").read_text()
)["llama3-8b"]


def written(path, **fields):
    path.write_text(json.dumps(fields))
    return path


def test_a_header_is_enough(file):
    content = file.read_bytes()
    whole = checkpoint_shapes(file)
    file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    assert checkpoint_shapes(file) == whole


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": [1]}, "field 'w' is .*, not dtype and shape"),
        ({"w": {"shape": [2]}}, "field 'w' is"),
        ({"w": {"dtype": "F32"}}, "field 'w' is"),
        ({"w": {"dtype": "F32", "shape": [-1]}}, "field 'w' is"),
        ({"w": {"dtype": "F32", "shape": [1.5]}}, "field 'w' is"),
        ({"w": {"dtype": "I64", "shape": [2]}}, "no floating point arrays"),
        ([], "no object with fields"),
        ("{", "no object with fields"),
    ],
    ids=str,
)
def test_a_header_that_is_not_usable(header, words, tmp_path):
    text, path = json.dumps(header).encode(), tmp_path / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=f"w.safetensors.*{words}"):
        checkpoint_shapes(path)


def test_files_of_the_model(file):
    """Others of the folder may hold the same once more."""
    safetensors.numpy.save_file(
        {"again": np.ones((8, 16), np.float32)},
        file.with_name("consolidated.safetensors"),
    )
    assert checkpoint_shapes(file.parent) == checkpoint_shapes(file)


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
    path = written(tmp_path / "config.json", **LLAMA3 | {field: value})
    with pytest.raises(ValueError, match=f"config.json': field '{field}' is"):
        checkpoint_shapes(path)


def test_a_config_is_not_read_beyond_its_bounds(tmp_path):
    """A sparse file, which claims gigabytes."""
    config = written(tmp_path / "config.json")
    with config.open("r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(ValueError, match="more than 4194304 bytes"):
        checkpoint_shapes(config)


@pytest.mark.parametrize("inside", [True, False], ids=["params", "bare"])
def test_orbax(tmp_path, inside):
    params = {"kernel": jnp.ones((8, 4), jnp.bfloat16), "count": jnp.zeros((), int)}
    saved = {"params": params, "opt_state": {"mu": jnp.ones(3)}} if inside else params
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
    (found,) = jax.tree.leaves(checkpoint_shapes(tmp_path / "saved"))
    assert (found.shape, found.dtype) == ((8, 4), jnp.bfloat16)


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: it is no file"):
        checkpoint_shapes(tmp_path / "missing")
    with pytest.raises(ValueError, match="no Orbax checkpoint"):
        checkpoint_shapes(tmp_path)
    path = pathlib.Path(tmp_path / "text.safetensors")
    path.write_text("no header at all, but text")
    with pytest.raises(ValueError, match="holds no JSON"):
        checkpoint_shapes(path)
