"""Adapters of `examples/finetune_hf`: gone on with, merged, and named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import hf_folders
from helpers.hf_command import main
from helpers.hf_folders import TEXT

why = 'not installed: pip install ".[hf]", from Python 3.12 on'
pytest.importorskip("eqx_zoo", reason=why)
pytest.importorskip("transformers", reason=why)
numpy = pytest.importorskip("safetensors.numpy", reason=why)


@pytest.fixture(scope="module", params=["lora", "qlora"])
def trained(request, example, folders, tmp_path_factory):
    """A folder, its method, adapters of it, and what the command printed."""
    path, folder = tmp_path_factory.mktemp("adapters"), folders("qwen3")
    (path / "text.txt").write_text(TEXT)
    more = ["--method", request.param, "--rank", "4", "--alpha", "6", "--steps", "2"]
    more += ["--base-name", "org/model"]
    main(example, folder, path / "text.txt", path / "first", *more)
    return folder, request.param, path / "first"


def adapters(path):
    config = json.loads((path / "adapter_config.json").read_text())
    return config, numpy.load_file(path / "adapter_model.safetensors")


def lora_of(example, folder, method, adapter, *more):
    paths = "--checkpoint", folder, "--output", "", "--text", "", "--adapter", adapter
    given = [*map(str, paths), "--method", method, *more]
    folder = example.folder.Folder.open(folder)
    decoder = example.model.Decoder.of(folder, folder.dtype)
    return folder, example.methods.Lora(decoder, example.command.parse_arguments(given))


def losses(method, rows, params, *frozen):
    """Each row's, summed over its tokens."""
    read = lambda tree: jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, tree))
    loss, params, frozen = jax.jit(method.loss), read(params), read(frozen)
    return [loss(params, *frozen, row)[0] for row in rows]


def test_what_the_file_says(example, trained):
    config, tensors = adapters(trained[2])
    assert config["base_model_name_or_path"] == "org/model"
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj"]
    assert config["target_modules"] == [*kinds, "v_proj"]
    modules = {name.split(".")[-3] for name in tensors}
    assert modules == {*config["target_modules"]}


def test_gone_on_with(example, trained, tmp_path):
    """From the same numbers, by their rank and alpha, under the same name."""
    path, method, first = trained
    folder, lora = lora_of(example, path, method, first)
    _, tensors = adapters(first)
    np.testing.assert_equal(lora.first(folder), tensors)
    lora.save(folder, tmp_path / "again", lora.first(folder))
    assert adapters(tmp_path / "again")[0] == adapters(first)[0]
    np.testing.assert_equal(adapters(tmp_path / "again")[1], tensors)


def test_merged(example, trained, tmp_path, capsys):
    """The adapters' loss, by their method; all but matrices is as it was."""
    path, method, first = trained
    main(example, path, None, tmp_path / "merged", "--adapter", str(first), "--merge")
    said = capsys.readouterr().out
    assert said.startswith(f"method: {method}, ")
    assert said.endswith(f"wrote {tmp_path / 'merged'}\n")
    folder, lora = lora_of(example, path, method, first)
    merged = example.folder.Folder.open(tmp_path / "merged")
    full = example.methods.Full(lora.decoder)
    rows = hf_folders.rows(example.text)[:2]
    wanted = losses(lora, rows, lora.first(folder), lora.read_frozen(folder))
    found = losses(full, rows, full.first(merged))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    plain = losses(full, rows, full.first(folder))
    assert not np.allclose(plain, wanted, rtol=1e-4)
    same = {n for n in folder.tensors if np.array_equal(folder[n], merged[n])}
    assert same == {n for n in folder.tensors if "proj" not in n}


