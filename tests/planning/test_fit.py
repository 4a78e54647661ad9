"""`what_fits` against XLA's own bytes, for a decoder in miniature."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import aot, decoder
from helpers.programs import whole_tree
from paged_optax import codecs


class Short(decoder.Decoder):
    """Sixteen tokens, so that activations count for nothing."""

    def batch(self, sharding, size=(1, 16)):
        return super().batch(sharding, size)


# Its embedding is as large as six layers: what is counted of either shows.
MODEL = Short(512, 512, 128, 1536, 8, vocabulary=32768)
ADAMW = optax.adamw(1e-4)
PAGES = {"page_size": "256KiB"}
PAGED = po.paged(ADAMW, **PAGES)


WEIGHTS, REST = {"weights_on_host": True}, {"rest_on_host": True}
#: How each is compiled; of XLA's bytes and ours, how far apart: it overlaps what is
#: summed here, and holds more at a time of a tree that is offloaded as a whole.
WAYS = {
    "resident": (decoder.ordinary, ADAMW, {}, 0.95, 1.05),
    "whole tree offloaded": (decoder.ordinary, whole_tree(ADAMW), {}, 0.9, 1.25),
    "paged": (decoder.ordinary, PAGED, {}, 0.8, 1.03),
    "layerwise": (decoder.layerwise, PAGED, {}, 0.8, 1.03),
    "layerwise, weights on host": (decoder.layerwise, PAGED, WEIGHTS, 0.7, 1.03),
    "layerwise, all on host": (decoder.layerwise, PAGED, WEIGHTS | REST, 0.7, 1.03),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("way", WAYS)
def test_against_xla(way):
    ways = po.what_fits(
        MODEL.shapes(), ADAMW, device_memory="1GiB", codec=None, **PAGES
    )
    (row,) = (row for row in ways if row.way == way)
    make, tx, how, least, most = WAYS[way]
    report = aot.h200(make(MODEL, tx, **how))
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
        codec="dynamic_int8",
    )
    assert [row.way for row in ways][2:] == [
        "paged",
        "paged, dynamic_int8",
        "layerwise, dynamic_int8",
        "layerwise, dynamic_int8, weights on host",
        "layerwise, dynamic_int8, all on host",
    ]
    for row, codec in zip(ways[2:4], (None, "dynamic_int8"), strict=True):
        tx = po.paged_lion(1e-4, codec=codec, master_dtype="float32")
        plan = po.plan(tx, params, link_gigabytes_per_second=50.0)
        assert (row.moments, row.host) == (plan.device_bytes, plan.host_bytes)
        planned = plan.scratch_bytes, plan.link_seconds
        assert (row.scratch, row.link_seconds) == planned


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def numbered(form):
    """Two layers of 64 float32 values, and an embedding of 32."""
    layers = {form.format(i): {"kernel": shape(8, 8)} for i in range(2)}
    return layers | {"embed": shape(8, 4)}


@pytest.mark.parametrize("form", ["layers_{}", "model.layers.{}.mlp", "{}"])
def test_layers_by_number(form):
    *_, layerwise, _, on_host = po.what_fits(numbered(form), device_memory="1MiB")
    assert layerwise.gradients == 4 * (64 + 32)
    assert on_host.gradients == 4 * 64


def test_a_list_of_layers_is_no_stack():
    """Its matrices and vectors begin with one width; a digit may come before."""
    layers = [{"w": shape(64, 64), "b": shape(64)}] * 8
    wanted = po.what_fits({"blocks": layers}, device_memory="1GiB")
    assert wanted[3].gradients == 4 * 64 * 65
    for params in (
        {"layers": layers},
        {"gpt2": {f"h_{i}": layers[0] for i in range(8)}},
    ):
        found = po.what_fits(params, device_memory="1GiB")
        assert [*map(dataclasses.astuple, found)] == [*map(dataclasses.astuple, wanted)]


def test_a_norm_beside_the_layers_takes_no_pages():
    params = {"layers": {"w": shape(8, 1024, 1024)}, "norm": shape(1024)}
    *_, there, every = po.what_fits(params, device_memory="1GiB")
    assert every.way == "layerwise, all on host"
    assert every.device <= there.device


def test_layers_stacked_under_another_key():
    params = {"model": {"blocks": {"kernel": shape(3, 8, 8)}}}
    *_, layerwise, _ = po.what_fits(params, device_memory="1MiB", layers="blocks")
    assert layerwise.gradients == 4 * 64
    assert "stacked" not in ways_of(params, layers="blocks")


def ways_of(params, *args, device_memory="1MiB", **arguments):
    """The text, in one line."""
    ways = po.what_fits(params, *args, device_memory=device_memory, **arguments)
    return " ".join(str(ways).split())


@pytest.mark.parametrize("form", ["layers_{}", "model.layers.{}.mlp"])
def test_numbered_layers_are_told_what_takes_them(form):
    first = form.format(0).removesuffix(".mlp")
    wanted = f"from '{first}' on: split_layers takes a loss of them as it is."
    assert wanted in ways_of(numbered(form))


@pytest.mark.parametrize(
    "params",
    [
        {"kernel": shape(8, 8)},
        {"norm1": shape(64), "norm2": shape(64), "w": shape(8, 8)},
        {"layer_0": {"w": shape(8, 8)}, "layer_1": {"w": shape(8, 16)}},
    ],
    ids=["none", "numbered arrays", "not alike"],
)
def test_a_model_without_layers(params):
    ways = po.what_fits(params, device_memory=4 * 64 * 3)
    assert not any("layerwise" in row.way for row in ways)
    assert "takes layers that are alike, stacked on the leading" in ways_of(params)
    assert ways.fitting == ()


@pytest.mark.parametrize("name", ["lamb", "muon", "adafactor"])
def test_an_optimizer_that_is_not_layerwise(name):
    """Of these `layerwise_step` takes none; Adafactor's scale is of a whole stack."""
    inner = getattr(optax, name, None) or optax.contrib.muon
    params = {"layers": {"w": shape(4, 256, 512)}, "embed": shape(1024, 512)}
    ways = po.what_fits(params, inner(1e-3), device_memory="1GiB")
    assert not any("layerwise" in row.way for row in ways)
    assert "an optimizer that works element by element" in ways_of(params, inner(1e-3))


