"""A warning points at the line of the user's program, and not at one of a library."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po

PARAMS = {"w": jnp.ones((64, 128))}
GRADIENTS = {"w": jnp.full((64, 128), 0.5)}


def source_line(text, function):
    """The line of this file in which a function has a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, x in enumerate(lines) if text in x)


def lines_told(call, words):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [(x.filename, x.lineno) for x in told if words in str(x.message)]


def stepping(tx):
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)  # here
        return optax.apply_updates(params, updates), state

    return step


def compiled_with_examples():
    tx = po.paged_adamw(1e-3, min_paged_size=0)
    po.jit_step(stepping(tx), PARAMS, tx.init(PARAMS), GRADIENTS)  # here


def compiled_when_called():
    tx = po.paged_adamw(1e-3, min_paged_size=0)
    step = po.jit_step(stepping(tx))
    step(PARAMS, tx.init(PARAMS), GRADIENTS)  # here


@pytest.mark.parametrize("call", [compiled_with_examples, compiled_when_called])
def test_a_step_that_donates_nothing(call):
    told = lines_told(call, "nothing is donated")
    assert told == [(__file__, source_line("# here", call))]


def chained(adamw):
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@pytest.mark.parametrize("around", [lambda tx: tx, chained], ids=["alone", "chained"])
@pytest.mark.parametrize("compiled", [True, False])
def test_moments_on_the_device(around, compiled):
    tx = around(po.paged_adamw(1e-3, min_paged_size=0))
    moved = jax.device_put(tx.init(PARAMS), jax.memory.Space.Device)
    step = jax.jit(stepping(tx)) if compiled else stepping(tx)
    told = lines_told(lambda: step(PARAMS, moved, GRADIENTS), "are in device memory")
    assert told == [(__file__, source_line("# here", stepping))]


def test_parameters_that_nothing_says_how_to_divide():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("x",), auto)
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P("x")))
    adamw = lambda rate: po.paged_adamw(rate, min_paged_size=0)
    tx = optax.inject_hyperparams(adamw)(1e-3)
    state = tx.init(params)
    step = jax.jit(stepping(tx))
    told = lines_told(lambda: step(params, state, params), "shardings=None")
    assert told == [(__file__, source_line("# here", stepping))]


def test_a_plan_that_needs_a_larger_pool(monkeypatch):
    no_room = lambda arrays, limit=None: None if limit is None else 1
    monkeypatch.setattr("paged_optax.backend.pinned_pool.pinned_bytes", no_room)
    call = lambda: po.plan(po.paged_adamw(1e-3), PARAMS)
    told = lines_told(call, "of pinned host memory")
    assert told == [(__file__, call.__code__.co_firstlineno)]
