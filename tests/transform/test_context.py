"""An update depends on its arguments and on what `paged` was given: nothing before it
counts, and all else that it is told is in the key of JAX's trace caches."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import stacked

PAGED: Any = {"page_size": 4096, "min_paged_size": 0}
PARAMS: Any = {"a": jnp.full((64, 64), 0.5), "b": jnp.full((64, 64), -1.0)}
FAR = jax.sharding.AbstractMesh((64,), ("data",))


def mesh_of(count=8):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def divided(mesh: Mesh, *spec: Any) -> Any:
    """The parameters, by rows if no more is said."""
    return jax.device_put(PARAMS, NamedSharding(mesh, P(*spec or ("data",))))


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def trained(update, tx, params, steps=2):
    state = tx.init(params)
    for _ in range(steps):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    return params


def adam(params, steps=2):
    return trained(jax.jit(optax.adam(0.1).update), optax.adam(0.1), params, steps)


def looks(tx: Any) -> dict[str, Any]:
    """What looks at a transformation, on a mesh that is not there."""
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(FAR, P("data"))
        ),
        PARAMS,
    )
    return {
        "plan of a mesh": lambda: po.plan(tx, PARAMS, mesh=FAR),
        "plan of shapes": lambda: po.plan(tx, described),
        "abstract_state": lambda: po.abstract_state(tx, described),
    }


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("look", looks(None))
def test_who_only_looks_changes_nothing(look, sharded):
    """Neither before `init` nor after it."""
    params = divided(mesh_of()) if sharded else PARAMS
    tx = po.paged_adam(0.1, **PAGED)
    for _ in range(2):
        looks(tx)[look]()
        state = tx.init(params)
        looks(tx)[look]()
        updates, _ = jax.jit(lambda *args: tx.update(*args))(params, state, params)
        same(optax.apply_updates(params, updates), adam(PARAMS, steps=1))


@pytest.mark.parametrize("look", looks(None))
def test_who_looks_tells_nothing(look):
    """Where `init` has seen nothing, nothing is known."""
    tx = po.paged_adam(0.1, **PAGED)
    looks(tx)[look]()
    params = divided(mesh_of())
    state = po.paged_adam(0.1, **PAGED).init(params)
    with pytest.warns(UserWarning, match="shardings=None, and nothing else"):
        lowered = jax.jit(tx.update).lower(params, state, params)
    assert "manual" not in lowered.as_text()


@pytest.mark.parametrize(
    "other",
    [
        lambda: PARAMS,
        lambda: jax.tree.map(np.asarray, PARAMS),
        lambda: divided(mesh_of(4)),
    ],
    ids=["a copy", "in NumPy", "on fewer devices"],
)
def test_a_second_init_elsewhere(other):
    """The types of arrays name their mesh, and what was seen there is followed."""
    tx = po.paged_adam(0.1, **PAGED)
    params = divided(mesh_of())
    state = tx.init(params)
    there = other()
    same(trained(jax.jit(tx.update), tx, there), adam(PARAMS))
    text = jax.jit(tx.update).lower(params, state, params).as_text()
    assert "manual" in text  # as the first said


def test_shardings_are_for_all():
    """What was asked for holds, whatever `init` is given."""
    mesh = mesh_of()
    tx = po.paged_adam(0.1, shardings=NamedSharding(mesh, P("data")), **PAGED)
    tx.init(PARAMS)
    same(trained(jax.jit(tx.update), tx, divided(mesh)), adam(PARAMS))


def test_an_init_that_failed_said_nothing():
    asked = []

    def init(params):
        if not asked:
            asked.append(params)
            raise RuntimeError("no memory")
        return optax.adam(0.1).init(params)

    tx = po.paged(optax.GradientTransformation(init, optax.adam(0.1).update), **PAGED)
    with pytest.raises(RuntimeError):
        tx.init(PARAMS)
    same(trained(jax.jit(tx.update), tx, divided(mesh_of())), adam(PARAMS))


def test_plans_of_a_jitted_init_are_equal():
    tx = po.paged_adam(0.1, **PAGED)
    inside = optax.GradientTransformation(jax.jit(tx.init), tx.update)
    first, second = (po.plan(inside, PARAMS) for _ in range(2))
    assert first == second == po.plan(tx, PARAMS)


@pytest.mark.quick("bfloat16-2")
@pytest.mark.parametrize(
    ("codec", "layers"), [("bfloat16_stochastic", 1), ("bfloat16", 2)]
)
def test_a_jitted_update_in_a_layerwise_step_and_out_of_it(codec, layers):
    """One trace serves a layer, a look and an ordinary step only if all are alike."""
    params = {"layers": {"w": jnp.full((layers, 64, 64), 0.01)}}
    tx = po.paged_adamw(0.1, codec=codec, **PAGED)
    inside = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
    state = tx.init(params)

    def layerwise():
        model = po.LayerwiseModel(stacked.start, stacked.layer, stacked.finish)
        step = po.layerwise_step(model, inside)
        return jax.eval_shape(
            step, params, state, model.workspace(params), stacked.BATCH
        )

    layerwise()
    ordinary = jax.jit(inside.update)(params, state, params)
    same(ordinary, jax.jit(lambda *args: tx.update(*args))(params, state, params))
    layerwise()


def test_python_state_read_by_an_eager_update():
    """A closure's learning rate, set anew between steps as any Python code may."""
    rate = 0.5
    trace = optax.trace(0.9)

    def update(updates, state, params=None):
        updates, state = trace.update(updates, state, params)
        return jax.tree.map(lambda u: -rate * u, updates), state

    plain: Any = optax.GradientTransformation(trace.init, update)
    paged = po.paged(plain, **PAGED)
    ours, theirs = paged.init(PARAMS), plain.init(PARAMS)
    for rate in (0.5, 0.25, 0.5, -1.0):  # noqa: B007
        updates, ours = paged.update(PARAMS, ours, PARAMS)
        wanted, theirs = plain.update(PARAMS, theirs, PARAMS)
        same(updates, wanted)