def test_codec_is_that_of_paged():
    default = lambda f: inspect.signature(f).parameters["codec"].default
    assert default(po.what_fits) == default(po.paged)
    params = {"w": shape(1024, 512)}
    rows = po.what_fits(params, device_memory="1GiB")
    assert rows[2].host == po.plan(po.paged_adamw(1e-3), params).host_bytes
    each = {"mu": "bfloat16", "nu": codecs.DynamicInt8(signed=False)}
    rows = po.what_fits(params, device_memory="1GiB", codec=each)
    assert rows[3].way == "paged, bfloat16 and DynamicInt8"


@pytest.mark.parametrize(
    ("name", "value", "share"),
    [
        ("", "", 0.75),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", 0.9),
        ("XLA_CLIENT_MEM_FRACTION", ".5", 0.5),
        ("XLA_CLIENT_MEM_FRACTION", "2", 1.0),
    ],
)
def test_fits_in_what_jax_takes(name, value, share, monkeypatch):
    """Resident AdamW of n bytes of parameters takes 4 n of the device."""
    if name:
        monkeypatch.setenv(name, value)
    params = {"w": shape(1024, 1024)}
    device = 16 * 2**20 + 8
    for more in (2**20, -(2**20)):
        ways = po.what_fits(params, device_memory=int((device + more) / share))
        assert (ways[0] in ways.fitting) == (more > 0)
        assert ways.available == pytest.approx(device + more, abs=1)
        text = " ".join(str(ways).split())
        assert f"{ways.available / 2**20:.1f} MiB" in text or share == 1
        assert f"{ways.machine.memory / 2**20:.1f} MiB" in text


def test_a_larger_share_is_named_where_it_helps():
    shapes = po.model_shapes("8B")
    text = ways_of(shapes, device_memory="24GiB")
    assert "MEM_FRACTION=0.95 JAX takes 22.8 GiB, and these fit too: layerwise." in text
    assert "these fit too" not in ways_of(shapes, device_memory="99GiB")


def test_small_models_are_in_mib():
    text = ways_of(po.model_shapes("60M"), device_memory="24GiB")
    assert "in MiB" in text and "in GiB" not in text and " 115.2 " in text
    assert "in GiB" in ways_of(po.model_shapes("1B"), device_memory="24GiB")


@pytest.mark.slow
def test_what_the_table_says(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "8")
    text = ways_of(po.model_shapes("1B"), device_memory="4GiB")
    assert "3.0 GiB, which JAX takes of a GPU of 4.0 GiB" in text
    assert "does not hand out" not in text  # 2 x 2 bytes of 1 billion are less
    text = ways_of(po.model_shapes("8B"), device_memory="8GiB")
    assert "does not hand out so much" in text
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=49" in text


