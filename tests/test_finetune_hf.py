"""`examples/finetune_hf.py` on folders that transformers makes, which is the oracle."""

import json
import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from helpers import hf_folders

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
why = 'not installed: pip install ".[hf]" torch, from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
torch = pytest.importorskip("torch", reason=why)
transformers = pytest.importorskip("transformers", reason=why)

pytestmark = pytest.mark.slow
TEXT = hf_folders.TEXT
RATE, LENGTH = 1e-3, 64
COMMAND = ["--length", str(LENGTH), "--batch", "2", "--min-size", "1KiB"]
COMMAND += ["--learning-rate", "1e-3", "--steps", "8", "--held-out", "0.1"]


@pytest.fixture(scope="module")
def example():
    """The example's modules."""
    import finetune_hf
    import hf_folder
    import hf_model
    import hf_text

    return finetune_hf, hf_folder, hf_model, hf_text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a folder, once."""
    made = {}

    def folder(family, **how):
        key = family, *sorted(how.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
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


def torch_mask(segments):
    """As transformers adds it to the scores."""
    seen = np.tril(segments[:, :, None] == segments[:, None, :])
    least = torch.finfo(torch.float32).min
    return torch.where(torch.tensor(seen)[:, None], 0.0, least)


def torch_loss(model, batch):
    given = {n: torch.tensor(np.asarray(x)).long() for n, x in batch.items()}
    logits = model(
        input_ids=given["tokens"],
        position_ids=given["positions"],
        attention_mask=torch_mask(batch["segments"]),
    ).logits
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given["labels"].flatten(), reduction="none"
    )
    weights = torch.tensor(batch["weights"]).flatten()
    return (each * weights).sum() / weights.sum()


@pytest.mark.parametrize("family", hf_folders.FAMILIES)
def test_trains_as_transformers(example, folders, family):
    """20 steps: losses, and weights over the way they went."""
    import jax
    import optax

    import paged_optax as po

    _, hf_folder, hf_model, hf_text = example
    folder = hf_folder.Folder.open(folders(family))
    model = hf_model.Model.of(folder.config, np.float32)
    draw = np.random.default_rng(0)
    tokens = lambda n: draw.integers(5, 320, n).tolist()
    found = [
        hf_text.Document(tokens(n), (draw.random(n) < 0.7).tolist())
        for n in (40, 90, 200, 30, 150)
    ]
    rows = hf_text.rows(found, 2 * LENGTH)
    params = model.read(folder)
    split = po.split_layers(model.loss, params, rows[0])
    params = split.stack(params, on_host=True, min_size="1KiB")
    how = {"b1": 0.9, "b2": 0.95, "eps": 1e-4, "weight_decay": 0.01}
    tx = po.paged_adamw(optax.constant_schedule(RATE), **how)
    args = params, tx.init(params), split.workspace(params, host_dtype="float32")
    step = po.layerwise_step(split, tx, max_norm=1.0, accumulate=True)
    step = jax.jit(step)

    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder.path,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    adamw = torch.optim.AdamW(
        theirs.parameters(), RATE, (0.9, 0.95), how["eps"], how["weight_decay"]
    )
    start = {n: x.detach().clone() for n, x in theirs.named_parameters()}
    for _, batch in zip(range(20), hf_text.batches(rows, 2, 0), strict=False):
        *args, output = step(*args, batch)
        loss = torch_loss(theirs, batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        np.testing.assert_allclose(output.loss, loss.item(), rtol=1e-5)
    ours = dict(model.tensors(folder, split, args[0]))
    apart = way = 0.0
    for name, x in theirs.named_parameters():
        value = ours.pop(name) if name in ours else fused(ours, name)
        apart += float(np.sum((value - x.detach().numpy()) ** 2))
        way += float(torch.sum((x.detach() - start[name]) ** 2))
    print(f"{family}: weights {np.sqrt(apart / way):.1e} of their way apart")
    assert np.sqrt(apart / way) <= 1e-4


def fused(ours, name):
    """Experts, as transformers 5 holds them: all in one, gate and up in another."""
    before, _, kind = name.rpartition(".")
    count = hf_folders.EXPERTS["num_experts"]
    each = lambda part: np.stack(
        [ours.pop(f"{before}.{n}.{part}.weight") for n in range(count)]
    )
    if kind == "down_proj":
        return each("down_proj")
    return np.concatenate([each("gate_proj"), each("up_proj")], 1)


@pytest.mark.parametrize("family", hf_folders.FAMILIES)
def test_load_and_save(example, folders, family, tmp_path):
    """The same bytes of a folder that transformers saved, sharded or not."""
    import paged_optax as po

    _, hf_folder, hf_model, hf_text = example
    shard = "40KB" if family in ("qwen3", "llama") else "5GB"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folders(family), dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    folder = hf_folder.Folder.open(tmp_path / "theirs")
    assert (len(folder.headers) > 1) == (shard == "40KB")
    model = hf_model.Model.of(folder.config, folder.dtype)
    (row,) = hf_text.rows([hf_text.Document(range(9), [True] * 9)], 8)
    split = po.split_layers(model.loss, model.shapes, row)
    params = split.stack(model.read(folder), on_host="all", min_size=0)
    output = tmp_path / "copy"
    folder.write(output, model.tensors(folder, split, params))
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
    _, hf_folder, hf_model, hf_text = example
    folder, text, tuned = trained
    assert (tuned / "losses.png").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    (row, *_) = hf_text.rows(hf_text.documents(text, tokenizer), 4 * LENGTH)
    batch = {name: x[None] for name, x in row.items()}
    losses = []
    for path in (folder, tuned):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        ours = hf_folder.Folder.open(path)
        model = hf_model.Model.of(ours.config, np.float32)
        total, weight = model.loss(model.read(ours), row)
        losses.append(torch_loss(theirs, batch).item())
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

    (finetune_hf, *_), (change, says) = example, BROKEN[name]
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
    (finetune_hf, *_), (file, text, says) = example, TEXTS[name]
    (tmp_path / file).write_text(text)
    given = folders("qwen3", dtype="bfloat16"), tmp_path / file, tmp_path / "out"
    assert finetune_hf.main(_arguments(*given)) == 1
    assert says in capsys.readouterr().err


def test_a_chat_learns_its_answers(example, folders):
    """The prompt is seen, and not learned."""
    *_, hf_text = example
    folder = folders("qwen3", dtype="bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turn = hf_text._line(
        pathlib.Path("x"), 1, json.dumps({"messages": CHAT}), tokenizer
    )
    learned = [t for t, yes in zip(turn.tokens, turn.learned, strict=True) if yes]
    assert tokenizer.decode(learned) == "ho<|im_end|>\n"
    assert tokenizer.decode(turn.tokens).startswith("<|im_start|>user\nhi<|im_end|>")
