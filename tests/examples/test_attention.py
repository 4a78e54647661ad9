"""The examples' attention: plain numbers, and cuDNN's kernel where a GPU has it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import attention as module
from examples.attention import attention, has_cudnn, has_products
from helpers import aot


def plain(query, key, value, mask):
    """With all scores, in float32."""
    times = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, times, -2) for x in (key, value))
    scores = jnp.einsum("...thd,...shd->...hts", query, key) * query.shape[-1] ** -0.5
    shares = jax.nn.softmax(jnp.where(mask[..., None, :, :], scores, -1e30), -1)
    return jnp.einsum("...hts,...shd->...thd", shares, value)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one document"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["a row", "rows"])
def test_numbers(batch, packed):
    """And gradients; keys of several queries' heads, and documents of a row."""
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, heads: jax.random.normal(key, (*batch, 24, heads, 16))
    given = [draw(key, heads) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)]
    segments = jnp.broadcast_to(jnp.arange(24) // 7 * packed, (*batch, 24))
    mask = jnp.tril(segments[..., :, None] == segments[..., None, :])
    *arrays, by = given
    found, pull = jax.vjp(lambda *x: attention(*x, mask if packed else None), *arrays)
    wanted, pull_plain = jax.vjp(lambda *x: plain(*x, mask), *arrays)
    for a, b in zip((found, *pull(by)), (wanted, *pull_plain(by)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def device(capability="9.0", version="cuda 13000"):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(client=client, compute_capability=capability)


@pytest.mark.parametrize(
    ("there", "length", "head", "dtype", "wanted"),
    [
        (device(), 512, 128, "bfloat16", True),
        (device("8.9"), 512, 128, "float16", True),
        (device("12.0"), 512, 64, "bfloat16", True),
        (device("9.0"), 512, 256, "bfloat16", True),
        (device("8.0"), 512, 256, "bfloat16", False),
        (device("7.5"), 512, 128, "float16", False),
        (device(), 511, 128, "bfloat16", False),
        (device(), 512, 100, "bfloat16", False),
        (device(), 512, 128, "float32", False),
        (device("gfx942", "rocm 7"), 512, 128, "bfloat16", False),
        (jax.devices()[0], 512, 128, "bfloat16", False),
    ],
)
def test_where_cudnn_is(there, length, head, dtype, wanted):
    """As JAX's checks say, and on a CPU never."""
    query = jax.ShapeDtypeStruct((2, length, 4, head), dtype)
    assert has_cudnn(there, query) == wanted


@pytest.mark.parametrize(
    ("there", "dtype", "wanted"),
    [
        (device(), "bfloat16", True),
        (device("7.5"), "bfloat16", False),
        (device("7.5"), "float16", True),
        (jax.devices()[0], "bfloat16", True),
        (jax.devices()[0], "float16", False),
    ],
)
def test_where_a_dtype_is_multiplied(there, dtype, wanted):
    assert has_products(there, jnp.dtype(dtype)) == wanted


LENGTH, HEADS = 4096, 32


def build(packed):
    def build(mesh):
        device, _ = aot.placements(mesh)
        shape = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=device)
        segments = jax.ShapeDtypeStruct((LENGTH,), "int32", sharding=device)
        heads = [shape(LENGTH, n, 128) for n in (HEADS, 8, 8)]

        def loss(query, key, value, segments):
            mask = jnp.tril(segments[:, None] == segments[None, :])
            seen = attention(query, key, value, mask if packed else None)
            return jnp.sum(jnp.square(seen.astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)), keep_unused=True), (*heads, segments)

    return build


@pytest.mark.compiler
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one document"])
def test_no_scores_on_an_h200(packed):
    """One call forward, one backward; XLA's own holds two bytes a score at least."""
    scores = HEADS * LENGTH**2
    with aot.with_cudnn():
        report = aot.h200(build(packed))
    assert report.hlo.count('custom_call_target="__cudnn$fmha') == 2
    assert report.device_temp < scores / 2
    others = aot.h200(build(packed))
    assert "cudnn" not in others.hlo and others.device_temp > 2 * scores


@pytest.mark.compiler
def test_a_t4_takes_bfloat16(monkeypatch):
    """XLA refuses the algorithm that `jax.nn` asks for."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="ALG_DOT_BF16_BF16_F32"):
        aot.h200(build(True), card="t4")
    monkeypatch.setattr(module, "has_products", lambda *_: False)
    aot.h200(build(True), card="t4")
    given = [x.astype("bfloat16") for x in jnp.ones((3, 8, 2, 4))]
    assert attention(*given).dtype == "bfloat16"
