"""`examples/finetune_hf`: what it refuses, and how it stops and goes on."""

import copy
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from helpers import aot, hf_command, hf_folders
from helpers.hf_command import command, run, weights_of
from helpers.hf_folders import TEXT

ROOT = pathlib.Path(__file__).parents[2]
why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
transformers = pytest.importorskip("transformers", reason=why)
save_file = pytest.importorskip("safetensors.numpy", reason=why).save_file
load_file = pytest.importorskip("safetensors.numpy", reason=why).load_file


@pytest.fixture
def refused(example, folders, tmp_path, capsys):
    """The message of a command that is refused, and writes nothing."""

    def run(*more, folder=None, text=TEXT, out=tmp_path / "out"):
        path = text
        if isinstance(text, str):
            path = tmp_path / "text.txt"
            path.write_text(text)
        folder = folder or folders("qwen3")
        capsys.readouterr()  # what transformers said as it made the folder
        assert example.command.main(command(folder, path, out, *more)[2:]) == 1
        assert not any(tmp_path.glob("out*"))
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """A folder, a text, and the folder that the command makes of it in one go."""
    return hf_command.trained(folders, tmp_path_factory.mktemp("whole"))


RECORDED = json.loads((ROOT / "tests" / "data" / "hf_losses.json").read_text())


