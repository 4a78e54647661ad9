"""No copy between host and device is without a start, on any card's compiler."""

import dataclasses
import functools

import pytest

import paged_optax as po
from helpers import aot, decoder
from helpers.programs import updating
from helpers.runtime_counts import RuntimeCounts
from paged_optax.backend.platforms import GPU_NEEDS_RAW_INDEX
from paged_optax.planning.models import DECODERS

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.skipif(GPU_NEEDS_RAW_INDEX, reason="there all goes in turn"),
]

MODELS = [
    "gemma3-270m",
    "qwen3-0.6b",
    "gemma3-1b",
    "llama3.2-1b",
    "gemma-2b",
    "gemma2-2b",
    "llama3.2-3b",
    "qwen3-4b",
    "gemma3-4b-text",
    "llama2-7b",
]
CARDS = ["h200", "rtx4090", "l4", "t4"]


def of_four_layers(name):
    """A model's sizes; more layers take as many instructions, and more turns."""
    sizes = dataclasses.replace(DECODERS[name], layers=4)
    names = (field.name for field in dataclasses.fields(sizes))
    return decoder.Decoder(**{name: getattr(sizes, name) for name in names})


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", MODELS)
def test_each_begins_ahead(name, card):
    """An update and a layerwise step, with the options that `jit_step` gives."""
    model, tx = of_four_layers(name), po.paged_adamw(1e-4)
    options = aot.options_on(card)
    compile_for = functools.partial(aot.h200, card=card, options=options)
    for build in (updating(tx, model.shapes()), decoder.layerwise(model, tx)):
        report = compile_for(build)
        counts = RuntimeCounts.of(report.hlo)
        assert counts.transfers_up > 0 and counts.transfers_down > 0
        assert counts.sync_transfers == counts.host_copies == report.host_temp == 0
