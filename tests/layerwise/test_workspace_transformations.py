"""The layerwise step of every transformation, and what it refuses."""

import jax
import optax
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, far, layerwise, plain_step, run


@pytest.mark.quick("injected")
@pytest.mark.parametrize(
    "make",
    [
        lambda paged: optax.chain(optax.clip(0.01), paged, optax.scale(0.5)),
        lambda paged: optax.masked(
            paged, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
        lambda paged: optax.partition(
            {"a": paged, "b": optax.sgd(1e-2)},
            lambda p: {name: "b" if name == "embed" else "a" for name in p},
        ),
        lambda paged: po.paged_adamw(
            optax.cosine_decay_schedule(1e-2, 10), per_parameter_steps=True, **SETTINGS
        ),
        lambda paged: optax.inject_hyperparams(po.paged_adamw)(1e-3),
        lambda paged: po.paged_lion(1e-3, **SETTINGS),
    ],
    ids=["chain", "masked", "partition", "per_parameter_steps", "injected", "lion"],
)
def test_transformations(make):
    """Whatever is element by element gives what it gives in an ordinary step."""
    tx = make(po.paged_adamw(1e-3, **SETTINGS))
    params = layered.parameters(3)
    plain_params, plain_state = params, tx.init(params)
    plain = plain_step(tx)
    for seed in range(2):
        plain_params, plain_state, *_ = plain(
            plain_params, plain_state, layered.batch(seed)
        )
    workspace = po.GradientWorkspace.allocate(params["layers"])
    params, state, *_ = run(
        layerwise(tx),
        params,
        tx.init(params),
        workspace,
        [layered.batch(seed) for seed in range(2)],
    )
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    assert far(params, plain_params) < 1e-6
    assert far(state, plain_state) < 1e-6