@pytest.mark.parametrize("name", ["a loop", "a lambda", "an array"])
def test_an_eager_update_is_compiled_once(name, caplog):
    """What is traced anew at each step computes the same: a jaxpr counts as a value."""

    def update(updates, state, params=None, *, value_fn: Any = None, **extra_args):
        if name == "a loop":
            body = lambda _, x: x + jnp.matmul(x, x) / 64
            made = jax.tree.map(lambda u: jax.lax.fori_loop(0, 2, body, u), updates)
        elif name == "a lambda":
            made = jax.tree.map(value_fn, updates)
        else:
            made = jax.tree.map(lambda u: u * jnp.arange(64.0), updates)
        return made, jax.tree.map(lambda s, u: 0.5 * s + u, state, updates)

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    plain: Any = optax.GradientTransformationExtraArgs(zeros, update)
    paged = po.paged(plain, **PAGED)
    ours, theirs = paged.init(PARAMS), plain.init(PARAMS)
    step = lambda tx, state: tx.update(PARAMS, state, value_fn=lambda x: -x)
    for number in range(3):
        updates, theirs = step(plain, theirs)
        with jax.log_compiles(number > 0):
            made, ours = step(paged, ours)
        chex.assert_trees_all_close(made, updates, rtol=1e-6)
        same(ours, theirs)
    assert "Compiling" not in caplog.text


def test_python_state_read_by_init():
    start = [1.0]

    def init(params):
        first = lambda x: jnp.full_like(x, start[0])
        return optax.TraceState(jax.tree.map(first, params))

    inner = optax.GradientTransformation(init, optax.trace(0.9).update)
    tx = po.paged(inner, **PAGED)
    for value in (1.0, 2.0):
        start[0] = value
        same(tx.init(PARAMS), inner.init(PARAMS))