@pytest.mark.parametrize("codec", [None, "dynamic_int8"])
@pytest.mark.parametrize("form", ["layers_{}", "stacked"])
def test_arrays_in_host_memory_are_all_of_a_way(form, codec):
    layer = {"w": shape(256, 512), "b": shape(512)}
    params = {"layers": jax.tree.map(lambda x: shape(6, *x.shape), layer)}
    if form != "stacked":
        params = {form.format(i): layer for i in range(6)}
    params |= {"embed": shape(4096, 256), "head": shape(256, 4096)}
    ways = po.what_fits(params, device_memory="1GiB", codec=codec)
    assert sum(row.host for row in ways) > 0
    # Stacks are made before moments, and the gradient that waits comes last.
    *_, there, every = ways
    assert 6 * 4 * 256 * 512 in there.arrays[:2]
    assert every.arrays[-1] == 4 * 4096 * 256


POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
LIMIT = f"export {POOL}="


@pytest.fixture
def needs_the_host(monkeypatch):
    """One way, with 4.6 GiB of small arrays in host memory; XLA's pool as it is."""
    monkeypatch.delenv(POOL, raising=False)
    ways = po.what_fits({"w": shape(1024, 1024)}, device_memory="1GiB")
    row = dataclasses.replace(ways[2], arrays=(47 << 20,) * 100)
    return dataclasses.replace(ways, rows=(row,))


def notes_of(ways):
    """The notes, in one line."""
    return " ".join(ways.notes().split())


def test_what_the_pool_takes_of_the_host(needs_the_host):
    text = notes_of(needs_the_host)
    assert "paged needs 4.6 GiB pinned, and XLA's pool on a GPU takes 8.0 GiB" in text
    assert text.endswith(f"before JAX starts, the pool takes 5.0 GiB: {LIMIT}5")
    assert f"{LIMIT}5" in needs_the_host.notes().splitlines()
    machine = dataclasses.replace(needs_the_host.machine, gpu=False)
    tpu = dataclasses.replace(needs_the_host, machine=machine)
    assert "pool" not in notes_of(tpu) and "LIMIT_GB" not in notes_of(tpu)


def test_no_limit_is_named_where_none_helps(needs_the_host, monkeypatch):
    """The variable is set, or the pool takes no more than it must."""
    monkeypatch.setenv(POOL, "5")
    assert "takes 5.0 GiB for it." in notes_of(needs_the_host)
    assert LIMIT not in notes_of(needs_the_host)
    monkeypatch.delenv(POOL)
    row = dataclasses.replace(needs_the_host[0], arrays=(2**30,) * 4)
    ways = dataclasses.replace(needs_the_host, rows=(row,))
    assert "takes 4.0 GiB for it." in notes_of(ways)
    assert LIMIT not in notes_of(ways)
    nothing = dataclasses.replace(row, arrays=())
    assert "pool" not in notes_of(dataclasses.replace(ways, rows=(nothing,)))


def test_the_pool_of_the_way_to_choose(monkeypatch):
    """It needs less than the one that needs most."""
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    shapes = po.model_shapes("8B")
    chosen = "layerwise, weights on host needs 42.9 GiB"
    assert chosen in notes_of(po.what_fits(shapes, device_memory="24GiB"))
    most = "layerwise, all on host needs 45.9 GiB"
    assert most in notes_of(po.what_fits(shapes, device_memory="99GiB"))
    assert "pool" not in notes_of(po.what_fits(shapes, card="v5e"))


def test_tokens_from_which_the_link_is_free():
    """Six operations a value and token, of the backward pass, take as long."""
    shapes = po.model_shapes("8B")
    ways = po.what_fits(shapes, device_memory="24GiB", teraflops=600)
    text = " ".join(str(ways).split())
    for way in [x for x in ways if x.way.startswith("layerwise")]:
        pattern = rf"{way.way}: the link is free from ([\d,]+) tokens a step"
        (tokens,) = re.findall(pattern, text)
        products = 6 * 8_030_261_248 * int(tokens.replace(",", ""))
        np.testing.assert_allclose(products / 600e12, way.link_seconds, 1e-4)
    assert "tokens" not in str(po.what_fits(shapes, device_memory="24GiB"))
