"""Other people's training scripts, with `paged_adamw` in place of `optax.adamw`.

The oracle is the same script with Optax's own.
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
from helpers.programs import leaf_shapes, on_device, state_on
from paged_optax.backend.memory import nbytes, on_host

#: Each script in `clients`, and the package that it is written for.
CLIENTS = {
    "mesh_trainer": "flax",
    "nnx_checkpoint": "flax",
    "linen_bytes": "flax",
    "equinox_filtered": "equinox",
    "haiku_classifier": "haiku",
    "numpyro_svi": "numpyro",
    "jaxopt_solver": "jaxopt",
    "blackjax_vi": "blackjax",
}

#: Matrices and their codes are paged, biases are not.
PAGED = 1 << 14

#: How far losses may be apart, relatively, and parameters, on average and anywhere: by
#: roundings, or in eight bits by parts of the learning rate, which is 1e-3 everywhere.
OPTIMIZERS = {
    po.paged_adamw: {"losses": 1e-6, "parameters": (1e-6, 1e-6)},
    po.paged_adamw_8bit: {"losses": 1e-3, "parameters": (2e-4, 5e-3)},
}


def plain_adamw(learning_rate, shardings=None):
    return optax.adamw(learning_rate)


def trained(client, adamw, folder):
    folder.mkdir()
    return client.train(adamw, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_client(name, tmp_path):
    if importlib.util.find_spec(CLIENTS[name]) is None:
        pytest.skip('not installed: pip install ".[clients]"')
    client = importlib.import_module(f"clients.{name}")
    losses, params, state = trained(client, plain_adamw, tmp_path / "optax")
    assert losses[-1] < losses[0]
    large = [x for x in jax.tree.leaves(state) if nbytes(x) >= PAGED]
    assert len(large) >= 2
    for paged_adamw, allowed in OPTIMIZERS.items():
        adamw = functools.partial(paged_adamw, min_paged_size=PAGED, on_moved="raise")
        found = trained(client, adamw, tmp_path / paged_adamw.__name__)
        np.testing.assert_allclose(found[0], losses, rtol=allowed["losses"])
        assert jax.tree.structure(found[1]) == jax.tree.structure(params)
        apart = jax.tree.map(lambda x, y: np.abs(np.subtract(x, y)), found[1], params)
        mean, most = allowed["parameters"]
        assert all(x.mean() <= mean and x.max() <= most for x in jax.tree.leaves(apart))
        assert not any(map(on_host, jax.tree.leaves(found[1])))
        moments = [x for x in jax.tree.leaves(found[2]) if nbytes(x) >= PAGED]
        assert len(moments) == len(large)
        assert all(x.sharding.memory_kind == "pinned_host" for x in moments)
        assert all(map(on_host, moments))
        eight_bits = [jnp.issubdtype(x.dtype, jnp.integer) for x in moments]
        assert set(eight_bits) == {paged_adamw is po.paged_adamw_8bit}


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
@pytest.mark.parametrize("adamw", OPTIMIZERS)
def test_a_loop_of_steps_on_accelerators(adamw, compile_for):
    """What NumPyro and JAXopt compile: a state that a loop hands from step to step."""
    side = 1024

    def build(mesh):
        tx = adamw(1e-2)
        params = leaf_shapes({"w": (side, side)})
        given = on_device(mesh, params), state_on(mesh, tx, params)

        def step(carry):
            params, state = carry
            gradients = jax.grad(lambda params: jnp.mean(params["w"] ** 2))(params)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        unfinished = lambda carry: optax.tree.norm(carry[0]) > 1.0
        run = lambda carry: jax.lax.while_loop(unfinished, step, carry)
        return jax.jit(run, donate_argnums=0), (given,)

    report = compile_for(build)
    assert report.host_arguments > 2 * side * side
    assert report.host_aliased == report.host_arguments == report.host_outputs
    assert report.host_temp == 0
    assert report.device_temp < 3 * 4 * side * side
