"""What a transformation chooses of one layer, and otherwise of the stack of all."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po

LAYER = {
    "up": jnp.full((60, 90), 0.1),
    "down": jnp.full((90, 60), 0.2),
    "scale": jnp.linspace(0.5, 1.5, 60),
    "gain": jnp.float32(0.9),
}
PARAMS = {"embed": jnp.eye(30, 60), "layers": [LAYER] * 3}
BATCH = jnp.arange(20) % 7


def loss(params, batch):
    x = params["embed"][batch]
    for layer in params["layers"]:
        x = (
            x
            + jnp.tanh(layer["scale"] * x @ layer["up"]) @ layer["down"] * layer["gain"]
        )
    return jnp.mean(x**2)


def by_shape(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_name(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: path[-1].key != "scale", params
    )


def by_layer(updates, params):
    rates = 0.5 ** jnp.arange(3)
    scaled = lambda u: u * rates.reshape(-1, *[1] * (u.ndim - 1))
    return updates | {"layers": jax.tree.map(scaled, updates["layers"])}


def labelled(adamw):
    label = lambda params: jax.tree.map(
        lambda wide: "wide" if wide else "narrow", by_shape(params)
    )
    return optax.partition({"wide": adamw(1e-2), "narrow": optax.sgd(1e-2)}, label)


def rated(adamw):
    each = {n: optax.inject_hyperparams(adamw)(rate) for n, rate in [(1, 1e-2), (2, 1)]}
    return optax.partition(
        each, lambda p: jax.tree.map(lambda x: min(max(x.ndim, 1), 2), p)
    )


#: How a transformation is made of `optax.adamw`, or of ours.
TOLD = {
    "mask": lambda adamw: adamw(1e-2, weight_decay=0.5, mask=by_shape),
    "masked": lambda adamw: optax.masked(adamw(1e-2), by_shape),
    "guarded": lambda adamw: po.apply_if_finite(TOLD["mask"](adamw), 3),
    "partition": labelled,
    "rates": rated,
    "freeze": lambda adamw: optax.chain(
        adamw(1e-2), optax.masked(optax.set_to_zero(), by_shape)
    ),
}
SILENT = {
    "plain": lambda adamw: adamw(1e-2, weight_decay=0.5),
    "named": lambda adamw: adamw(1e-2, weight_decay=0.5, mask=by_name),
    "schedule": lambda adamw: adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "injected": lambda adamw: optax.inject_hyperparams(adamw)(1e-2),
    "chained": lambda adamw: optax.chain(optax.add_noise(0.0, 0.0, 0), adamw(1e-2)),
}
MODEL = po.split_layers(loss, PARAMS, BATCH)


ours = functools.partial(po.paged_adamw, min_paged_size="1B")
eight_bits = functools.partial(po.paged_adamw_8bit, min_paged_size="1B")


def apart(make):
    """How far a step of Optax on stacked parameters is from one on the loss's own."""
    gradients = jax.grad(loss)(PARAMS, BATCH)
    tx = make(optax.adamw)
    step = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])
    stacked = step(MODEL.stack(gradients), MODEL.stack(PARAMS))
    alone = step(gradients, PARAMS)
    return max(
        float(np.max(np.abs(x - y)))
        for x, y in zip(
            jax.tree.leaves(MODEL.unstack(stacked)), jax.tree.leaves(alone), strict=True
        )
    )


@pytest.mark.parametrize("adamw", [optax.adamw, ours, eight_bits])
@pytest.mark.parametrize("name", TOLD)
def test_choices_by_shape_are_told(name, adamw):
    with pytest.warns(
        UserWarning, match="of one layer otherwise than their stack"
    ) as told:
        po.layerwise_step(MODEL, TOLD[name](adamw))
    assert told[0].filename == __file__


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told_is_another_step(name):
    assert apart(TOLD[name]) > 1e-4


@pytest.mark.parametrize("adamw", [optax.adamw, ours, eight_bits])
@pytest.mark.parametrize("name", SILENT)
def test_what_chooses_by_no_shape_is_not(name, adamw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.layerwise_step(MODEL, SILENT[name](adamw))


@pytest.mark.parametrize("name", sorted({*SILENT} - {"chained"}))
def test_what_is_not_told_is_the_same_step(name):
    assert apart(SILENT[name]) < 1e-7


def test_what_is_written_for_stacks_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.layerwise_step(MODEL, optax.chain(ours(1e-2), optax.stateless(by_layer)))


@pytest.mark.parametrize("muon", [po.paged_muon, optax.contrib.muon])
def test_muon_is_refused(muon):
    with pytest.raises(ValueError, match="not element by element"):
        po.layerwise_step(MODEL, muon(1e-3))


def the_scales(params):
    return jax.tree.map(lambda named: not named, by_name(params))


NORMS = {
    "lamb": lambda: optax.lamb(1e-1),
    "paged_lamb": lambda: po.paged_lamb(1e-1, min_paged_size="1B"),
    "adaptive": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1.0)),
    "of vectors": lambda: optax.chain(
        optax.masked(optax.clip_by_block_rms(1e-3), the_scales),
        optax.sgd(1.0),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_stacks_that_are_updated_whole_are_refused(name):
    """Those of small layers, and of vectors. The step refuses those of matrices."""
    model = MODEL
    if name != "of vectors":
        small = jax.tree.map(lambda x: x[:8, :8] if x.ndim > 1 else x, PARAMS)
        small = jax.tree.map(lambda x: x[:8] if x.ndim == 1 else x, small)
        model = po.split_layers(loss, small, BATCH)
    with pytest.raises(ValueError, match=r"updates parameter .* norms or factors"):
        po.layerwise_step(model, NORMS[name]())


@pytest.mark.parametrize("name", ["mask", "lamb", "paged_lamb"])
def test_what_the_loss_has_stacked_is_optaxs(name):
    """Masks by shape, and norms of small stacks, are those of the loss's own tree."""

    def scanned(params, batch):
        turn = lambda x, each: (x + jnp.tanh(each["scale"] * x @ each["up"]), None)
        x, _ = jax.lax.scan(turn, params["embed"][batch], params["layers"])
        return jnp.mean(x**2)

    layers = {"up": jnp.full((3, 8, 8), 0.1), "scale": jnp.ones((3, 8))}
    params = {"embed": jnp.eye(30, 8), "layers": layers}
    tx = TOLD["mask"](optax.adamw) if name == "mask" else NORMS[name]()
    updates, _ = tx.update(jax.grad(scanned)(params, BATCH), tx.init(params), params)
    wanted = optax.apply_updates(params, updates)
    model = po.split_layers(scanned, params, BATCH)
    stacked = model.stack(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = jax.jit(po.layerwise_step(model, tx))
    made, *_ = step(stacked, tx.init(stacked), model.workspace(stacked), BATCH)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        model.unstack(made),
        wanted,
    )


def test_vectors_whose_stack_alone_is_coded_are_not_told():
    """One layer's are too few for codes; the stack's have them, and remainders."""
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    layer = jax.tree.map(cast, LAYER) | {"scale": cast(jnp.zeros(2000))}

    def loss(layers, x):
        for each in layers:
            x = x + jnp.tanh(x @ each["up"]) @ each["down"] * jnp.mean(each["scale"])
        return jnp.mean(x)

    x = jax.ShapeDtypeStruct((3, 60), jnp.bfloat16)
    model = po.split_layers(loss, [layer] * 3, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.layerwise_step(model, po.paged_adamw_8bit(1e-3, master_remainders=True))
