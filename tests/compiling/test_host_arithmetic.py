"""Arithmetic on host arrays is warned of before XLA fails of it, or copies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import paged_optax as po
from helpers import aot, decoder
from helpers.programs import on_device, square, state_on
from helpers.reference import SMALL_PAGES
from helpers.small import TX, make_step, small
from paged_optax.backend.platforms import GPU_COPIES_FOR_CONDITIONALS
from paged_optax.compiling import host_arithmetic
from paged_optax.compiling.host_arithmetic import reaches_host, warn_of_host_compute

odd = lambda step: step % 2 == 1  # noqa: E731
#: Optax's wrappers that select between host arrays or multiply them, and ours.
SKIPPING = {
    "MultiSteps": lambda of, tx: of.MultiSteps(tx, 3),
    "apply_if_finite": lambda of, tx: of.apply_if_finite(tx, 3),
    "conditionally_transform": lambda of, tx: of.conditionally_transform(tx, odd),
    "conditionally_mask": lambda of, tx: of.conditionally_mask(tx, odd),
    "lookahead": lambda of, tx: of.lookahead(tx, 3, 0.5, reset_state=True),
}
#: What XLA:GPU copies for a conditional in some versions only, and XLA:TPU never.
CONDITIONAL = set(SKIPPING) - {"MultiSteps", "lookahead"}


def traced(tx, wrapper="", params=None):
    gradients = params = small() if params is None else params
    if wrapper == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    step = make_step(("params", "state"), ("params", "state"), tx)
    return jax.make_jaxpr(step)(params, tx.init(params), gradients)


@pytest.mark.filterwarnings("ignore:optax.MultiSteps transfers")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", SKIPPING)
def test_optax_wrappers_are_warned_of_on_accelerators(name, platform):
    """Each by the name of its cure, which is not warned of."""
    jaxpr = traced(SKIPPING[name](optax, TX), name)
    copies = platform == "cuda" and GPU_COPIES_FOR_CONDITIONALS
    if copies or name not in CONDITIONAL:
        with pytest.warns(UserWarning, match=rf"on float32<host>.*paged_optax.*{name}"):
            warn_of_host_compute(jaxpr, platform)
    else:
        warn_of_host_compute(jaxpr, platform)
    warn_of_host_compute(jaxpr, "cpu")
    warn_of_host_compute(traced(SKIPPING[name](po, TX), name), platform)


def test_a_users_own_arithmetic_is_warned_of():
    state = TX.init(small())
    jaxpr = jax.make_jaxpr(lambda state: jax.tree.map(lambda x: x + x, state))(state)
    with pytest.warns(
        UserWarning, match=r"`add`.*test_host_arithmetic\.py:\d+.*device_put"
    ):
        warn_of_host_compute(jaxpr, "cuda")


WAYS = {
    "all": {},
    "weights": {"weights_on_host": True, "rest_on_host": True},
    "deferred": {"host_dtype": "float32", "max_norm": 1.0, "deferred": True},
    "activations": {"activations_on_host": True},
}


@pytest.mark.quick(
    "all-dynamic_int8", "weights-None", "deferred-dynamic_int4", "activations-None"
)
@pytest.mark.parametrize("codec", [None, "dynamic_int8", "dynamic_int4"])
@pytest.mark.parametrize("way", WAYS)
def test_no_layerwise_step_is_warned_of(way, codec):
    """And to look takes no time: a step holds the same functions many times over."""
    tx = po.paged_adamw(1e-2, codec=codec, **SMALL_PAGES)
    build = decoder.layerwise(decoder.SMALL, tx, size=(2, 16), **WAYS[way])
    jitted, args = build(Mesh(np.array(jax.devices()[:1]), ("x",)))
    jaxpr = jax.make_jaxpr(jitted)(*args)
    assert reaches_host(jaxpr)
    for platform in ("cuda", "tpu"):
        warn_of_host_compute(jaxpr, platform)
    # Each function once: every one of its equations would be met thousands of times.
    eqns = [id(x) for x, *_ in host_arithmetic._equations(jaxpr, (), set())]
    assert len(eqns) == len(set(eqns)) > 1000


@pytest.mark.quick("codec2", "master", "inner0")
@pytest.mark.parametrize(
    "paging",
    [
        {"codec": "dynamic_int8"},
        {"codec": "dynamic_int4"},
        {"codec": "bfloat16_stochastic"},
        {"master_dtype": "float32"},
        {"per_parameter_steps": True},
        {"inner": optax.lamb(1e-2)},
        {"inner": optax.contrib.muon(1e-2)},
        {"inner": optax.flatten(optax.adam(1e-2))},
        {"inner": optax.contrib.schedule_free_adamw(1e-2)},
    ],
    ids=lambda paging: "-".join(map(str, paging)),
)
def test_no_transformation_of_ours_is_warned_of(paging):
    paging = {"inner": optax.adamw(1e-2)} | paging
    tx = po.paged(**paging, **SMALL_PAGES)
    # Moments of few values are paged here too, and not computed on the host.
    jaxpr = traced(tx, params=small() | {"few": jnp.ones((5, 8))})
    for platform in ("cuda", "tpu"):
        warn_of_host_compute(jaxpr, platform)


@pytest.mark.compiler
def test_jit_step_warns_before_xla_fails():
    params = square(2)
    tx = optax.MultiSteps(po.paged_adamw(1e-3), 4)
    step = make_step(("params", "state"), ("params", "state"), tx)

    def build(mesh):
        params_there = on_device(mesh, params)
        example = params_there, state_on(mesh, tx, params), params_there
        po.jit_step(step, *example, donate_argnums=(0, 1))

    with pytest.warns(UserWarning, match="use paged_optax.MultiSteps"):
        with pytest.raises(jax.errors.JaxRuntimeError):
            aot.v5e(build)
