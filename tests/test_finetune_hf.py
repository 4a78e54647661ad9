"""`examples/finetune_hf.py` on folders that transformers makes, which is the oracle."""

import importlib
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import hf_folders

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
why = 'not installed: pip install ".[hf]" peft torch, from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
torch = pytest.importorskip("torch", reason=why)
transformers = pytest.importorskip("transformers", reason=why)
pytest.importorskip("peft", reason=why)
load_file = pytest.importorskip("safetensors.numpy", reason=why).load_file
hf_pair = importlib.import_module("helpers.hf_pair")

pytestmark = pytest.mark.slow
TEXT = hf_folders.TEXT
LENGTH = 64
COMMAND = ["--length", str(LENGTH), "--batch", "2", "--min-size", "1KiB"]
COMMAND += ["--learning-rate", "1e-3", "--steps", "8", "--held-out", "0.1"]


@pytest.fixture(scope="module")
def example():
    """The example's modules."""
    return hf_pair.example()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a folder, once."""
    made = {}

    def folder(family, **how):
        key = family, *sorted(how.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            if family == "gemma3_pictures":
                hf_folders.write_pictures(made[key])
            else:
                hf_folders.write(family, made[key], **how)
        return made[key]

    return folder


def command(folder, text, output, *more):
    program = [sys.executable, str(EXAMPLES / "finetune_hf.py"), *COMMAND]
    paths = ["--checkpoint", folder, "--text", text, "--output", output]
    return [*program, *map(str, paths), *more]


def run(*given, **how):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        command(*given), env=env, capture_output=True, text=True, timeout=500, **how
    )


FAMILIES = [*hf_folders.FAMILIES, "gemma3_pictures"]


def batches_of(example):
    found = hf_pair.rows(example.text)
    return found[0], list(itertools.islice(example.text.batches(found, 2, 0), 20))


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_transformers(example, folders, family):
    """20 steps: losses, and weights over the way they went."""
    row, batches = batches_of(example)
    here = hf_pair.Here.of(example, folders(family), "full", row)
    there = hf_pair.there(here.folder.path)
    start = hf_pair.parameters(there)
    wanted = hf_pair.train_there(there, batches)
    np.testing.assert_allclose(here.train(batches), wanted, rtol=1e-5)
    decoder = here.method.decoder
    ours = decoder.tensors(here.folder, here.split, here.params)
    ours = hf_pair.in_transformers(dict(ours))
    apart = hf_pair.way_apart(ours, hf_pair.parameters(there), start)
    print(f"{family}: weights {apart:.1e} of their way apart")
    assert apart <= 1e-4


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_as_peft(example, folders, family, method, tmp_path):
    """PEFT loads what is written, and trains it to the same; nothing else moves."""
    row, batches = batches_of(example)
    here = hf_pair.Here.of(example, folders(family), method, row)
    written = lambda path: here.method.write(here.folder, path, here.split, here.params)
    written(tmp_path / "before")
    there = hf_pair.there(here.folder.path)
    if method == "qlora":
        rounded = hf_pair.in_transformers(unpacked(example, here))
        for name, x in there.named_parameters():
            if name in rounded:
                x.data = torch.tensor(rounded[name])
    there = hf_pair.with_adapters(there, tmp_path / "before")
    start, frozen = hf_pair.parameters(there), jax.tree.map(np.asarray, here.frozen)
    wanted = hf_pair.train_there(there, batches)
    np.testing.assert_allclose(here.train(batches), wanted, rtol=1e-5)
    written(tmp_path / "after")
    ours = load_file(tmp_path / "after" / "adapter_model.safetensors")
    ours = {name.replace(".weight", ".default.weight"): x for name, x in ours.items()}
    trained = hf_pair.parameters(there)
    assert ours.keys() == trained.keys()
    apart = hf_pair.way_apart(ours, trained, start)
    print(f"{family}, {method}: adapters {apart:.1e} of their way apart")
    assert apart <= 1e-4
    jax.tree.map(np.testing.assert_array_equal, frozen, here.frozen)


def unpacked(example, here):
    """The folder's tensors as the method rounds them."""
    is_packed = lambda x: isinstance(x, example.methods.Packed)
    flat = jax.tree_util.tree_leaves_with_path(
        here.method.read_frozen(here.folder), is_leaf=is_packed
    )
    found = {}
    for path, x in flat:
        names = here.method.decoder.names(path)
        value = x.unpacked() if is_packed(x) else x
        value = np.asarray(value)
        found |= zip(names, value if len(names) > 1 else [value], strict=True)
    return found


