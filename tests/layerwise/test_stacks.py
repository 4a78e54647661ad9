"""Stacks of layers, made of NumPy arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, far, layerwise
from helpers.reference import kinds
from paged_optax.backend.memory import on_host


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_offload_takes_numpy(dtype):
    """As a loader has them: to the host at once, in the dtypes that JAX gives them."""
    values = np.random.default_rng(0).normal(size=(4, 64, 128)).astype(dtype)
    layers = {"up": values, "scale": np.ones((4, 64), dtype)}
    found = po.offload(layers, min_size="16KiB")
    wanted = po.offload(jax.tree.map(jnp.asarray, layers), min_size="16KiB")
    for name in layers:
        assert isinstance(found[name], jax.Array)
        assert jax.typeof(found[name]) == jax.typeof(wanted[name])
        assert np.array_equal(np.asarray(found[name]), np.asarray(wanted[name]))
    assert on_host(found["up"]) and not on_host(found["scale"])
    # Of float64, JAX makes float32: half the bytes.
    small = po.offload(layers, min_size=64 * 128 * wanted["up"].dtype.itemsize + 1)
    assert not on_host(small["up"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "how", [{}, {"host_dtype": "float32"}, "deferred"], ids=["plain", "host", "defers"]
)
def test_a_step_takes_numpy(dtype, how):
    """Parameters, the workspace's and the state's alike, eager and compiled."""
    array = lambda x: np.asarray(x).astype(dtype)
    results = []
    for params in (layered.parameters(2), jax.tree.map(array, layered.parameters(2))):
        tx = po.paged_adamw(1e-3, **SETTINGS)
        given = how
        if how == "deferred":
            rest = {name: x for name, x in params.items() if name != "layers"}
            given = {"host_dtype": "float32", "rest": rest}
        workspace = po.GradientWorkspace.allocate(params["layers"], **given)
        args = params, tx.init(params), workspace
        step = layerwise(tx, max_norm=0.05)
        results.append((jax.jit(step)(*args, layered.batch()), args, step))
    found, args, step = results[1]
    assert far(found[:2], results[0][0][:2]) == 0
    if dtype == np.float64:  # which JAX has as float32
        assert far(step(*args, layered.batch())[:2], found[:2]) < 1e-5


@pytest.mark.parametrize(
    "layers",
    [
        {"0": {"w": jnp.ones((3, 64, 64)), "b": jnp.ones((3, 64))}},
        [{"w": jnp.ones((3, 64, 64))}, {"w": jnp.ones((3, 64, 64))}],
        (jnp.ones((3, 64, 64)), jnp.ones((3, 64, 64))),
        (jnp.ones((3, 64, 64)), jnp.ones((3, 64))),
        {"w0": jnp.ones((3, 64)), "w1": jnp.ones((3, 64))},
        jnp.ones((3, 64, 64)),
    ],
)
def test_parts_of_a_layer_may_have_numbers(layers):
    """Where they are stacked."""
    workspace = po.GradientWorkspace.allocate(layers)
    assert jax.tree.map(jnp.shape, workspace.gradients) == jax.tree.map(
        lambda x: x.shape[1:], layers
    )
    po.offload(layers, 0)


@pytest.mark.parametrize("codec", [None, "bfloat16", "dynamic_int8"])
def test_moments_of_offloaded_layers_that_are_not_paged(codec):
    """They are on the device, though their parameters are not."""
    layers = po.offload({"kernel": jnp.ones((4, 256, 512))})
    params = {"layers": layers}
    for how in ({"device_budget": None}, {"min_paged_size": "1GiB"}):
        tx = po.paged_adamw(1e-3, codec=codec, **how)
        state = tx.init(params)
        assert not any(map(on_host, jax.tree.leaves(state)))
        assert kinds(state) == kinds(po.abstract_state(tx, params))
