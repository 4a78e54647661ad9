"""Models of other people's libraries, none of them changed, trained layer by layer.

The oracle is `jax.grad` of the same loss and Optax. Needs `.[clients]` and `.[tunix]`.
"""

import functools
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot
from helpers.programs import layerwise, placed
from helpers.split_trained import RATE, STEPS, by_layers, close, split, trained
from paged_optax.backend.memory import on_host
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix's, and Qwix's
]

#: Each script in `clients`, the package that it is written for, and its models.
NAMES = {
    (
        "split_haiku",
        "haiku",
    ): "by_name by_name_dropout by_name_remat_dropout layer_stack layer_stack_dropout",
    ("split_equinox", "equinox"): "list list_remat_dropout stacked"
    " stacked_remat_dropout",
    ("split_tunix", "tunix"): "qwen3 qwen3_tied qwen3_experts qwen3_block_remat"
    " qwen3_experts_decoder_remat qwen2 qwen2_block_remat llama3 llama3_tied"
    " llama3_decoder_remat gemma2 gemma3 gemma3_block_remat gemma3_decoder_remat gemma4"
    " gemma4_layer_inputs gemma4_experts llama3_lora llama3_qlora_nf4"
    " llama3_qlora_int8 qwen3_lora",
}
CASES = [(*script, x) for script, names in NAMES.items() for x in names.split()]

#: Some biases of keys have no gradient but roundings, of which Adam makes steps; no
#: longer if it adds this to their size.
EPS = 1e-4


def client(script, package):
    """The module of a package's models."""
    if importlib.util.find_spec(package) is None:
        pytest.skip('not installed: pip install ".[clients,tunix]"')
    return importlib.import_module(f"clients.{script}")


@pytest.mark.parametrize(("script", "package", "name"), CASES)
def test_trains_as_optax(script, package, name):
    loss, params, batch, *frozen = client(script, package).MODELS[name]()
    plain = optax.adamw(RATE, eps=EPS)
    wanted, theirs = trained(loss, params, frozen, [batch] * STEPS, plain)
    model = split(loss, params, batch, *frozen)
    before = jax.device_get([model.stack_frozen(x) for x in frozen])
    tx = po.paged_adamw(RATE, eps=EPS, page_size=4096, min_paged_size=0)
    donating = functools.partial(po.jit_step, donate_argnums=(0, 1, 2))
    where = {"compiled": donating, "on_host": True, "min_size": 0}
    stacked, losses, base = by_layers(model, tx, params, batch, frozen, **where)
    assert any(map(on_host, jax.tree.leaves(base))) == bool(frozen)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    assert theirs[-1] < theirs[0]
    close(model.unstack(stacked), wanted)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), before)


#: Weights of the layers on the host, and a sequence of 512 tokens a step; all on the
#: host, and four of 2048, one after the other; gradients and activations wait there.
WAYS = {
    "1 x 512": (True, None, 513, 2.3 if GPU_FETCHES_AHEAD else 2.7),
    "4 x 2048": ("all", 4, 2049, 3.5),
}


@pytest.mark.compiler
@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_qwen3_4b(way):
    """GiB of Tunix's own, with all its logits, in eight bits, on an H200."""
    on_host, parts, tokens, most = WAYS[way]
    loss, params = client("split_tunix", "tunix").qwen3_4b()
    batch = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    model = po.split_layers(loss, params, batch)
    tx = po.paged_adamw_8bit(1e-5, master_remainders=True)
    step = po.layerwise_step(
        model, tx, accumulate=parts is not None, activations_on_host=parts is not None
    )

    def build(mesh):
        device, _ = aot.placements(mesh)
        stacked = model.stack(placed(params, device), on_host=on_host)
        shape = batch.shape if parts is None else (parts, *batch.shape)
        given = jax.ShapeDtypeStruct(shape, batch.dtype)
        room = {"host_dtype": "bfloat16" if parts else None}
        return layerwise(mesh, step, model, tx, stacked, given, **room)

    total = aot.h200(build).device_total / 2**30
    print(f"{total:.3f} GiB")
    assert total <= most
