"""Models of other people's libraries, none of them changed, trained layer by layer.

The oracle is `jax.grad` of the same loss and Optax. Needs `.[clients]` and `.[tunix]`.
"""

import importlib
import importlib.util

import jax
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers.split_trained import RATE, STEPS, close, split, trained
from paged_optax.backend.memory import on_host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix's, and Qwix's
]

#: Each script in `clients`, the package that it is written for, and its models.
MODELS = {
    ("split_haiku", "haiku"): (
        "by_name",
        "by_name_dropout",
        "by_name_remat_dropout",
        "layer_stack",
        "layer_stack_dropout",
    ),
    ("split_equinox", "equinox"): (
        "list",
        "list_remat_dropout",
        "stacked",
        "stacked_remat_dropout",
    ),
    ("split_tunix", "tunix"): (
        "qwen3",
        "qwen3_tied",
        "qwen3_experts",
        "qwen3_block_remat",
        "qwen3_experts_decoder_remat",
        "qwen2",
        "qwen2_block_remat",
        "llama3",
        "llama3_tied",
        "llama3_decoder_remat",
        "gemma2",
        "gemma3",
        "gemma3_block_remat",
        "gemma3_decoder_remat",
        "gemma4",
        "gemma4_layer_inputs",
        "gemma4_experts",
        "llama3_lora",
        "llama3_qlora_nf4",
        "llama3_qlora_int8",
        "qwen3_lora",
    ),
}
CASES = [(*script, name) for script, names in MODELS.items() for name in names]

#: Some biases of keys have no gradient but roundings, of which Adam makes steps; no
#: longer if it adds this to their size.
EPS = 1e-4


@pytest.mark.parametrize(("script", "package", "name"), CASES)
def test_trains_as_optax(script, package, name):
    if importlib.util.find_spec(package) is None:
        pytest.skip('not installed: pip install ".[clients,tunix]"')
    made = importlib.import_module(f"clients.{script}").MODELS[name]
    loss, params, batch, *frozen = made()
    plain = optax.adamw(RATE, eps=EPS)
    wanted, theirs = trained(loss, params, frozen, [batch] * STEPS, plain)
    model = split(loss, params, batch, *frozen)
    stacked = model.stack(params)
    base = [model.stack_frozen(x, on_host=True, min_size=0) for x in frozen]
    fetched = [x for x in jax.tree.leaves(base) if on_host(x)]
    assert bool(fetched) == bool(frozen)
    before = jax.device_get(base)
    tx = po.paged_adamw(RATE, eps=EPS, page_size=4096, min_paged_size=0)
    state, workspace = tx.init(stacked), model.workspace(stacked)
    args = stacked, state, workspace, batch, *base
    step = po.layerwise_step(model, tx)
    step, losses = po.jit_step(step, *args, donate_argnums=(0, 1, 2)), []
    for _ in range(STEPS):
        stacked, state, workspace, output = step(
            stacked, state, workspace, batch, *base
        )
        losses.append(output.loss)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    assert theirs[-1] < theirs[0]
    close(model.unstack(stacked), wanted)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), before)
