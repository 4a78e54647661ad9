"""What XLA:GPU's runtime does in a step of Llama-3-8B, and in an update."""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import aot, decoder, step_model
from helpers.programs import placed, shardings, state_on
from paged_optax.backend.overlap import OVERLAPPING
from paged_optax.backend.versions import GPU_NEEDS_RAW_INDEX
from paged_optax.compiling.runtime_counts import RuntimeCounts
from steps import LLAMA_3_8B

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.skipif(GPU_NEEDS_RAW_INDEX, reason="there all goes in turn"),
]


@pytest.mark.parametrize("card", ["h200", "rtx4090"])
def test_layers_in_eight_bits(card):
    """8 sequences of 512 tokens; seconds by the model of an H200's rates."""
    tx = po.paged_adamw_8bit(1e-4)
    build = decoder.layerwise(LLAMA_3_8B, tx, size=(8, 512))
    options = {} if card == "h200" else OVERLAPPING
    report = aot.h200(build, card=card, options=options)
    counts = RuntimeCounts.of(report.hlo)
    print(counts)
    assert counts.kernels <= 8000
    assert counts.host_syncs <= 40
    assert counts.loop_turns <= 800
    assert counts.device_slices <= 2000
    assert counts.zero_copy_bytes == 0
    assert counts.host_copies == counts.rematerialized == report.host_temp == 0
    assert report.device_total <= 20.4 * 2**30
    low, high = step_model.between(report.hlo, step_model.H200, LLAMA_3_8B.layers)
    print(f"{low:.3f} to {high:.3f} s")
    assert low >= 0.58
    assert high <= 0.88


def shapes(layers):
    """Llama-3-8B of so many layers, each by itself: 9 leaves a layer, and 3."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    wide, key, inner, words = 4096, 1024, 14336, 128256
    layer = {
        **{name: leaf(wide, wide) for name in "qo"},
        **{name: leaf(wide, key) for name in "kv"},
        **{name: leaf(wide, inner) for name in ("gate", "up")},
        **{name: leaf(wide) for name in ("before", "between")},
        "down": leaf(inner, wide),
    }
    beside = {"embed": leaf(words, wide), "head": leaf(wide, words), "norm": leaf(wide)}
    return beside | {f"layer{i}": layer for i in range(layers)}


@pytest.mark.parametrize("make", [po.paged_adamw, po.paged_adamw_8bit])
def test_an_update_of_many_leaves(make):
    """No kernel reads or writes host memory, and the host is waited for at the end."""
    tx, params = make(1e-4), shapes(8)

    def build(mesh):
        device, _ = aot.placements(mesh)
        given = placed(params, device), state_on(mesh, tx, params)

        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings(given))
        return jitted, (*given, given[0])

    report = aot.h200(build)
    counts = RuntimeCounts.of(report.hlo)
    print(counts)
    assert counts.zero_copy_bytes == counts.host_copies == 0
    assert counts.zero_copy_up == counts.zero_copy_down == report.host_temp == 0
    assert counts.host_syncs <= 4
    assert report.device_temp <= 64 * 2**20
    assert report.host_aliased == report.host_arguments
