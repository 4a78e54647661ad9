"""Transformations, masks, labels and dtypes that a layerwise step takes or refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import far
from helpers.stacked import SETTINGS, STACK, both, finish, layer, same, start


def large(params):
    """Chosen by what Optax sees: the size of a whole stack."""
    return jax.tree.map(lambda x: x.size > 5000, params)


def settled():
    """Its moment is zero, and then one half."""
    return po.paged(
        optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda updates, state, params=None: (
                jax.tree.map(jnp.subtract, updates, state),
                jax.tree.map(lambda x: jnp.full_like(x, 0.5), state),
            ),
        ),
        **SETTINGS,
    )


PARAMS = {
    "layers": {
        "w": jnp.full((2, 64, 64), 0.01),
        "v": jnp.ones((2, 64, 96)),
        "b": jnp.zeros((2, 64)),
    },
    "head": jnp.eye(64),
}
FUNCTIONS = (
    start,
    lambda w, x, c, i: (x + jnp.tanh(x @ w["w"] + w["b"]), None),  # not of "v"
    lambda rest, x, kept, batch: jnp.mean((x @ rest["head"]) ** 2),
)


def decayed(mask, **how):
    return po.paged_adamw(0.1, weight_decay=0.5, mask=mask, **how, **SETTINGS)


@pytest.mark.quick("masked", "labels", "settled")
@pytest.mark.parametrize(
    "make",
    [
        decayed,
        lambda by: optax.masked(po.paged_sgd(0.1, momentum=0.9, **SETTINGS), by),
        lambda by: optax.partition(
            {
                True: po.paged_sgd(0.1, **SETTINGS),
                False: po.paged_lion(0.2, **SETTINGS),
            },
            by,
        ),
        lambda by: decayed(by, per_parameter_steps=True),
        lambda by: decayed(by, codec={"head": "dynamic_int8"}),
        lambda by: optax.masked(settled(), by),
    ],
    ids=["decay", "masked", "labels", "own_steps", "coded_head", "settled"],
)
def test_masks_of_bools(make):
    """A mask or labels of whole stacks, as trees."""
    tx = make(large(PARAMS))
    batch = jax.random.normal(jax.random.key(0), (4, 64))
    found, wanted = both(PARAMS, tx, FUNCTIONS, batch)
    same(found[0], wanted[0], 1e-5)
    same(found[1], wanted[1], 1e-5)
    kind = lambda tree: jax.tree.map(lambda x: x.sharding.memory_kind, tree)
    assert kind(found[1]) == kind(tx.init(PARAMS))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dynamic_int8", "bfloat16", "bfloat16_stochastic"])
def test_coded_moments_chosen_by_shape(codec):
    """One layer's codes are updated alone: a mask must be given as it is, in bools."""
    params = {"layers": {"w": jnp.ones((2, 64, 64)), "v": jnp.ones((2, 128, 64))}}
    functions = (start, lambda w, x, c, i: (x + x @ w["w"], None), finish)
    make = lambda mask: po.paged_adamw(
        0.1, weight_decay=0.5, mask=mask, codec=codec, **SETTINGS
    )
    with pytest.raises(ValueError, match=r"\['w'\].*shape.*tree of bools"):
        both(params, make(large), functions)
    found, wanted = both(params, make(large(params)), functions)
    np.testing.assert_allclose(found[0]["layers"]["v"], 0.95, 1e-6)
    same(found[0], wanted[0], 1e-2)


@pytest.mark.slow
def test_coded_stacks_of_one_shape():
    """They share pages in a whole update, and are cut out of their stacks alone."""
    keys = jax.random.split(jax.random.key(0), 2)
    make = lambda key: 0.05 * jax.random.normal(key, (2, 64, 64))
    params = {"layers": {"gate": make(keys[0]), "up": make(keys[1])}}
    gated = lambda w, x, c, i: (x + jnp.tanh(x @ w["gate"]) * (x @ w["up"]), None)
    tx = po.paged_adamw(0.1, codec="dynamic_int8", **SETTINGS)
    batch = jax.random.normal(jax.random.key(1), (4, 64))
    found, wanted = both(params, tx, (start, gated, finish), batch)
    same(found[0], wanted[0], 1e-2)


def by_position():
    """Momentum that it keeps in a list, as no transformation of Optax does."""

    def update(updates, state, params=None):
        leaves, structure = jax.tree.flatten(updates)
        state = [0.9 * m + g for m, g in zip(state, leaves, strict=True)]
        return jax.tree.unflatten(structure, state), state

    init = lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)]
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("page", [lambda tx: tx, lambda tx: po.paged(tx, **SETTINGS)])
def test_moments_in_no_tree_of_the_parameters(page):
    """Which are whose cannot be told by their paths: no step forgets them."""
    tx = optax.chain(page(by_position()), optax.scale(-0.1))
    with pytest.raises(ValueError, match=r"state\[0\]\[0\].*structure"):
        both({"layers": STACK}, tx)


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
            optax.cosine_decay_schedule(1e-2, 10),
            per_parameter_steps=True,
            **layered.SETTINGS,
        ),
        lambda paged: optax.inject_hyperparams(po.paged_adamw)(1e-3),
        lambda paged: po.paged_lion(1e-3, **layered.SETTINGS),
    ],
    ids=["chain", "masked", "partition", "per_parameter_steps", "injected", "lion"],
)
def test_transformations(make):
    """Whatever is element by element gives what it gives in an ordinary step."""
    tx = make(po.paged_adamw(1e-3, **layered.SETTINGS))
    given = layered.parameters(3), [layered.batch(seed) for seed in range(2)]
    wanted = layered.by_optax(layered.loss, tx, *given)
    found = layered.trained(layered.MODEL, tx, *given)
    assert jax.tree.structure(found[1]) == jax.tree.structure(wanted[1])
    assert far(found[:2], wanted[:2]) < 1e-6


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
