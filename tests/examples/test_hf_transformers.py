"""`examples/finetune_hf` against transformers and PEFT."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import hf_command, hf_folders

why = 'not installed: pip install ".[hf]" peft torch, from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
torch = pytest.importorskip("torch", reason=why)
transformers = pytest.importorskip("transformers", reason=why)
pytest.importorskip("peft", reason=why)
load_file = pytest.importorskip("safetensors.numpy", reason=why).load_file
hf_pair = importlib.import_module("helpers.hf_pair")

pytestmark = pytest.mark.slow


FAMILIES = [*hf_folders.FAMILIES, "gemma3_pictures"]


def batches_of(example):
    found = hf_folders.rows(example.text)
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
    ours = dict(decoder.tensors(here.folder, here.split, here.params))
    ours = {name: here.folder[name] for name in here.folder.tensors} | ours
    ours = hf_pair.in_transformers(ours)
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


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_command(folders, family, method, tmp_path):
    """Of each family and method: what it writes is loaded whole, and generates."""
    folder, text = folders(family), tmp_path / "text.txt"
    text.write_text(hf_folders.TEXT)
    out, few = tmp_path / "out", ["--steps", "3", "--method", method]
    done = hf_command.run(folder, text, out, *few)
    assert not done.returncode, done.stderr
    model = hf_pair.there(out if method == "full" else folder)
    if method != "full":
        model = hf_pair.with_adapters(model, out)
    tokens = transformers.AutoTokenizer.from_pretrained(out)("the", return_tensors="pt")
    made = model.generate(**tokens, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert made.shape[1] == tokens["input_ids"].shape[1] + 2


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """A folder, a text, and the folder that the command makes of it in one go."""
    return hf_command.trained(folders, tmp_path_factory.mktemp("whole"))


def test_what_comes_out(example, trained):
    """transformers loads it, has its loss, which is lower, and generates."""
    folder, text, tuned = trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    (found,) = example.text.documents(text, tokenizer)
    (row, *_) = example.text.rows(found, 4 * hf_folders.LENGTH)
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