@pytest.mark.parametrize("family", RECORDED["losses"])
def test_losses_are_those_of_transformers(example, folders, family):
    """As `tests/helpers/hf_pair.py` recorded them: torch is not always there."""
    folder = example.folder.Folder.open(folders(family))
    decoder = example.model.Decoder.of(folder, np.float32)
    params = jax.tree.map(np.asarray, decoder.read(folder))
    loss, rows = jax.jit(decoder), hf_folders.rows(example.text)
    found = [float(x / n) for x, n in (loss(params, row) for row in rows)]
    np.testing.assert_allclose(found, RECORDED["losses"][family], rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_attention_by_cudnn(example, folders, family):
    """On a GPU that has it, with the mask of a row's documents, in every layer."""
    decoder = example.model.Decoder.of(
        example.folder.Folder.open(folders(family)), jax.numpy.bfloat16
    )
    row = hf_folders.rows(example.text)[0]
    with aot.with_cudnn():
        traced = jax.jit(decoder).trace(decoder.shapes, row)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = text.count("@__cudnn$fmhaScaleBiasSoftmax(")
    assert calls == decoder.config["num_hidden_layers"]


@pytest.mark.slow
def test_stopped_by_sigterm(trained, tmp_path):
    """It saves, says how to go on, and ends in the same bits."""
    folder, text, tuned = trained
    out = tmp_path / "tuned"
    process = _begun(out, folder, text, text=True, stdout=subprocess.PIPE)
    process.terminate()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 143 and "--resume" in said
    again = run(folder, text, out)
    assert again.returncode == 1 and "unfinished run" in again.stderr
    other = run(folder, text, out, "--resume", "--learning-rate", "2e-3")
    assert other.returncode == 1 and "--learning-rate was 0.001" in other.stderr
    done = run(folder, text, out, "--resume")
    assert not done.returncode, done.stderr
    assert weights_of(out) == weights_of(tuned)
    assert not (tmp_path / "tuned.run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_killed(trained, method, tmp_path):
    """By SIGKILL at a random step, three times in one run."""
    folder, text, tuned = trained
    if method != "full":
        tuned = tmp_path / "whole"
        done = run(folder, text, tuned, "--method", method)
        assert not done.returncode, done.stderr
    out, draw = tmp_path / "tuned", random.Random(time.time_ns())
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    often = ["--save-every", "1", "--method", method]
    for kills in range(3):
        resume = ["--resume"] * (kills > 0)
        process = subprocess.Popen(command(folder, text, out, *often, *resume), env=env)
        losses = tmp_path / "tuned.run" / "losses.csv"
        begun, wanted = time.monotonic(), 1 + 2 * kills + draw.randrange(1, 3)
        while process.poll() is None and _lines(losses) <= wanted:
            assert time.monotonic() - begun < 300
            time.sleep(0.005)
        time.sleep(draw.random() / 10)
        process.kill()
        process.wait()
    if not out.exists():
        done = run(folder, text, out, *often, "--resume")
        assert not done.returncode, done.stderr
    assert weights_of(out) == weights_of(tuned)


@pytest.mark.slow
def test_host_memory(tmp_path):
    """While weights are read: once, and little more; nothing but they in the end."""
    program = ROOT / "tests" / "helpers" / "hf_memory.py"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, program, tmp_path], env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert max(found.values()) <= 1.1


def _begun(out, *given, **how):
    """A process that writes there, and has made a step."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(command(*given[:2], out, *given[2:]), env=env, **how)
    losses = out.with_suffix(".run") / "losses.csv"
    while process.poll() is None and not _lines(losses) > 2:
        time.sleep(0.02)
    return process


def _lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def _config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _renamed(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.0.mlp.up", b"layers.0.mlp.op"))


def _tensors(change):
    def changed(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return changed


def _another_head(folder):
    embedding = "model.embed_tokens.weight"
    _tensors(lambda x: x.update({"lm_head.weight": x[embedding] + 1}))(folder)


def _fewer_tokens(folder):
    embedding = "model.embed_tokens.weight"
    _tensors(lambda x: x.update({embedding: x[embedding][:50].copy()}))(folder)
    _config(vocab_size=50)(folder)


ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors"),
    "truncated": (_cut, "is not whole"),
    "other names": (_renamed, "layers.0.mlp.up_proj.weight is missing"),
    "family": (_config(architectures=["PhiForCausalLM"]), "PhiForCausalLM"),
    "activation": (_config(hidden_act="gelu"), "hidden_act='gelu'"),
    "window": (_config(use_sliding_window=True), "use_sliding_window=True"),
    "rope": (_config(rope_parameters=ROPE), "yarn"),
    "bias": (_config(attention_bias=True), "attention_bias=True"),
    "sizes": (_config(hidden_size=48), "and config.json says"),
    "heads": (_config(num_attention_heads=3), "config.json cannot be used"),
    "no norm": (_config(rms_norm_eps=None), "cannot be used: Validation error for f"),
    "two ropes": (_config(rope_scaling={"rope_type": "linear"}), "leave one."),
    "two bases": (_config(rope_theta=10.0), "two values of rope_theta"),
    "few tokens": (_config(max_position_embeddings=32), "max_position_embeddings=32"),
    "quantized": (_config(quantization_config={"bits": 4}), "quantization_config"),
    "a head that differs": (_another_head, "is not the embedding"),
    "a tokenizer of more": (_fewer_tokens, "resize the embedding"),
    "no file": (lambda f: (f / "LICENSE").symlink_to("nowhere"), "No such file or dir"),
    "no tokenizer": (lambda f: [x.unlink() for x in f.glob("token*")], "no tokenizer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder(refused, folders, name, tmp_path):
    """One sentence, exit status 1, and nothing written."""
    change, says = BROKEN[name]
    shutil.copytree(folders("qwen3", dtype="bfloat16"), tmp_path / "folder")
    change(tmp_path / "folder")
    said = refused(folder=tmp_path / "folder")
    assert says in said and said.count("\n") == 1


def test_weights_in_another_format(example, tmp_path):
    """The error has the two lines that convert them."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(example.folder.FolderError) as error:
        example.folder.Folder.open(tmp_path)
    _, *lines = str(error.value).splitlines()
    assert lines == [
        "from transformers import AutoModelForCausalLM as Model",
        f'Model.from_pretrained({str(tmp_path)!r}, dtype="auto")'
        f".save_pretrained({str(tmp_path)!r})",
    ]


def test_all_files_are_taken_over_or_named(example, folders, tmp_path):
    path = tmp_path / "folder"
    shutil.copytree(folders("qwen3"), path)
    taken = ["LICENSE", "README.md", "modeling_x.py", "qwen.tiktoken", "figures/a.png"]
    left = [".gitattributes", "original/consolidated.00.pth", "pytorch_model.bin"]
    for name in [*taken, *left]:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    folder = example.folder.Folder.open(path)
    named = [".gitattributes", "original", "pytorch_model.bin"]
    assert folder.beside("*")[1] == named
    folder.write(tmp_path / "out", ((name, folder[name]) for name in folder.tensors))
    files = lambda path: {
        str(x.relative_to(path)): x.read_bytes()
        for x in path.rglob("*")
        if not x.is_dir()
    }
    found, wanted = files(tmp_path / "out"), files(path)
    assert found.keys() == wanted.keys() - {*left}
    assert all(wanted[name] == x for name, x in found.items())
    others = {"config.json", "README.md", "modeling_x.py", "figures"}
    assert others < {*folder.beside(*example.methods.TOKENIZER)[1]}


def test_what_is_not_trained(example):
    """Named in the end, whichever way a folder has it."""
    untrained = lambda *names: example.model.Decoder.untrained(
        None, types.SimpleNamespace(tensors=names)
    )
    assert untrained("model.layers.0.w", "lm_head.weight") == []
    names = "vision_tower.a", "vision_tower.b", "multi_modal_projector.c"
    assert untrained(*names) == ["multi_modal_projector", "vision_tower"]
    assert untrained("model.vision_tower.a", "x") == ["vision_tower"]


ROPES = {
    "by kind, no base": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default"},
        }
    },
    "one kind": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "a base of another": {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0},
            "sliding_attention": {"rope_type": "default"},
        },
    },
    "three fields": {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "nothing": {},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_of_gemma(example, name, tmp_path):
    """As transformers' configuration has them, by layer."""
    config = {"num_hidden_layers": 7, **copy.deepcopy(ROPES[name])}
    theirs = transformers.Gemma3TextConfig(**copy.deepcopy(config))
    config["architectures"] = ["Gemma3ForCausalLM"]
    folder = example.folder.Folder(tmp_path, config, {}, {})
    layers = example.model.Decoder.of(folder, np.float32).static.model.layers
    assert len(layers) == len(theirs.layer_types)
    for layer, kind in zip(layers, theirs.layer_types, strict=True):
        wanted = theirs.rope_parameters[kind]
        found = layer.self_attn.rope_theta, layer.factor
        assert found == (wanted["rope_theta"], wanted.get("factor", 1.0))


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TEXTS = {
    "empty": ("text.txt", "", "nothing to learn"),
    "no assistant": ("a.jsonl", json.dumps({"messages": CHAT[:1]}), "no assistant's"),
    "no chat": ("a.jsonl", json.dumps({"message": "x"}), "no messages"),
    "no json": ("a.jsonl", "{", "line 1 is no JSON"),
    "blank": ("a.jsonl", json.dumps({"text": " "}), "is empty, or blank"),
    "missing": ("a.jsonl", None, "a.jsonl does not exist: give a file"),
    "Latin": ("a.txt", b"a\nGr\xfc", "a.txt, line 2 is no UTF-8"),
    "UTF-16": ("a.csv", "a,b".encode("utf-16"), "a.csv, line 1 is no UTF-8"),
    "parquet": ("a.parquet", "x" * 99, "not a parquet file.\n"),
    "no table": ("a/b", "x", "a is no folder that datasets saved: give one"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text(refused, name, tmp_path):
    file, text, says = TEXTS[name]
    if file.endswith(".parquet") or "/" in file:
        pytest.importorskip("datasets")
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(text=path.parent if "/" in file else path)
    assert says in said and ".." not in said


def test_an_output_that_cannot_be_made(refused, tmp_path):
    said = refused(out=tmp_path / "text.txt" / "out")
    assert "cannot be made (Not a directory): give another --output." in said


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_float16(example, folders, method, tmp_path, capsys):
    """Masters of its parameters are copies: remainders complete bfloat16 alone."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    more = "--dtype", "float16", "--method", method, "--steps", "2"
    hf_command.main(example, folders("qwen3"), text, tmp_path / "out", *more)
    assert f"wrote {tmp_path / 'out'}\n" in capsys.readouterr().out


def test_adapters_of_a_folder_of_weights(refused, folders, tmp_path):
    """Also one that a full run wrote, which has the method in its `run.json`."""
    folder = tmp_path / "tuned"
    shutil.copytree(folders("qwen3"), folder)
    (folder / "run.json").write_text('{"method": "full"}')
    said = refused("--adapter", str(folder), folder=folder)
    assert f"--adapter {folder} has no adapters: is it --checkpoint?" in said


def test_a_device_of_little_memory(refused):
    said = refused("--device-memory", "1KiB")
    assert "MiB of the device, and JAX takes 768.0 B. Give less" in said


def test_a_machine_of_little_memory(example, refused, monkeypatch):
    """What XLA may pin is nine tenths of it, or what the user says."""
    monkeypatch.delenv(example.run.POOL, raising=False)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < example.run.pinned_gigabytes() << 30 <= 0.9 * memory
    monkeypatch.setenv(example.run.POOL, "0")
    said = refused("--way", "all", "--min-size", "1KiB")
    assert "GiB of host memory, and 0 may be pinned here: try --method lora" in said


WRONG = """--batch 0, --length 0, --steps -1, --epochs 0, --rank 0, --alpha nan,
--seed -1, --learning-rate 0, --learning-rate inf, --warmup 1, --held-out 1.5,
--max-norm -1, --dtype int8, --save-every 0, --device-memory much"""


@pytest.mark.parametrize("wrong", WRONG.split(","))
def test_wrong_arguments(example, wrong, tmp_path, capsys):
    given = ["--checkpoint", "a", "--text", "b", "--output", str(tmp_path / "c")]
    with pytest.raises(SystemExit, match="2"):
        example.command.main([*given, *wrong.split()])
    assert f"argument {wrong.split()[0]}: " in capsys.readouterr().err


def _store(example, folder, tmp_path, *more):
    """Of a run that has begun, and another command's arguments."""
    paths = ["--checkpoint", folder, "--text", "t", "--output", tmp_path / "o"]
    args = example.command.parse_arguments([*map(str, paths), *more])
    opened = example.folder.Folder.open(folder)
    return example.command.Store.of(args, opened, hf_folders.rows(example.text))


def test_one_command_at_a_time(example, folders, tmp_path):
    first = _store(example, folders("qwen3"), tmp_path)
    first.take(anew=True)
    first.begin()
    second = _store(example, folders("qwen3"), tmp_path, "--resume")
    with pytest.raises(example.folder.FolderError, match="another command is at work"):
        second.take(anew=False)
    first.close()
    second.take(anew=False)


def test_another_base_is_not_gone_on_with(example, folders, tmp_path):
    """The same configuration, other weights."""
    folder = tmp_path / "folder"
    shutil.copytree(folders("qwen3"), folder)
    first = _store(example, folder, tmp_path)
    first.take(anew=True)
    first.begin()
    _store(example, folder, tmp_path, "--resume")
    _tensors(lambda x: x.update({"model.norm.weight": -x["model.norm.weight"]}))(folder)
    says = "of --checkpoint have changed"
    with pytest.raises(example.folder.FolderError, match=says):
        _store(example, folder, tmp_path, "--resume")


def test_what_has_no_arguments_is_begun_anew(example, folders, tmp_path):
    """A folder that a kill left while it was removed."""
    left = tmp_path / "o.run" / "steps" / "4"
    left.mkdir(parents=True)
    (left / "x").write_text("x")
    store = _store(example, folders("qwen3"), tmp_path)
    store.take(anew=True)
    assert store.manager.latest_step() is None and not left.exists()


@pytest.mark.slow
def test_a_full_disk(trained, tmp_path):
    """A checkpoint that does not fit: one sentence, and it goes on with space."""
    folder, text, tuned = trained
    out, often = tmp_path / "tuned", ["--save-every", "1"]
    how = {"text": True, "stderr": subprocess.PIPE}
    process = _begun(out, folder, text, *often, **how)
    limit = resource.RLIMIT_FSIZE
    resource.prlimit(process.pid, limit, (4096, resource.RLIM_INFINITY))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and "could not be saved" in said, said
    assert said.count("Traceback") == 0
    done = run(folder, text, out, *often, "--resume")
    assert not done.returncode, done.stderr
    assert weights_of(out) == weights_of(tuned)


def test_a_write_that_fails_leaves_nothing(example, folders, tmp_path):
    folder = example.folder.Folder.open(folders("qwen3"))

    def values():
        yield next(iter(folder.tensors)), folder[next(iter(folder.tensors))]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write(tmp_path / "out", values())
    assert not (tmp_path / "out").exists()


def test_one_file_goes_before_an_index(example, folders, tmp_path):
    """As for transformers, whatever the index names."""
    path = tmp_path / "folder"
    shutil.copytree(folders("qwen3"), path)
    index = {"weight_map": {"model.norm.weight": "other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [*example.folder.Folder.open(path).headers] == ["model.safetensors"]
