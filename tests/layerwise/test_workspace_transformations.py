"""The layerwise step of every transformation, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS, far, layerwise, plain_step, run


@pytest.mark.slow
def test_master_weights_and_bfloat16():
    """bfloat16 weights, float32 masters on the host, float32 accumulation."""
    params = layered.parameters(3, dtype=jnp.bfloat16)
    tx = po.paged_adamw(1e-2, master_dtype="float32", **SETTINGS)
    workspace = po.GradientWorkspace.allocate(params["layers"], dtype="float32")
    state = tx.init(params)
    step = layerwise(tx, accumulate=True)
    batches = [layered.batch(shape=(4, 2, 8))] * 20
    args = params, state, workspace, batches[0]
    first = jax.jit(step)(*args)[3].loss
    params, state, workspace, output = run(step, params, state, workspace, batches)
    assert workspace.gradients["up"].dtype == jnp.float32
    assert params["layers"]["up"].dtype == jnp.bfloat16
    assert output.loss < first - 0.5
    master = optax.tree.get(state, "master")["layers"]["up"]
    assert master.sharding.memory_kind == "pinned_host"
    rounded = np.asarray(master).astype(jnp.bfloat16)
    assert np.mean(rounded != np.asarray(params["layers"]["up"])) < 0.02


@pytest.mark.slow
def test_codecs():
    """Coded moments are read and written layer by layer."""
    tx = po.paged_adamw_8bit(1e-3, **SETTINGS)
    params = layered.parameters(3)
    _, plain_state, *_ = plain_step(tx)(params, tx.init(params), layered.batch())
    workspace = po.GradientWorkspace.allocate(params["layers"])
    _, state, *_ = run(
        layerwise(tx), params, tx.init(params), workspace, [layered.batch()]
    )
    for found, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True
    ):
        assert found.sharding.memory_kind == wanted.sharding.memory_kind
        differs = np.asarray(found) != np.asarray(wanted)
        # Codes at a midpoint may fall either way with the last bit of a gradient.
        assert np.mean(differs) < 0.01 or found.dtype == jnp.float32


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


CODED = po.paged_adamw_8bit(1e-3, min_paged_size=0)


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (po.paged_lamb(1e-3), ("element by element", "layers", "paged_adamw")),
        (
            optax.chain(optax.clip_by_global_norm(1.0), po.paged_adam(1e-3)),
            ("`add` combines", "leave that out of tx", "max_norm="),
        ),
        (
            po.paged(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))),
            ("leave that out of tx", "max_norm="),
        ),
        (po.MultiSteps(po.paged_adam(1e-3), 2), ("accumulate=True", "MultiSteps")),
        (
            po.apply_if_finite(po.paged_adam(1e-3), 2),
            ("`reduce_and` combines", "apply_if_finite"),
        ),
        (optax.add_noise(0.1, 0.9, 0), ("element by element",)),
        (po.MultiSteps(CODED, 2), ("accumulate=True", "MultiSteps")),
        (optax.MultiSteps(CODED, 2), ("accumulate=True", "MultiSteps")),
        (optax.apply_if_finite(CODED, 2), ("`reduce_and` combines",)),
    ],
    ids=[
        *("lamb", "clip", "clip inside", "micro-steps", "finite", "noise"),
        *("coded micro-steps", "Optax's", "Optax's finite"),
    ],
)
def test_refused_transformations(tx, words):
    params = layered.parameters(3)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    with pytest.raises(ValueError) as error:
        layerwise(tx)(params, tx.init(params), workspace, layered.batch())
    for word in words:
        assert word in str(error.value)
    assert "outside" not in str(error.value)  # where the user has it already


def test_bad_input():
    params = layered.parameters(3)
    tx = po.paged_adamw(1e-3)
    workspace = po.GradientWorkspace.allocate(params["layers"])
    with pytest.raises(ValueError, match="clip='all'"):
        layerwise(tx, clip="all")
    with pytest.raises(ValueError, match="max_norm=0"):
        layerwise(tx, max_norm=0)
    with pytest.raises(ValueError, match="'layers'"):
        layerwise(tx)({"blocks": 1}, (), workspace, layered.batch())
    with pytest.raises(ValueError, match="lengths"):
        po.GradientWorkspace.allocate({"a": jnp.ones((3, 4)), "b": jnp.ones((2, 4))})
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        po.GradientWorkspace.allocate({"a": jnp.ones(())})
    other = po.layerwise_step(
        po.LayerwiseModel(
            layered.prologue,
            lambda weights, x, context, i: (x.astype(jnp.bfloat16), None),
            layered.epilogue,
        ),
        tx,
    )
    with pytest.raises(ValueError, match="bfloat16"):
        other(params, tx.init(params), workspace, layered.batch())
