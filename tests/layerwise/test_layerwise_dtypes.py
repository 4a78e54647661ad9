"""A layerwise step in other dtypes: complex parameters, norms in float64."""

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers.stacked import SETTINGS, both, finish, layer, same


def widened(rest, x, kept, batch):
    """A loss whose gradients are as large as the batch says."""
    return jnp.mean(jnp.abs(x) ** 2) * batch["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("host_dtype", [None, jnp.complex64])
def test_complex_norm(max_norm, host_dtype):
    """Imaginary parts count."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "emb": jax.random.normal(keys[0], (64, 64), jnp.complex64) * 0.1,
        "layers": {"w": jax.random.normal(keys[1], (2, 64, 64), jnp.complex64) * 0.1},
    }
    functions = (lambda rest, batch: (batch @ rest["emb"], None), layer, finish)
    batch = jax.random.normal(keys[2], (4, 64), jnp.complex64)
    tx = po.paged_sgd(1.0, **SETTINGS)
    found, wanted = both(
        params, tx, functions, batch, max_norm=max_norm, host_dtype=host_dtype
    )
    same(found[3].gradient_norm, wanted[2])
    same(found[0], wanted[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("host_dtype", [None, "float32", "float64"])
@pytest.mark.parametrize("rest_dtype", ["float32", "float64"])
def test_norm_in_float64(rest_dtype, host_dtype):
    """Squares beyond float32's largest number are none beyond float64's."""
    with jax.enable_x64(True):
        params = {
            "shift": jnp.zeros(64, rest_dtype),  # Optax squares it in its own dtype
            "layers": {"w": jnp.full((2, 64, 64), 0.01, "float64")},
        }
        functions = (
            lambda rest, b: (b["x"] + 1e-12 * rest["shift"].astype("float64"), None),
            layer,
            widened,
        )
        batch = {"x": jnp.ones((4, 64), "float64"), "scale": jnp.float64(1e21)}
        found, wanted = both(
            params,
            optax.sgd(1.0),
            functions,
            batch,
            max_norm=0.5,
            host_dtype=host_dtype,
        )
        assert found[3].gradient_norm.dtype == "float64"
        assert float(wanted[2]) > 1e20
        same(found[3].gradient_norm, wanted[2], 1e-6)
        same(found[0], wanted[0], 1e-6)


@pytest.mark.parametrize("host_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**17])
def test_float16_beyond_its_largest_norm(host_dtype, clip, scale):
    """A scaled loss, whose gradients have a norm that float16 cannot hold."""
    params = {
        "head": jnp.full(64, 1.0, "float16"),
        "layers": {"w": jnp.full((2, 64, 64), 1 / 64, "float16")},
    }
    batch = jnp.ones((8, 64), "float16")
    wide = lambda tree: optax.tree.cast(tree, jnp.float32)

    def epilogue(rest, x, kept, batch):
        return (wide(x) @ wide(rest["head"])).mean() * scale

    model = po.LayerwiseModel(
        lambda rest, batch: (batch, None),
        lambda w, x, context, i: (jnp.tanh(x @ w["w"]), None),
        epilogue,
    )
    tx = po.paged_sgd(1 / scale, momentum=0.9, master_dtype="float32", **SETTINGS)
    workspace = po.GradientWorkspace.allocate(params["layers"], host_dtype=host_dtype)
    step = jax.jit(po.layerwise_step(model, tx, max_norm=scale, clip=clip))
    *_, output = found = step(params, tx.init(params), workspace, batch)

    def loss(params, batch):
        for w in params["layers"]["w"]:
            batch = jnp.tanh(batch @ w)
        return epilogue(params, batch, None, None)

    gradients = wide(jax.grad(loss)(params, batch))
    norm = optax.tree.norm(gradients)
    assert (float(norm) > 65504) == (scale > 2.0**10)
    same(output.gradient_norm, norm, 1e-2)
    parts = [gradients]
    if clip == "layer":
        layers = gradients["layers"]["w"]
        parts = [gradients["head"], *layers]
    limit = optax.clip_by_global_norm(scale)
    clipped = [limit.update(part, limit.init(part))[0] for part in parts]
    head = clipped[0] if clip == "layer" else clipped[0]["head"]
    moved = wide(found[0]["head"]) - 1
    same(moved, -head / scale, 2e-2)
