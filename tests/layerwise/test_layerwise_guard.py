"""`apply_if_finite` around the transformation of a layerwise step: Optax's counts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paged_optax as po
from helpers import layered
from helpers.layered import SETTINGS
from helpers.programs import AHEAD
from paged_optax.layerwise import step as step_module

LAYERS, MOST, ERRORS = 3, 0.05, 2


def prologue(rest, batch):
    return rest["embed"][batch["tokens"]], batch["poison"]


def layer(weights, x, context, i):
    """A poison of layer i spoils no gradient but that of its own matrix."""
    y = x * weights["norm"]["scale"]
    return x + jax.nn.gelu(y @ weights["up"]) @ weights["down"], (
        context[i] * jnp.sum(weights["up"])
    )


def epilogue(rest, x, kept, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels(
        x @ rest["head"], batch["targets"]
    ).mean()
    return loss + kept.sum() + batch["poison"][-1] * rest["norm"].sum()


def loss(params, batch):
    x, context = prologue(params, batch)
    x, kept = jax.lax.scan(
        lambda x, given: layer(given[1], x, context, given[0]),
        x,
        (jnp.arange(LAYERS), params["layers"]),
    )
    return epilogue(params, x, kept, batch)


def batches_of(poisons, micro=0):
    """A batch for each poison, `(where, what)`; of micro-batches in the second."""
    made = []
    for seed, poison in enumerate(poisons):
        key = jax.random.key(seed)
        shape = (micro, 2, 8) if micro else (2, 8)
        tokens = jax.random.randint(key, shape, 0, layered.WORDS)
        spoiled = np.zeros((*shape[:-2], LAYERS + 1))
        if poison is not None:
            spoiled[(1, poison[0]) if micro else poison[0]] = poison[1]
        made.append(
            {
                "tokens": tokens,
                "targets": jnp.roll(tokens, 1, axis=-1),
                "poison": jnp.asarray(spoiled),
            }
        )
    return made


NAN, INF = float("nan"), float("inf")
#: In a layer, in the rest; one at a time, and until an update is let through.
RUNS = {
    "one at a time": [None, (1, NAN), None, (LAYERS, INF), (0, NAN), None],
    "let through": [None, (LAYERS, NAN), (0, INF), (2, -INF), (1, NAN), None],
    # Values are finite, and the square of their norm is not.
    "large": [(1, 1e200), (LAYERS, 1e200), (0, NAN), (0, 1e200)],
}
WORKSPACES = {
    "two passes": (None, MOST),
    "host": ("host", None),
    "host, clipped": ("host", MOST),
    "deferred": ("deferred", MOST),
    "deferred, not clipped": ("deferred", None),
}


MODEL = po.LayerwiseModel(prologue, layer, epilogue)
counts = lambda state, _: [np.asarray(x) for x in state[:3]]


@functools.cache
def by_optax(run, max_norm, micro=0):
    params = layered.parameters(LAYERS, dtype=jnp.float64)
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    tx = optax.apply_if_finite(optax.chain(clip, optax.adamw(0.01)), ERRORS)
    given = tx, params, batches_of(RUNS[run], micro)
    whole = layered.mean(loss) if micro else loss
    params, state, said = layered.by_optax(whole, *given, look=counts)
    return params, state.inner_state[1], said


def trained(tx, params, batches, workspace, **how):
    held = {"host_dtype": params["embed"].dtype} if workspace else {}
    how |= held | {"rest": workspace == "deferred"}
    given = MODEL, tx, params, batches
    params, state, said = layered.trained(*given, look=counts, **how)
    assert isinstance(state, optax.ApplyIfFiniteState)
    return params, state.inner_state, said


def compare(found, wanted):
    for a, b in zip(found[2], wanted[2], strict=True):
        assert [x.tolist() for x in a] == [x.tolist() for x in b]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


FAST = ("two passes", "let through", 0), ("host, clipped", "large", 3)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "run", "micro"),
    [
        pytest.param(*case, marks=[] if case in FAST or case[0] == "deferred" else SLOW)
        for case in itertools.product(WORKSPACES, RUNS, (0, 3))
    ],
)
def test_is_optaxs(way, run, micro):
    """Counts after each step; parameters and moments at the end, NaN for NaN."""
    workspace, max_norm = WORKSPACES[way]
    with jax.enable_x64(True):
        batches = batches_of(RUNS[run], micro)
        tx = po.apply_if_finite(po.paged_adamw(0.01, **SETTINGS), ERRORS)
        params = layered.parameters(LAYERS, dtype=jnp.float64)
        how = {"max_norm": max_norm, "accumulate": bool(micro)}
        found = trained(tx, params, batches, workspace, **how)
        wanted = by_optax(run, max_norm, micro)
    spoiled = any(np.isnan(x).any() for x in jax.tree.leaves(wanted[0]))
    assert spoiled == (run == "let through")
    compare(found, wanted)


@pytest.mark.slow
@AHEAD
@pytest.mark.parametrize("run", list(RUNS))
def test_ahead(monkeypatch, run):
    """Updates that go beside the next forward pass."""
    monkeypatch.setattr(step_module, "_OVERLAPPED", ("cpu",))
    with jax.enable_x64(True):
        batches = batches_of(RUNS[run])
        tx = po.apply_if_finite(po.paged_adamw(0.01, **SETTINGS), ERRORS)
        params = layered.parameters(LAYERS, dtype=jnp.float64)
        found = trained(tx, params, batches, "deferred", max_norm=MOST)
        wanted = by_optax(run, MOST)
    compare(found, wanted)


@pytest.mark.quick("masters-two", "chain-two", "own steps-two")
@pytest.mark.parametrize("way", ["two passes", "host"])
@pytest.mark.parametrize(
    "inner",
    [
        po.paged_adamw_8bit(0.01, page_size=4096, min_paged_size=0),
        po.paged_adamw(optax.linear_schedule(0.1, 0, 9), master_dtype="float32"),
        optax.chain(po.paged_lion(0.01, **SETTINGS), optax.trace(0.9)),
        po.paged_adamw(0.01, per_parameter_steps=True, device_budget=None),
    ],
    ids=["8 bits", "masters", "chain", "own steps"],
)
def test_a_skipped_step_changes_no_bit(inner, way):
    """Neither of parameters nor of the state but for the wrapper's own counts."""
    workspace, max_norm = WORKSPACES[way]
    tx = po.apply_if_finite(inner, ERRORS)
    run = lambda poisons: trained(
        tx,
        layered.parameters(LAYERS),
        batches_of(poisons),
        workspace,
        max_norm=max_norm,
    )
    found, wanted = run([None, (1, NAN)]), run([None])
    assert found[2][-1][0] == 1
    for a, b in zip(*map(jax.tree.leaves, (found[:2], wanted[:2])), strict=True):
        assert a.sharding.memory_kind == b.sharding.memory_kind
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