def test_four_bits_are_those_of_bitsandbytes(example):
    """The same numbers, but for those in the middle between two."""
    functional = pytest.importorskip("bitsandbytes.functional")
    x = np.random.default_rng(0).standard_normal((96, 320)).astype(np.float32)
    packed, state = functional.quantize_4bit(
        torch.tensor(x), blocksize=64, quant_type="nf4"
    )
    theirs = functional.dequantize_4bit(packed, state).numpy()
    ours = np.asarray(example.methods.Packed.of(jnp.asarray(x)).unpacked())
    differs = np.abs(ours - theirs) > 1e-6 * np.abs(x).max()
    assert differs.mean() < 1e-3
    np.testing.assert_allclose(ours[~differs], theirs[~differs], rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_and_save(example, folders, family, tmp_path):
    """The same bytes of a folder that transformers saved, sharded or not."""
    shard = "40KB" if family in ("qwen3", "llama", "gemma3") else "5GB"
    theirs = hf_pair.there(folders(family)).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    folder = example.folder.Folder.open(tmp_path / "theirs")
    assert (len(folder.headers) > 1) == (shard == "40KB")
    decoder = example.model.Decoder.of(folder, folder.dtype)
    (row,) = example.text.rows([example.text.Document(range(9), [True] * 9)], 8)
    split = po.split_layers(decoder, decoder.shapes, row)
    params = split.stack(decoder.read(folder), on_host="all", min_size=0)
    output = tmp_path / "copy"
    folder.write(output, decoder.tensors(folder, split, params))
    files = sorted(x.name for x in folder.path.iterdir())
    assert files == sorted(x.name for x in output.iterdir())
    for name in files:
        assert (output / name).read_bytes() == (folder.path / name).read_bytes(), name


def weights_of(folder):
    return {x.name: x.read_bytes() for x in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """A text, and the folder that the command makes of it in one go."""
    folder, out = folders("qwen3", dtype="bfloat16"), tmp_path_factory.mktemp("whole")
    text = out / "text.txt"
    text.write_text(TEXT)
    done = run(folder, text, out / "tuned")
    assert not done.returncode, done.stderr
    return folder, text, out / "tuned"


def test_what_comes_out(example, trained):
    """transformers loads it, has its loss, which is lower, and generates."""
    folder, text, tuned = trained
    assert (tuned / "losses.png").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    found = example.text.documents(text, tokenizer)
    (row, *_) = example.text.rows(found, 4 * LENGTH)
    batch = {name: x[None] for name, x in row.items()}
    losses = []
    for path in (folder, tuned):
        theirs, ours = hf_pair.there(path), example.folder.Folder.open(path)
        decoder = example.model.Decoder.of(ours, np.float32)
        params = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, decoder.read(ours)))
        total, weight = decoder(params, row)
        losses.append(hf_pair.loss_there(theirs, batch).item())
        np.testing.assert_allclose(total / weight, losses[-1], rtol=1e-5)
    assert losses[1] < losses[0]
    tokens = tokenizer("the quick", return_tensors="pt")
    made = theirs.generate(**tokens, max_new_tokens=4, do_sample=False)
    assert made.shape[1] == tokens["input_ids"].shape[1] + 4


def test_stopped_by_sigterm(trained, tmp_path):
    """It saves, says how to go on, and ends in the same bits."""
    folder, text, tuned = trained
    out = tmp_path / "tuned"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        command(folder, text, out), env=env, text=True, stdout=subprocess.PIPE
    )
    losses = tmp_path / "tuned.run" / "losses.csv"
    while process.poll() is None and not _lines(losses) > 2:
        time.sleep(0.02)
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


def test_killed(trained, tmp_path):
    """By SIGKILL at a random step, three times in one run."""
    folder, text, tuned = trained
    out, draw = tmp_path / "tuned", random.Random(time.time_ns())
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    often = ["--save-every", "1"]
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
    "no tokenizer": (
        lambda f: [x.unlink() for x in f.glob("tokenizer*")],
        "no tokenizer",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder(example, folders, name, tmp_path, capsys):
    """One sentence, exit status 1, and nothing written."""
    import shutil

    finetune_hf, (change, says) = example.command, BROKEN[name]
    folder, text = tmp_path / "folder", tmp_path / "text.txt"
    shutil.copytree(folders("qwen3", dtype="bfloat16"), folder)
    text.write_text(TEXT)
    change(folder)
    capsys.readouterr()  # what transformers said as it made the folder
    assert finetune_hf.main(_arguments(folder, text, tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def _arguments(folder, text, output):
    return command(folder, text, output)[2:]


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TEXTS = {
    "empty": ("text.txt", "", "nothing to learn"),
    "no assistant": ("a.jsonl", json.dumps({"messages": CHAT[:1]}), "no assistant's"),
    "no chat": ("a.jsonl", json.dumps({"message": "x"}), "no messages"),
    "no json": ("a.jsonl", "{", "line 1 is no JSON"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text(example, folders, name, tmp_path, capsys):
    finetune_hf, (file, text, says) = example.command, TEXTS[name]
    (tmp_path / file).write_text(text)
    given = folders("qwen3", dtype="bfloat16"), tmp_path / file, tmp_path / "out"
    assert finetune_hf.main(_arguments(*given)) == 1
    assert says in capsys.readouterr().err


def test_a_chat_learns_its_answers(example, folders):
    """The prompt is seen, and not learned."""
    folder = folders("qwen3", dtype="bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turn = example.text._line(
        pathlib.Path("x"), 1, json.dumps({"messages": CHAT}), tokenizer
    )
    learned = [t for t, yes in zip(turn.tokens, turn.learned, strict=True) if yes]
    assert tokenizer.decode(learned) == "ho<|im_end|>\n"
    assert tokenizer.decode(turn.tokens).startswith("<|im_start|>user\nhi<|im_end|>")
