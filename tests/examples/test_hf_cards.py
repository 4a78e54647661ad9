"""The way that `examples/finetune_hf` chooses for a card: XLA's own bytes fit."""

import importlib

import pytest

import paged_optax as po
from paged_optax.planning.cards import CARDS

pytest.importorskip("eqx_zoo", reason='pip install ".[hf]", from Python 3.12 on')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.usefixtures("one_device"),
]
MODELS = "Qwen3-4B", "Llama-3.1-8B", "gemma-3-4b"


@pytest.fixture(scope="module")
def real():
    importlib.import_module("helpers.hf_folders")  # where the example is
    return importlib.import_module("helpers.hf_real")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("card", ["rtx4090", "t4", "l4", "h200"])
@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_way_fits(real, name, card, method, monkeypatch):
    """Four sequences of 2048 tokens: it fits, and takes what was planned."""
    monkeypatch.setattr("attention.has_products", lambda *_: card != "t4")
    run = real.run_of(name, method)
    run.args.device_memory = CARDS[card].memory
    fits = run.fits(CARDS[card].memory)
    planned = run.needed(fits, run.way)
    total = real.compiled(run, card).device_total
    print(
        f"{name}, {card}, {method}: {run.way}, {planned / 2**30:.2f} GiB planned,"
        f" {total / 2**30:.2f} of XLA, of {fits.available / 2**30:.2f}"
    )
    assert total < fits.available
    assert total < 1.1 * planned


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_eight_cards_take_what_is_planned(real, method, monkeypatch):
    """A row each: XLA's bytes of one card, and of the host's weights none."""
    monkeypatch.undo()  # of one device
    run = real.run_of("Llama-3.1-8B", method, devices=8)
    run.args.way = "device"
    planned = run.needed(run.fits("100GiB"), "device")
    total = real.compiled(run, "h200").device_total
    print(f"{method}: {planned / 2**30:.2f} GiB planned, {total / 2**30:.2f} of XLA")
    assert total < 1.1 * planned
    assert planned < 1.25 * total


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_plan_has_what_the_command_counts(real, method):
    """Within a twentieth, and the gradients that the command keeps on the host."""
    run = real.run_of("Qwen3-4B", method)
    run.args.batch = 1
    how = {"batch": 1, "length": 2048, "rank": 16, "fused_head": True, "heads": 32}
    shapes, memory = po.model_shapes("qwen3-4b"), "100GiB"
    ways = po.what_fits(shapes, device_memory=memory, codec="dynamic_int8", **how)
    name = {"lora": "layerwise LoRA", "qlora": "layerwise QLoRA"}[method]
    for way, text in (("device", name), ("host", f"{name}, weights on host")):
        (row,) = (x for x in ways if x.way == text)
        needed = run.needed(run.fits(memory), way)
        assert abs(row.device - needed) < 0.05 * needed