OTHERS = {
    "dora": ({"use_dora": True}, {}, "use_dora=True is not computed"),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING"}, {}, "peft_type='PREFIX_TUNING'"),
    "another rank": ({"r": 8}, {}, r"has shape \(4, 32\)"),
    "another model": ({}, {"up": "upper"}, "is no adapter of a matrix"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_are_refused(example, trained, name, tmp_path):
    fields, renamed, says = OTHERS[name]
    folder, method, first = trained
    config, tensors = adapters(first)
    for before, after in renamed.items():
        tensors = {x.replace(before, after): y for x, y in tensors.items()}
    numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(example.folder.FolderError, match=says):
        lora_of(example, folder, method, tmp_path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "--text is missing"),
        ("--merge", "--text is missing"),
        ("--text a --merge", "need --method lora or qlora"),
        ("--text a --adapter b --method full", "need --method lora or qlora"),
        ("--text a --eval-text b --held-out 0.1", "give one of them"),
        ("--text a --steps 2 --epochs 3", "--steps and --epochs: give one of them"),
        ("--text a --rank 4", "--rank needs --method lora or qlora"),
        ("--text a --alpha 4", "--alpha needs --method lora or qlora"),
        ("--text a --base-name x", "--base-name needs --method lora or qlora"),
        ("--text a --adapter b --rank 4", "--rank: --adapter has its own"),
    ],
)
def test_arguments_that_need_others(example, more, says, capsys):
    given = ["--checkpoint", "a", "--output", "c", *more.split()]
    with pytest.raises(SystemExit, match="2"):
        example.command.main(given)
    assert says in capsys.readouterr().err


def test_both_losses_of_four_bits(example, folders, tmp_path, capsys):
    """Those of plain decoders, of the weights as they are and as NF4 has them."""
    folder, text = folders("qwen3"), tmp_path / "text.txt"
    text.write_text(TEXT)
    more = ["--method", "qlora", "--steps", "1"]
    main(example, folder, text, tmp_path / "out", *more)
    last = capsys.readouterr().out.splitlines()[-1]
    found = example.text.documents(text, example.run.tokenizer_of(folder))
    held = example.text.rows(example.text.divided(found, 0.1, 0)[1], 64)
    means = []
    for method in ("qlora", "lora"):
        opened, lora = lora_of(example, folder, method, tmp_path / "out")
        frozen = lora.read_frozen(opened)
        total = sum(losses(lora, held, lora.first(opened), frozen))
        means.append(f"{total / sum(x['weights'].sum() for x in held):.4f}")
    in_four_bits, own = means
    assert own != in_four_bits
    said = f"loss of {len(held)} rows: {in_four_bits} in NF4, {own} beside the folder's"
    assert last.startswith(said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_merged_as_peft_does(example, folders, method, tmp_path):
    """From PEFT's own adapters of two kinds of matrices, and into NF4's."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    hf_pair = pytest.importorskip("helpers.hf_pair")
    path = folders("qwen3")
    there = hf_pair.there(path)
    how = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    first = peft.get_peft_model(there, peft.LoraConfig(r=3, lora_alpha=7, **how))
    first.save_pretrained(tmp_path / "peft")
    folder, lora = lora_of(example, path, method, tmp_path / "peft", "--merge")
    assert {x.rpartition(".")[2] for x in lora.adapted} == {"q_proj", "down_proj"}
    there = hf_pair.there(path)
    if method == "qlora":
        blank = jax.tree.map(np.zeros_like, lora.first(folder))
        rounded = dict(lora.merged(folder, blank))
        for name, x in there.named_parameters():
            x.data = torch.tensor(np.array(rounded[name]))
    with torch.no_grad():
        merged = peft.PeftModel.from_pretrained(there, tmp_path / "peft")
        wanted = merged.merge_and_unload().state_dict()
    lora.save(folder, tmp_path / "merged", lora.first(folder))
    theirs = hf_pair.there(tmp_path / "merged").state_dict()
    for name, x in wanted.items():
        np.testing.assert_allclose(theirs[name], x, rtol=1e-6, atol=1e-7)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    _, lora = lora_of(example, path, method, tmp_path / "peft")
    lora.save(folder, tmp_path / "again", lora.first(folder))
    again = adapters(tmp_path / "again")[0]
    assert sorted(again.pop("target_modules")) == sorted(config.pop("target_modules"))
    config |= {"inference_mode": True, "lora_dropout": 0.0}
    assert {n: again[n] for n in config} == config
