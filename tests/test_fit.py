"""`what_fits` against XLA's own bytes, for a decoder in miniature."""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import aot, decoder
from helpers.programs import whole_tree


class Short(decoder.Decoder):
    """Sixteen tokens, so that activations count for nothing."""

    def batch(self, sharding, size=(1, 16)):
        return super().batch(sharding, size)


# Its embedding is as large as six layers: what is counted of either shows.
MODEL = Short(512, 512, 128, 1536, 8, vocabulary=32768)
ADAMW = optax.adamw(1e-4)
PAGES = {"page_size": "256KiB"}
PAGED = po.paged(ADAMW, **PAGES)


BUILD = {
    "resident": lambda: decoder.ordinary(MODEL, ADAMW),
    "whole tree offloaded": lambda: decoder.ordinary(MODEL, whole_tree(ADAMW)),
    "paged": lambda: decoder.ordinary(MODEL, PAGED),
    "layerwise": lambda: decoder.layerwise(MODEL, PAGED),
    "layerwise, weights on host": lambda: decoder.layerwise(
        MODEL, PAGED, weights_on_host=True
    ),
}


#: Of XLA's bytes and ours, how far apart: it overlaps what is summed here, and holds
#: more at a time of a tree that is offloaded as a whole.
SHARES = {
    "resident": (0.95, 1.05),
    "whole tree offloaded": (0.9, 1.25),
    "paged": (0.8, 1.03),
    "layerwise": (0.8, 1.03),
    "layerwise, weights on host": (0.7, 1.03),
}


@pytest.mark.quick("weights on host")
@pytest.mark.compiler
@pytest.mark.parametrize("way", BUILD)
def test_against_xla(way):
    ways = po.what_fits(
        MODEL.shapes(), ADAMW, device_memory="1GiB", codec=None, **PAGES
    )
    (row,) = (row for row in ways if row.way == way)
    report = aot.h200(BUILD[way]())
    least, most = SHARES[way]
    assert least <= report.device_total / row.device <= most
    assert report.host_total == pytest.approx(row.host, rel=0.01)


def test_moments_and_link_are_those_of_the_plan():
    params = MODEL.shapes()
    ways = po.what_fits(
        params,
        optax.lion(1e-4),
        device_memory="1GiB",
        master_dtype="float32",
        link_gigabytes_per_second=50.0,
    )
    assert [row.way for row in ways][2:4] == ["paged", "paged, dynamic_int8"]
    for row, codec in zip(ways[2:4], (None, "dynamic_int8"), strict=True):
        tx = po.paged_lion(1e-4, codec=codec, master_dtype="float32")
        plan = po.plan(tx, params, link_gigabytes_per_second=50.0)
        assert (row.moments, row.host) == (plan.device_bytes, plan.host_bytes)
        assert (row.scratch, row.link_seconds) == (
            plan.scratch_bytes,
            plan.link_seconds,
        )


def numbered(form):
    """Two layers of 64 float32 values, and an embedding of 32."""
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rest = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return {form.format(i): {"kernel": shape} for i in range(2)} | {"embed": rest}


@pytest.mark.parametrize("form", ["layers_{}", "model.layers.{}.mlp", "{}"])
def test_layers_by_number(form):
    *_, layerwise, _ = po.what_fits(numbered(form), device_memory="1MiB")
    assert layerwise.gradients == 4 * (64 + 32)


def test_layers_stacked_under_another_key():
    stack = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    params = {"model": {"blocks": {"kernel": stack}}}
    *_, layerwise, _ = po.what_fits(params, device_memory="1MiB", layers="blocks")
    assert layerwise.gradients == 4 * 64


def test_a_model_without_layers():
    params = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    ways = po.what_fits(params, device_memory=4 * 64 * 3)
    assert not any("layerwise" in row.way for row in ways)
    assert "no layers" in str(ways).lower()
    assert ways.fitting == ()


@pytest.mark.slow
def test_what_the_table_says(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "8")
    ways = po.what_fits(po.model_shapes("1B"), device_memory="4GiB")
    text = str(ways)
    assert "fits 4.0 GiB" in text and " over" in text and " left" in text
    assert "8.0 GiB of host memory" not in text  # 2 x 2 bytes of 1 billion are less
    ways = po.what_fits(po.model_shapes("8B"), device_memory="8GiB")
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=34" in str(ways)


@pytest.mark.parametrize("argument", ["device_memory", "page_size"])
def test_a_size_that_is_none(argument):
    sizes = {"device_memory": "1GiB"} | {argument: "24 gigs"}
    with pytest.raises(ValueError, match=f"{argument}='24 gigs'"):
        po.what_fits(numbered("{}"), **sizes)
