"""Adapters by hand on a frozen base: the numbers of `jax.grad` and Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import layered
from helpers.programs import AHEAD
from helpers.stacked import SETTINGS
from paged_optax.backend.memory import on_host
from paged_optax.layerwise import step as step_module

LAYERS, WIDTH, RANK, WORDS, STEPS = 4, 128, 32, 16, 3
RATE, MOST = 1e-2, 0.05
# Adam makes a whole update of a gradient that is nothing but rounding, unless this is
# larger.
EPS = 1e-4


def normal(seed, *shape):
    return 0.1 * jax.random.normal(jax.random.key(seed), shape)


def parameters():
    adapters = {
        "a": normal(0, LAYERS, WIDTH, RANK),
        "b": normal(1, LAYERS, RANK, WIDTH),
    }
    return {"layers": adapters, "head": normal(2, WIDTH, WORDS)}


def base():
    """The frozen tree: a matrix of each layer, in codes with scales."""
    kernel = normal(3, LAYERS, WIDTH, WIDTH)
    scale = jnp.max(jnp.abs(kernel), axis=1, keepdims=True) / 127
    codes = jnp.round(kernel / scale).astype(jnp.int8)
    layers = {"kernel": codes, "scale": scale}
    return {"layers": layers, "embed": normal(4, WORDS, WIDTH)}


def through(weights, fixed, x):
    kernel = fixed["kernel"] * fixed["scale"]
    return x + jnp.tanh(x @ kernel + x @ weights["a"] @ weights["b"])


def entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits[:, :-1], batch[:, 1:]).mean()


MODEL = po.LayerwiseModel(
    lambda rest, fixed, batch: (fixed["embed"][batch], None),
    lambda weights, fixed, x, context, i: (through(weights, fixed, x), None),
    lambda rest, fixed, x, kept, batch: entropy(x @ rest["head"], batch),
)


def plain_loss(params, frozen, batch):
    x = frozen["embed"][batch]
    for i in range(LAYERS):
        here = lambda tree, i=i: jax.tree.map(lambda w: w[i], tree["layers"])
        x = through(here(params), here(frozen), x)
    return entropy(x @ params["head"], batch)


def batches(accumulate):
    shape = (2, 4, 8) if accumulate else (4, 8)
    draw = lambda n: jax.random.randint(jax.random.key(n), shape, 0, WORDS)
    return [draw(n) for n in range(STEPS)]


@functools.cache
def by_optax(accumulate, max_norm):
    """The parameters that `jax.grad` and Optax make, and each step's loss and norm."""
    frozen = base()
    loss = lambda params, batch: plain_loss(params, frozen, batch)
    loss = layered.mean(loss) if accumulate else loss
    given = optax.adamw(RATE, eps=EPS), parameters(), batches(accumulate)
    return layered.by_optax(loss, *given, max_norm)[::2]


def layerwise(frozen, how):
    """The same by layerwise steps, of which a deferred one is finished."""
    how = {name: x for name, x in how.items() if name != "base_on_host"}
    given = parameters(), batches(how.get("accumulate", False)), frozen
    tx = po.paged_adamw(RATE, eps=EPS, **SETTINGS)
    return layered.trained(MODEL, tx, *given, **how)[::2]


def close(found, wanted):
    """The same tree, to 1e-5 of each leaf's largest number."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.max(np.abs(y)))


HOST = {"host_dtype": "float32", "max_norm": MOST}
DEFERRED = HOST | {"rest": True}
WAYS = {
    "plain": {},
    "clipped": {"max_norm": MOST},
    "gradients_on_host": HOST,
    "deferred": DEFERRED,
    "accumulated": {"accumulate": True},
    "accumulated_deferred": DEFERRED | {"accumulate": True},
    "base_on_host": {"base_on_host": True},
    "all_on_host": DEFERRED
    | {"base_on_host": True, "offloaded": 0, "activations_on_host": True},
}


# Where all gradients are waited for, or micro-batches are deferred, nothing is beside.
BESIDE = ("deferred", "accumulated", "base_on_host", "all_on_host")
CASES = [
    *((way, ()) for way in WAYS),
    *(pytest.param(way, ("cpu",), marks=AHEAD) for way in BESIDE),
]


@pytest.mark.quick(
    *("plain-in_turn", "clipped-in_turn", "deferred-in_turn"),
    *("base_on_host-in_turn", "base_on_host-beside"),
)
@pytest.mark.parametrize(
    ("way", "platforms"),
    CASES,
    ids=lambda x: x if isinstance(x, str) else "beside" if x else "in_turn",
)
def test_numbers_are_optaxs(monkeypatch, way, platforms):
    """Every step's loss and norm, and all parameters; the base is not written."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", platforms)
    how, frozen = WAYS[way], base()
    before = jax.tree.map(np.array, frozen)
    if how.get("base_on_host"):
        frozen["layers"] = po.offload(frozen["layers"], 0)
        assert on_host(frozen["layers"]["kernel"])
    found, said = layerwise(frozen, how)
    wanted, theirs = by_optax(how.get("accumulate", False), how.get("max_norm"))
    np.testing.assert_allclose(said, theirs, rtol=1e-5)
    close(found, wanted)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    if "max_norm" in how:
        assert float(theirs[0][1]) > MOST  # or nothing is clipped


def test_loss_to_evaluate():
    """The model's loss and its gradients, of a base on the host too."""
    frozen, params, batch = base(), parameters(), batches(False)[0]
    wanted = jax.jit(jax.value_and_grad(plain_loss))(params, frozen, batch)
    frozen["layers"] = po.offload(frozen["layers"], 0)
    close(jax.jit(jax.value_and_grad(MODEL.loss))(params, frozen, batch), wanted)
