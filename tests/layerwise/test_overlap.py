"""A layer's update travels while the gradients of the next one are made."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po
from helpers import aot, decoder, layered, step_model
from helpers.layered import far
from helpers.programs import AHEAD
from helpers.stacked import SETTINGS, both, same
from paged_optax.layerwise import step as step_module
from paged_optax.layerwise.segments import ends_of

LAYERS = 8
MODEL = decoder.Decoder(
    hidden=1024, query=1024, key=512, inner=2816, layers=LAYERS, vocabulary=0
)


@pytest.mark.compiler
@pytest.mark.slow
@AHEAD
@pytest.mark.parametrize("card", ["h200", "rtx4090", "l4"])
@pytest.mark.parametrize("weights_on_host", [False, True], ids=["moments", "weights"])
def test_transfers_are_hidden(weights_on_host, card):
    """Of transfers half as long as what is computed, at most a third shows."""
    build = decoder.layerwise(
        MODEL,
        po.paged_adamw(1e-4, codec="bfloat16"),
        weights_on_host=weights_on_host,
        size=(8, 512),
    )
    report = aot.h200(build, card=card, options=aot.options_on(card))
    assert report.host_temp == 0
    hlo = report.hlo
    assert ".remat" not in hlo
    rates = {"flops": 600e12, "memory": 3.5e12}
    free = step_model.cost(hlo, step_model.Machine(math.inf, **rates), LAYERS)
    link = 2 * max(free.up, free.down) / free.compute
    step = step_model.cost(hlo, step_model.Machine(link, **rates), LAYERS)
    assert step.exposed <= free.compute / 2 / 3


def trained(monkeypatch, ahead, codec=None, offloaded=None):
    """Three steps of a decoder of four layers, with an output matrix of its own."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", ("cpu",) if ahead else ())
    key, small = jax.random.key(0), decoder.SMALL
    normal = lambda x: jax.random.normal(key, x.shape, x.dtype) * 0.02
    tokens = jax.random.randint(key, (2, 16), 0, 512)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, 1)}
    tx = po.paged_adamw(
        1e-3,
        codec=codec,
        master_dtype=codec and "float32",
        min_paged_size="16KiB",
        page_size="64KiB",
    )
    model = po.LayerwiseModel(small.prologue, small.layer, small.epilogue)
    params = jax.tree.map(normal, small.shapes())
    found = layered.trained(model, tx, params, [batch] * 3, offloaded=offloaded)
    return found[0], found[2]


@pytest.mark.slow
@AHEAD
@pytest.mark.parametrize(
    "how",
    [{"codec": "dynamic_int8"}, {"offloaded": "16KiB"}],
    ids=["int8", "offloaded"],
)
def test_numbers_are_those_of_turns(monkeypatch, how):
    """But for rounding, of layers whose leaves are alike, and of the output matrix.

    XLA:CPU fuses otherwise what is cut into segments. A last bit of a gradient may
    choose the next code of eight bits. Moments that are not written back make 0.1.
    """
    found = trained(monkeypatch, True, **how)
    wanted = trained(monkeypatch, False, **how)
    assert far(found, wanted) <= 1e-5


def test_segments_without_moments():
    """`optax.sgd` has none: then only weights travel, if they are on the host."""
    assert ends_of([0] * 4, [0] * 4, [0] * 4) == [0.25, 0.5, 0.75]
    assert ends_of([1, 3], [1, 3], [0, 0]) == [0.5]


def heavy(params):
    """Chosen by the size of a whole stack or matrix."""
    return jax.tree.map(lambda x: x.size >= 8192, params)


@pytest.mark.slow
@AHEAD
@pytest.mark.parametrize(
    ("layers", "how"),
    [
        (2, {}),
        (3, {"offloaded": "16KiB"}),
        (2, {"accumulate": True}),
        (3, {"accumulate": True, "recompute": False}),
    ],
    ids=["moments", "weights", "micro-batches", "saved"],
)
def test_numbers_are_optaxs(monkeypatch, layers, how):
    """In float64, where rounding is far below what a wrong layer's moments would do.

    The output matrix is updated with the layers but for micro-batches; leaves of a
    layer are alike, small, or empty; what decays and which rule updates goes by shape.
    """
    monkeypatch.setattr(step_module, "_OVERLAPPED", ("cpu",))
    with jax.enable_x64(True):
        keys = iter(jax.random.split(jax.random.key(0), 10))
        normal = lambda *shape: 0.1 * jax.random.normal(next(keys), shape, "float64")
        params = {
            "embed": normal(64, 64),
            "head": normal(32 * layers, 128),
            "layers": {
                "gate": normal(layers, 64, 65),
                "up": normal(layers, 64, 65),
                "down": normal(layers, 65, 64),
                "bias": normal(layers, 65),
                "scale": normal(layers),
                "none": normal(layers, 0, 3),
            },
        }

        def layer(w, x, context, i):
            y = x * w["scale"] + context
            y = jnp.tanh(y @ w["gate"] + w["bias"]) * (y @ w["up"])
            return x + y @ w["down"], None

        tx = optax.chain(
            po.paged_adamw(
                optax.cosine_decay_schedule(0.1, 9), mask=heavy(params), **SETTINGS
            ),
            optax.masked(po.paged_sgd(0.1, momentum=0.9, **SETTINGS), heavy(params)),
        )
        key = next(keys)
        random = lambda x: jax.random.uniform(key, x.shape)
        # A traced leaf has no sharding.
        some = lambda x: jax.device_put(random(x), getattr(x, "sharding", None))
        init = lambda params: jax.tree.map(
            lambda x: some(x) if x.ndim else x, tx.init(params)
        )
        batch = normal(*((3, 4, 64) if "accumulate" in how else (4, 64)))
        functions = (
            lambda rest, batch: (batch @ rest["embed"], rest["embed"][0]),
            layer,
            lambda rest, x, kept, batch: jnp.mean((x @ rest["head"][:64]) ** 2),
        )
        found, wanted = both(params, tx._replace(init=init), functions, batch, **how)
        same(found[0], wanted[0], 1e-12)
        same(found[1], wanted[1], 1e-12)
