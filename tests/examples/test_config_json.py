"""`config.json` of Hugging Face as transformers reads it, and Gemma's names."""

import contextlib
import itertools
import json
import math
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

import paged_optax as po
from paged_optax.cli import main
from paged_optax.planning.checkpoint import checkpoint_shapes

#: From the repositories of these models: what is absent there is absent here.
DATA = pathlib.Path(__file__).parents[1] / "data"
CONFIGS = json.loads((DATA / "configs.json").read_text())
#: Small, and of many heads: as many as any class takes for those of keys.
TINY = {
    "hidden_size": 96,
    "num_attention_heads": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
SIZES = {"num_key_value_heads": 2, "head_dim": 16}


def count(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.fixture
def read(tmp_path):
    """The shapes of a `config.json` with these fields."""

    def shapes(fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return checkpoint_shapes(tmp_path)

    return shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_as_by_name(name, read, tmp_path):
    wanted, sees = po.model_shapes(name), "vision_config" in CONFIGS[name]
    says = pytest.warns(UserWarning, match="weights that see pictures are left out")
    with says if sees else contextlib.nullcontext():
        assert read(CONFIGS[name]) == wanted
        assert checkpoint_shapes(tmp_path / "config.json") == wanted


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
        ("google/gemma-2b", 2_506_172_416),
        ("google/gemma-7b-it", 8_537_680_896),
        ("google/gemma-2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("Gemma-2-27B-it", 27_227_128_320),
        # Less 512 a layer, of norms within the heads, or 256 in the largest.
        ("google/gemma-3-270m", 268_098_176 - 18 * 512),
        ("google/gemma-3-1b-pt", 999_885_952 - 26 * 512),
        # Less what the vision tower and its projection have.
        ("gemma3-4b-text", 4_300_079_472 - 419_816_304 - 34 * 512),
        ("google/gemma-3-4b-it", 4_300_079_472 - 419_816_304 - 34 * 512),
        ("gemma3-12b-text", 12_187_325_040 - 421_290_864 - 48 * 512),
        ("gemma3-27b-text", 27_432_406_640 - 423_060_336 - 62 * 256),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552),
        ("Mistral-7B", 7_248_023_552),
        # Less the biases of queries, keys and values.
        ("Qwen/Qwen2.5-0.5B", 494_032_768 - 24 * (896 + 256)),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304 - 28 * (1536 + 512)),
        ("Qwen/Qwen2.5-3B", 3_085_938_688 - 36 * (2048 + 512)),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512 - 28 * (3584 + 1024)),
        ("Qwen/Qwen2.5-14B", 14_770_033_664 - 48 * (5120 + 2048)),
        ("Qwen/Qwen2.5-32B", 32_763_876_352 - 64 * (5120 + 2048)),
    ],
)
def test_named_models_have_their_published_size(name, parameters):
    assert count(po.model_shapes(name)) == parameters


@pytest.mark.parametrize(
    ("kind", "absent", "given"),
    [
        ("llama", 264_672, 350_688),
        ("mistral", 237_024, 350_688),
        ("qwen2", 264_672, 350_688),
        ("qwen3", 3_336_672, 350_688),
        ("gemma", 4_860_384, 399_840),
        ("gemma2", 3_681_120, 400_224),
        ("gemma3_text", 3_681_120, 400_224),
    ],
)
def test_absent_fields(kind, absent, given, read):
    """Counts of transformers 5.24, without biases and norms within heads."""
    config = TINY | {"model_type": kind}
    assert count(read(config)) == absent
    if kind in ("llama", "mistral", "qwen2"):  # null is by the heads
        assert count(read(config | dict.fromkeys(SIZES))) == 264_672
    tied = {"tie_word_embeddings": not kind.startswith("gemma")}
    assert count(read(config | SIZES | tied)) == given


DTYPES = {"null": None, "bfloat16": "bfloat16", "float16": "float16"}


@pytest.mark.parametrize("new", ["absent", *DTYPES])
@pytest.mark.parametrize("old", ["absent", *DTYPES])
def test_dtype_by_either_name(new, old, read):
    """`dtype` of transformers 5, `torch_dtype` before; null is as if absent."""
    given = {"dtype": new, "torch_dtype": old}
    given = {name: DTYPES[x] for name, x in given.items() if x != "absent"}
    said = [x for x in (new, old) if DTYPES.get(x)]
    wanted = said[0] if said else "float32"
    shapes = read(TINY | {"model_type": "llama"} | given)
    assert {str(x.dtype) for x in jax.tree.leaves(shapes)} == {wanted}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *itertools.product(
            ["llama", "gemma"],
            ["dtype", "torch_dtype"],
            ["auto", "", False, 0, [], "torch.bfloat16", {"text": "bfloat16"}],
        ),
        ("gemma3", "model_type", "gemma3"),
    ],
    ids=str,
)
def test_another_model_is_refused(kind, field, value, read):
    with pytest.raises(ValueError, match=f"config.json': field '{field}' is") as error:
        read(TINY | {"model_type": kind} | {field: value})
    assert repr(value)[:40] in str(error.value)


def test_quantized_weights_are_said(read, tmp_path, capsys):
    config = TINY | {"model_type": "llama"}
    whole, field = read(config), "quantization_config"
    with pytest.warns(UserWarning, match=f"'{field}' is .*before they are quan"):
        assert read(config | {field: {"quant_method": "gptq", "bits": 4}}) == whole
    command = ["plan", "--checkpoint", str(tmp_path), "--device-memory", "1GiB"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert f"'{field}' is" in " ".join(captured.out.split()) and captured.err == ""
    (tmp_path / "config.json").write_text(json.dumps(config | {field: None}))
    assert main(command) == 0
    assert field not in capsys.readouterr().out


def test_weights_that_see_pictures_are_left_out(tmp_path):
    """Of a folder as the hub has it, and as transformers saves it."""
    names = ["language_model.model.layers.0.w", "vision_tower.w"]
    names += ["model.vision_tower.w", "multi_modal_projector.w"]
    arrays = dict.fromkeys(names, np.ones(8, np.float32))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="96 bytes of weights that see pictures"):
        assert [*checkpoint_shapes(tmp_path)] == names[:1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_quantized_weights_are_not_all_of_a_model(dtype, tmp_path):
    arrays = {"norm": np.ones(64, np.float32), "packed": np.ones((64, 8), dtype)}
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, file)
    with pytest.warns(UserWarning, match=f"{arrays['packed'].nbytes} bytes of whole"):
        assert count(checkpoint_shapes(file)) == 64
